// SPDX-License-Identifier: Apache-2.0
// Tier: test. AttentionLayer on the golden layers: all runs of tests/data/layers within the tolerances
// of its index, and two layers of a real model under both of their namings.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "qkv/layer.h"
#include "qkv/weights.h"
#include "support/bounds.h"
#include "support/files.h"
#include "support/tensors.h"

namespace qkv::test {
namespace {

using Json = nlohmann::json;

Json read_json(const std::string& path) {
  std::ifstream file(path);
  EXPECT_TRUE(file.good()) << path;
  return Json::parse(file);
}

struct Tolerance {
  double attention, output;
  explicit Tolerance(const Json& tol) : attention(tol["attention"]), output(tol["output"]) {}
};

Mask mask_of_flag(const Json& flag) {
  if (flag.is_null()) return Mask::full();
  if (flag == "causal-top-left") return Mask::causal_top_left();
  if (flag == "causal-bottom-right") return Mask::causal_bottom_right();
  ADD_FAILURE() << "unknown mask " << flag;
  return Mask::full();
}

// The folder of a golden layer: in the tree, or, for the largest, in the shared data; empty if missing.
std::string layer_folder(const std::string& name) {
  const std::string shared = shared_data_folder();
  for (const std::string& folder : {data_path("layers/" + name), shared + "/layers/" + name}) {
    if (std::filesystem::is_directory(folder)) return folder + "/";
  }
  return "";
}

// One run: the layer on q, k, v and, if the file has one, its additive mask.
void expect_golden(const AttentionLayer& layer, const std::string& input_path,
                   const std::string& expected_path, const Mask& mask, const Tolerance& tolerance) {
  SCOPED_TRACE(input_path + " " + expected_path);
  const SafetensorsFile input = SafetensorsFile::open(input_path),
                        expected = SafetensorsFile::open(expected_path);
  const ConstTensor q = input.tensor("q"), k = input.tensor("k"), v = input.tensor("v");
  LayerOptions options;
  options.mask = mask;
  if (input.find("mask") != nullptr) options.bias = input.tensor("mask");
  const LayerConfig& c = layer.config();
  TestTensor output(DType::f32, {q.shape[0], q.shape[1], c.dim_out}),
      weights(DType::f32, {c.num_heads * q.shape[0], q.shape[1], k.shape[1]});
  layer.forward(q, k, v, {output.view(), weights.view()}, options);
  EXPECT_TRUE(within("attention", weights.values(), values(expected.tensor("attention")),
                     [&](size_t) { return tolerance.attention; }));
  EXPECT_TRUE(within("output", output.values(), values(expected.tensor("output")),
                     [&](size_t) { return tolerance.output; }));
}

TEST(LayerGolden, EveryRunOfTheIndex) {
  const Json index = read_json(data_path("layers/index.json"));
  int num_runs = 0;
  std::string missing;
  for (const Json& layer_case : index["cases"]) {
    const std::string folder = layer_folder(layer_case["name"]);
    if (folder.empty()) {
      num_runs += static_cast<int>(layer_case["runs"].size());
      missing.append(" ").append(layer_case["name"].get<std::string>());
      continue;
    }
    const LayerWeights weights = load_layer(folder + "weights.safetensors");
    EXPECT_EQ(weights.config.num_heads, layer_case["num_heads"]);
    EXPECT_EQ(weights.config.num_kv_heads, layer_case["num_kv_heads"]);
    EXPECT_EQ(weights.config.dim_k, layer_case["dim_k"]);
    EXPECT_EQ(weights.config.head_dim_v, layer_case["head_dim_v"]);
    EXPECT_EQ(weights.config.bias_o, layer_case["bias"]);
    const AttentionLayer layer(weights);
    for (const Json& run : layer_case["runs"]) {
      expect_golden(layer, folder + run["input"].get<std::string>(),
                    folder + run["expected"].get<std::string>(), mask_of_flag(run["mask_flag"]),
                    Tolerance(layer_case["tol_f32"]));
      ++num_runs;
    }
  }
  EXPECT_EQ(num_runs, 60);
  if (!missing.empty()) GTEST_SKIP() << "all but these, whose files are missing:" << missing;
}

TEST(LayerGolden, RealModel_BothLayersUnderBothNamings) {
  const std::string shared = shared_data_folder();
  if (shared.empty()) GTEST_SKIP() << "the folder of shared data is missing (QKV_SHARED_DATA)";
  const std::string folder = shared + "/minilm/";
  int num_layers = 0;
  const Json tokens = read_json(folder + "tokens.json");
  for (const Json& of_layer : tokens["layers"]) {
    ++num_layers;
    const std::string name = "layer" + std::to_string(of_layer["layer"].get<int>());
    const Tolerance tolerance(of_layer["tol_f32"]);
    const auto check = [&](const std::string& file, Naming naming) {
      for (Naming asked : {naming, Naming::automatic}) {
        const AttentionLayer layer(load_layer(folder + file, {.naming = asked}));
        expect_golden(layer, folder + name + "_input.safetensors",
                      folder + name + "_expected.safetensors", Mask::full(), tolerance);
      }
    };
    check(name + "_original_names.safetensors", Naming::bert);
    if (name == "layer0") check("layer0_weights.safetensors", Naming::lesson);
  }
  EXPECT_EQ(num_layers, 2);
}

}  // namespace
}  // namespace qkv::test
