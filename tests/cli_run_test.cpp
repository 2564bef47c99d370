// SPDX-License-Identifier: Apache-2.0
// qkv run against golden layers: every run of tests/data/layers, both MiniLM layers under both
// namings, other element types, stand-ins for absent tensors, threads.
#include <gtest/gtest.h>

#include <cmath>

#include "qkv/qkv.h"
#include "support/cli.h"

namespace qkv::test {
namespace {

using Json = nlohmann::json;

struct Tolerance {
  double attention, output;
};

Json read_json(const std::string& path) { return Json::parse(read_bytes(path)); }

// Largest |got - want|; got is f32 without NaN, want f64.
void expect_close(const SafetensorsFile& got_file, const SafetensorsFile& want_file,
                  const char* name, double tolerance) {
  ASSERT_NE(got_file.find(name), nullptr) << name;
  const ConstTensor got = got_file.tensor(name), want = want_file.tensor(name);
  ASSERT_EQ(got.dtype, DType::f32);
  ASSERT_EQ(want.dtype, DType::f64);
  ASSERT_EQ(shape_text(got), shape_text(want));
  double worst = 0;
  for (int64_t i = 0; i < want.num_elements(); ++i) {
    const double error = std::abs(static_cast<double>(static_cast<const float*>(got.data)[i]) -
                                  static_cast<const double*>(want.data)[i]);
    worst = error <= worst ? worst : error;  // NaN becomes the worst and stays it
  }
  EXPECT_LE(worst, tolerance) << name;
}

std::vector<std::string> run_args(const std::string& weights, const std::string& input,
                                  const std::string& output,
                                  const std::vector<std::string>& more = {}) {
  std::vector<std::string> args = {"run", "--weights", weights, "--input",
                                   input, "--output",  output};
  args.insert(args.end(), more.begin(), more.end());
  return args;
}

void expect_run(const std::string& weights, const std::string& input, const std::string& expected,
                const Tolerance& tolerance, const std::vector<std::string>& more = {}) {
  const TemporaryFolder folder;
  const CommandResult result = run_qkv(run_args(weights, input, folder / "y.safetensors", more));
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  const auto got = SafetensorsFile::open(folder / "y.safetensors");
  const auto want = SafetensorsFile::open(expected);
  EXPECT_EQ(got.tensors().size(), 2U);
  expect_close(got, want, "attention", tolerance.attention);
  expect_close(got, want, "output", tolerance.output);
  EXPECT_EQ(folder.names().size(), 1U);  // nothing temporary stays
}

// The bytes of the output file.
std::string output_of(const std::string& weights, const std::string& input,
                      const std::vector<std::string>& more = {}) {
  const TemporaryFolder folder;
  const CommandResult result = run_qkv(run_args(weights, input, folder / "y.safetensors", more));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  return read_bytes(folder / "y.safetensors");
}

std::string layer_folder(const std::string& name) {
  const std::string tree = data_path("layers/" + name + "/");
  return std::filesystem::exists(tree) ? tree : shared_data_folder() + "/layers/" + name + "/";
}

class GoldenLayer : public testing::TestWithParam<Json> {};

TEST_P(GoldenLayer, EveryRunWithinTolerance) {
  const Json& layer = GetParam();
  const std::string folder = layer_folder(layer["name"]);
  if (!std::filesystem::exists(folder)) GTEST_SKIP() << folder << " is not there";
  const Tolerance tolerance{layer["tol_f32"]["attention"], layer["tol_f32"]["output"]};
  EXPECT_EQ(layer["runs"].size(), 5U);
  for (const Json& run : layer["runs"]) {
    SCOPED_TRACE(run.dump());
    std::vector<std::string> more;
    if (!run["mask_flag"].is_null()) more = {"--mask", run["mask_flag"]};
    const std::string input = run["input"], expected = run["expected"];
    expect_run(folder + "weights.safetensors", folder + input, folder + expected, tolerance, more);
  }
}

std::vector<Json> layers() {
  const Json index = read_json(data_path("layers/index.json"));
  return {index["cases"].begin(), index["cases"].end()};
}

INSTANTIATE_TEST_SUITE_P(Run, GoldenLayer, testing::ValuesIn(layers()), [](const auto& info) {
  return info.param["name"].template get<std::string>();
});

TEST(Run, IndexHoldsTwelveLayersAndSixtyRuns) {
  size_t runs = 0;
  for (const Json& layer : layers()) runs += layer["runs"].size();
  EXPECT_EQ(layers().size(), 12U);
  EXPECT_EQ(runs, 60U);
}

Tolerance minilm_tolerance(int layer) {
  const std::string tokens = QKV_SOURCE_DIR "/examples/data/tokens.json";
  const Json json = read_json(tokens);
  for (const Json& row : json.at("layers")) {
    if (row["layer"] == layer) return {row["tol_f32"]["attention"], row["tol_f32"]["output"]};
  }
  throw std::runtime_error("no tolerance");
}

TEST(Run, MiniLmLayer0) {
  const std::string data = QKV_SOURCE_DIR "/examples/data/layer0_";
  expect_run(data + "weights.safetensors", data + "input.safetensors",
             data + "expected.safetensors", minilm_tolerance(0));
}

TEST(Run, MiniLmUnderItsOwnNames) {
  const std::string data = shared_data_folder() + "/minilm/layer";
  if (!std::filesystem::exists(data + "0_input.safetensors"))
    GTEST_SKIP() << data << "* is not there";
  for (const int layer : {0, 5}) {
    const std::string stem = data + std::to_string(layer) + "_";
    for (const char* names : {"auto", "bert"}) {
      expect_run(stem + "original_names.safetensors", stem + "input.safetensors",
                 stem + "expected.safetensors", minilm_tolerance(layer), {"--names", names});
    }
  }
}

class RunLesson : public testing::Test {
 protected:
  const std::string data_ = data_path("layers/gqa_group4/");
  const std::string weights_ = data_ + "weights.safetensors";
  const std::string input_ = data_ + "input_random.safetensors";
  TemporaryFolder folder_;

  // A copy of the input with tensors converted, renamed or added.
  using Change = std::function<void(std::vector<NamedTensor>&)>;
  std::string changed_input(const Change& change) {
    const auto file = SafetensorsFile::open(input_);
    std::vector<NamedTensor> tensors;
    for (const TensorInfo& t : file.tensors()) tensors.push_back({t.name, file.tensor(t.name)});
    change(tensors);
    save_safetensors(folder_ / "x.safetensors", tensors);
    return folder_ / "x.safetensors";
  }
};

TEST_F(RunLesson, SameBytesForAnyThreadsAndWithProgress) {
  const std::string want = output_of(weights_, input_, {"--threads", "1"});
  for (const char* threads : {"2", "3", "7"})
    EXPECT_EQ(output_of(weights_, input_, {"--num-threads", threads}), want);
  EXPECT_EQ(output_of(weights_, input_, {"--progress"}), want);
}

TEST_F(RunLesson, NoWeights_SameOutputAndNoAttention) {
  const TemporaryFolder folder;
  const auto args = run_args(weights_, input_, folder / "y.safetensors", {"--no-weights"});
  ASSERT_EQ(run_qkv(args).exit_code, 0);
  const auto without = SafetensorsFile::open(folder / "y.safetensors");
  EXPECT_EQ(without.find("attention"), nullptr);
  const auto with = SafetensorsFile::from_bytes(output_of(weights_, input_));
  EXPECT_EQ(to_f32(without.tensor("output")), to_f32(with.tensor("output")));
}

TEST_F(RunLesson, Progress_BarOnStderrEndsAtHundred) {
  const CommandResult result =
      run_qkv(run_args(weights_, input_, folder_ / "y.safetensors", {"--progress"}));
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_NE(result.err.find("100 %"), std::string::npos) << result.err;
  EXPECT_EQ(result.err.back(), '\n');
}

TEST_F(RunLesson, OtherElementTypes_AreConverted) {
  const std::string want = output_of(weights_, input_);
  std::vector<std::vector<double>> f64;
  EXPECT_EQ(output_of(weights_, changed_input([&](auto& tensors) {
                        for (NamedTensor& t : tensors) {
                          const auto values = to_f32(t.tensor);
                          f64.emplace_back(values.begin(), values.end());
                          t.tensor.dtype = DType::f64;
                          t.tensor.data = f64.back().data();
                        }
                      })),
            want);
  // Values that f16 and bf16 hold exactly: the same bytes as the same values in f32.
  const auto rounded = [](const ConstTensor& t) {
    std::vector<float> values = to_f32(t);
    for (float& x : values) x = std::isinf(x) ? x : std::round(x * 8) / 8;
    return values;
  };
  std::vector<std::vector<float>> f32;
  const std::string want_rounded = output_of(weights_, changed_input([&](auto& tensors) {
                                               for (NamedTensor& t : tensors) {
                                                 f32.push_back(rounded(t.tensor));
                                                 t.tensor.data = f32.back().data();
                                               }
                                             }));
  EXPECT_NE(want_rounded, want);
  for (const DType dtype : {DType::f16, DType::bf16}) {
    std::vector<std::vector<uint16_t>> half;
    EXPECT_EQ(
        output_of(weights_, changed_input([&](auto& tensors) {
                    for (NamedTensor& t : tensors) {
                      std::vector<uint16_t> bits;
                      for (float x : rounded(t.tensor)) {
                        bits.push_back(dtype == DType::f16 ? to_f16(x).bits : to_bf16(x).bits);
                      }
                      half.push_back(bits);
                      t.tensor.dtype = dtype;
                      t.tensor.data = half.back().data();
                    }
                  })),
        want_rounded)
        << name(dtype);
  }
}

TEST_F(RunLesson, ExtraTensorsAndMetadata_AreIgnored) {
  const std::vector<int64_t> ids = {1, 2, 3};
  const std::string want = output_of(weights_, input_);
  EXPECT_EQ(output_of(weights_, changed_input([&](auto& tensors) {
                        tensors.push_back({"ids", ConstTensor(ids.data(), {3})});
                      })),
            want);
  const auto file = SafetensorsFile::open(weights_);
  std::vector<NamedTensor> tensors = {{"fc_q.extra", ConstTensor(ids.data(), {3})}};
  for (const TensorInfo& t : file.tensors()) tensors.push_back({t.name, file.tensor(t.name)});
  auto metadata = file.metadata();
  metadata["num_layers"] = "nan";
  save_safetensors(folder_ / "w.safetensors", tensors, metadata);
  EXPECT_EQ(output_of(folder_ / "w.safetensors", input_), want);
}

TEST_F(RunLesson, BooleanMask_TrueAttends) {
  const std::string data = data_path("layers/seed_mha/");
  const auto file = SafetensorsFile::open(data + "input_triu.safetensors");
  const auto additive = to_f32(file.tensor("mask"));
  std::vector<uint8_t> boolean;
  for (float m : additive) boolean.push_back(m == 0);
  std::vector<NamedTensor> tensors = {{"mask", ConstTensor(boolean.data(), {10, 2, 4})}};
  tensors[0].tensor.dtype = DType::boolean;
  for (const char* name : {"q", "k", "v"}) tensors.push_back({name, file.tensor(name)});
  save_safetensors(folder_ / "x.safetensors", tensors);
  const Json index = read_json(data_path("layers/index.json"))["cases"][0];
  ASSERT_EQ(index["name"], "seed_mha");
  const Tolerance tolerance{index["tol_f32"]["attention"], index["tol_f32"]["output"]};
  expect_run(data + "weights.safetensors", folder_ / "x.safetensors",
             data + "expected_triu.safetensors", tolerance);
}

// twelve_heads has one width for all inputs, so x can stand for each of them.
TEST_F(RunLesson, AbsentTensors_AreTakenFromOthersAndSaid) {
  const std::string weights = data_path("layers/twelve_heads/weights.safetensors");
  const auto file =
      SafetensorsFile::open(data_path("layers/twelve_heads/input_nomask.safetensors"));
  const ConstTensor a = file.tensor("q"), b = file.tensor("k");
  const std::string path = folder_ / "x.safetensors";
  const auto notes = [&] {
    const CommandResult result =
        run_qkv(run_args(weights, path, folder_ / "y.safetensors", {"--json"}));
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return Json::parse(result.out)["notes"].get<std::vector<std::string>>();
  };
  save_safetensors(path, {{"q", a}, {"k", a}, {"v", a}});
  const std::string self = output_of(weights, path);
  EXPECT_TRUE(notes().empty());
  save_safetensors(path, {{"x", a}});
  EXPECT_EQ(output_of(weights, path), self);
  EXPECT_EQ(notes(), (std::vector<std::string>{"q is not in the file: x is taken",
                                               "k is not in the file: x is taken",
                                               "v is not in the file: x is taken"}));
  save_safetensors(path, {{"q", a}});
  EXPECT_EQ(output_of(weights, path), self);
  EXPECT_EQ(notes(), (std::vector<std::string>{"k is not in the file: q is taken",
                                               "v is not in the file: q is taken"}));

  save_safetensors(path, {{"q", a}, {"k", b}, {"v", b}});
  const std::string cross = output_of(weights, path);
  EXPECT_NE(cross, self);
  save_safetensors(path, {{"q", a}, {"k", b}});
  EXPECT_EQ(output_of(weights, path), cross);
  EXPECT_EQ(notes(), (std::vector<std::string>{"v is not in the file: k is taken"}));
  save_safetensors(path, {{"q", a}, {"x", b}});
  EXPECT_EQ(output_of(weights, path), cross);
}

TEST_F(RunLesson, MaskFlags_AllApply) {
  const std::string weights = data_path("layers/twelve_heads/weights.safetensors");
  const std::string input = data_path("layers/twelve_heads/input_random.safetensors");
  const std::string want = output_of(weights, input, {"--mask", "causal-top-left"});
  EXPECT_EQ(output_of(weights, input, {"--mask", "window:none,0,top-left"}), want);
  EXPECT_EQ(output_of(weights, input, {"--mask", "full", "--mask", "causal-top-left"}), want);
  EXPECT_EQ(output_of(weights, input, {"--mask", "causal-top-left & prefix:7"}), want);
  EXPECT_NE(output_of(weights, input, {"--mask", "causal-top-left & lengths:3,7"}), want);
}

TEST_F(RunLesson, ExtentsOfZero) {
  const float none = 0;
  save_safetensors(folder_ / "x.safetensors", {{"q", ConstTensor(&none, {2, 0, 32})},
                                               {"k", ConstTensor(&none, {2, 0, 32})},
                                               {"v", ConstTensor(&none, {2, 0, 16})}});
  const auto file = SafetensorsFile::from_bytes(output_of(weights_, folder_ / "x.safetensors"));
  EXPECT_EQ(shape_text(file.tensor("attention")), "[16, 0, 0]");
  EXPECT_EQ(shape_text(file.tensor("output")), "[2, 0, 24]");
}

TEST_F(RunLesson, Json_TellsWhatWasDone) {
  const CommandResult result = run_qkv(run_args(weights_, input_, folder_ / "y.safetensors",
                                                {"--json", "--mask", "causal-top-left"}));
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const Json json = Json::parse(result.out);
  EXPECT_EQ(json["layer"]["kind"], "GQA");
  EXPECT_EQ(json["layer"]["num_kv_heads"], 2);
  EXPECT_EQ(json["attention"], Json({16, 5, 8}));
  EXPECT_EQ(json["output"], Json({2, 5, 24}));
  EXPECT_EQ(json["nan_count"], 0);
  EXPECT_EQ(json["path"], folder_ / "y.safetensors");
  const std::string mask = json["mask"];
  EXPECT_NE(mask.find("causal_top_left"), std::string::npos) << mask;
  EXPECT_NE(mask.find("additive mask [2, 5, 8]"), std::string::npos) << mask;
}

TEST_F(RunLesson, ReplacesAnOlderOutput) {
  write_bytes(folder_ / "y.safetensors", "old");
  ASSERT_EQ(run_qkv(run_args(weights_, input_, folder_ / "y.safetensors")).exit_code, 0);
  EXPECT_EQ(read_bytes(folder_ / "y.safetensors"), output_of(weights_, input_));
}

}  // namespace
}  // namespace qkv::test
