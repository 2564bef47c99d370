// SPDX-License-Identifier: Apache-2.0
// Tier: test. Layers from and to files: values, head counts, every size that does not fit, golden files, damaged files.
#include "qkv/weights.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "support/layer_files.h"
#include "support/tensor_values.h"

namespace {

using qkv::ConstTensor;
using qkv::DType;
using qkv::Error;
using qkv::LayerConfig;
using qkv::LayerWeights;
using qkv::load_layer;
using qkv::LoadLayerOptions;
using qkv::Naming;
using qkv::SafetensorsFile;
using qkv::to_f32;
using qkv::test::contains;
using qkv::test::data_path;
using qkv::test::error_text;
using qkv::test::LayerFile;
using qkv::test::TemporaryFolder;

TEST(ToF32, EveryFloatType) {
  const float f[] = {1.5f, -0.0f, 3e38f};
  EXPECT_EQ(to_f32({f, {3}}), (std::vector<float>{1.5f, -0.0f, 3e38f}));
  const double d[] = {1.0 + 0x1p-24, 1.0 + 0x1.8p-23, 1e300, -1e-300};
  const std::vector<float> from_f64 = to_f32({d, {4}});
  EXPECT_EQ(from_f64[0], 1.0f) << "nearest, ties to even";
  EXPECT_EQ(from_f64[1], 1.0f + 0x1p-22f);
  EXPECT_EQ(from_f64[2], HUGE_VALF);
  EXPECT_TRUE(from_f64[3] == 0 && std::signbit(from_f64[3]));
  const qkv::bf16_t b[] = {{0x3fc0}, {0xff80}, {0x0001}};
  EXPECT_EQ(to_f32({b, {3}}), (std::vector<float>{1.5f, -HUGE_VALF, 0x1p-133f}));
  const qkv::f16_t h[] = {{0x3e00}, {0x7bff}, {0x8001}};
  EXPECT_EQ(to_f32({h, {3}}), (std::vector<float>{1.5f, 65504.0f, -0x1p-24f}));
}

TEST(ToF32, StridedAndUnaligned) {
  const float x[] = {0, 1, 2, 3, 4, 5};
  EXPECT_EQ(to_f32({x, {3, 2}, {1, 3}}), (std::vector<float>{0, 3, 1, 4, 2, 5}));
  EXPECT_EQ(to_f32({x + 5, {2}, {-5}}), (std::vector<float>{5, 0}));
  EXPECT_EQ(to_f32({x + 2, {}}), (std::vector<float>{2}));
  EXPECT_TRUE(to_f32({x, {0, 4}}).empty());
  unsigned char bytes[9];
  std::memcpy(bytes + 1, x + 1, 8);
  const int64_t shape[] = {2};
  EXPECT_EQ(to_f32(ConstTensor(bytes + 1, DType::f32, shape)), (std::vector<float>{1, 2}));
}

TEST(ToF32, NotAFloat_IsRefused) {
  const int32_t i[] = {1, 2};
  EXPECT_EQ(error_text([&] {
              to_f32({i, {2}});
            }),
            "to_f32: the dtype must be f32, f64, f16 or bf16, got i32 [2]");
  EXPECT_EQ(error_text([] { to_f32({}); }), "to_f32: there is no data");
}

/// 4 heads, 2 KV heads, dim_q 5, dim_k 6, dim_v 7, head_dim_qk 2, head_dim_v 3, dim_out 9.
LayerFile gqa() {
  LayerFile f;
  f.add("fc_q.weight", {8, 5})
      .add("fc_q.bias", {8})
      .add("fc_k.weight", {4, 6})
      .add("fc_k.bias", {4});
  f.add("fc_v.weight", {6, 7})
      .add("fc_v.bias", {6})
      .add("fc_o.weight", {9, 12})
      .add("fc_o.bias", {9});
  return f.metadata("num_heads", "4").metadata("num_kv_heads", "2");
}

std::string refusal(const LayerFile& f, const LoadLayerOptions& options = {}) {
  return error_text([&] { load_layer(f.open(), options); });
}

TEST(LoadLayer, Lesson_SizesAndValues) {
  const LayerFile f = gqa();
  const LayerWeights w = load_layer(f.open());
  w.check("test");
  EXPECT_EQ(w.config.num_heads, 4);
  EXPECT_EQ(w.config.num_kv_heads, 2);
  EXPECT_EQ(w.config.dim_q, 5);
  EXPECT_EQ(w.config.dim_k, 6);
  EXPECT_EQ(w.config.dim_v, 7);
  EXPECT_EQ(w.config.head_dim_qk, 2);
  EXPECT_EQ(w.config.head_dim_v, 3);
  EXPECT_EQ(w.config.dim_out, 9);
  EXPECT_FALSE(w.config.scale.has_value());
  EXPECT_EQ(w.config.softcap, 0);
  EXPECT_EQ(w.fc_q_weight, f.values("fc_q.weight"));
  EXPECT_EQ(w.fc_q_bias, f.values("fc_q.bias"));
  EXPECT_EQ(w.fc_k_weight, f.values("fc_k.weight"));
  EXPECT_EQ(w.fc_k_bias, f.values("fc_k.bias"));
  EXPECT_EQ(w.fc_v_weight, f.values("fc_v.weight"));
  EXPECT_EQ(w.fc_v_bias, f.values("fc_v.bias"));
  EXPECT_EQ(w.fc_o_weight, f.values("fc_o.weight"));
  EXPECT_EQ(w.fc_o_bias, f.values("fc_o.bias"));
}

TEST(LoadLayer, EachBias_MayBeAbsent) {
  for (const char* name : {"fc_q.bias", "fc_k.bias", "fc_v.bias", "fc_o.bias"}) {
    const LayerWeights w = load_layer(gqa().remove(name).open());
    w.check("test");
    const LayerConfig& c = w.config;
    EXPECT_EQ(c.bias_q + c.bias_k + c.bias_v + c.bias_o, 3) << name;
  }
}

TEST(LoadLayer, FusedRows_GoToTheirProjection) {
  LayerFile torch;
  torch.add("in_proj_weight", {12, 4})
      .add("in_proj_bias", {12})
      .add("out_proj.weight", {4, 4})
      .add("out_proj.bias", {4});
  const LayerWeights t = load_layer(torch.open(), {.num_heads = 2});
  EXPECT_EQ(t.config.num_kv_heads, 2);
  EXPECT_EQ(t.config.head_dim_qk, 2);
  EXPECT_EQ(t.fc_q_weight, torch.rows("in_proj_weight", 0, 4));
  EXPECT_EQ(t.fc_k_weight, torch.rows("in_proj_weight", 4, 4));
  EXPECT_EQ(t.fc_v_weight, torch.rows("in_proj_weight", 8, 4));
  EXPECT_EQ(t.fc_q_bias, torch.rows("in_proj_bias", 0, 4));
  EXPECT_EQ(t.fc_k_bias, torch.rows("in_proj_bias", 4, 4));
  EXPECT_EQ(t.fc_v_bias, torch.rows("in_proj_bias", 8, 4));
  EXPECT_EQ(t.fc_o_bias, torch.values("out_proj.bias"));

  LayerFile llama;
  llama.add("l.qkv_proj.weight", {16, 5}).add("l.o_proj.weight", {5, 8});
  const LayerWeights l = load_layer(llama.open(), {.num_heads = 4});
  EXPECT_EQ(l.config.num_kv_heads, 2);
  EXPECT_EQ(l.fc_q_weight, llama.rows("l.qkv_proj.weight", 0, 8));
  EXPECT_EQ(l.fc_k_weight, llama.rows("l.qkv_proj.weight", 8, 4));
  EXPECT_EQ(l.fc_v_weight, llama.rows("l.qkv_proj.weight", 12, 4));
  EXPECT_FALSE(l.config.bias_q || l.config.bias_k || l.config.bias_v || l.config.bias_o);
}

TEST(LoadLayer, TorchOwnWidths_AreDimKAndDimV) {
  LayerFile f;
  f.add("q_proj_weight", {4, 4})
      .add("k_proj_weight", {4, 6})
      .add("v_proj_weight", {4, 7})
      .add("out_proj.weight", {4, 4});
  const LayerWeights w = load_layer(f.open(), {.num_heads = 2});
  EXPECT_EQ(w.config.dim_q, 4);
  EXPECT_EQ(w.config.dim_k, 6);
  EXPECT_EQ(w.config.dim_v, 7);
}

TEST(LoadLayer, LyingMetadata_IsRefused) {
  const auto with = [](const std::string& heads, const std::string& kv_heads) {
    return refusal(gqa().metadata("num_heads", heads).metadata("num_kv_heads", kv_heads));
  };
  for (const char* text : {"", " 4", "4 ", "+4", "4.0", "nan", "NaN", "four", "0x4", "-4", "0",
                           "-0", "99999999999999999999"}) {
    EXPECT_EQ(with(text, "2"), std::string("load_layer: F: metadata num_heads is \"") + text +
                                   "\", a whole number from 1 is wanted");
    EXPECT_EQ(with("4", text), std::string("load_layer: F: metadata num_kv_heads is \"") + text +
                                   "\", a whole number from 1 is wanted");
  }
  EXPECT_EQ(
      with("3", "1"),
      "load_layer: F: num_heads 3 (metadata) does not divide the 8 rows of fc_q.weight [8, 5]");
  EXPECT_EQ(with("9223372036854775807", "1"),
            "load_layer: F: num_heads 9223372036854775807 (metadata) does not divide the 8 rows of "
            "fc_q.weight [8, 5]");
  EXPECT_EQ(with("4", "4"),
            "load_layer: F: num_kv_heads 4 (metadata) does not fit: num_heads 4 (metadata) and "
            "fc_q.weight [8, 5] give "
            "head_dim_qk 2, so fc_k.weight [4, 6] holds 2 heads");
  EXPECT_TRUE(contains(with("4", "1"), "num_kv_heads 1 (metadata) does not fit"));
  EXPECT_EQ(with("1", "2"),
            "load_layer: F: the 4 rows of fc_k.weight [4, 6] are not whole heads of head_dim_qk 8 "
            "= 8 rows of fc_q.weight "
            "[8, 5] / num_heads 1 (metadata)");
}

TEST(LoadLayer, Options_ComeBeforeMetadata) {
  LayerFile f = gqa().metadata("num_heads", "rubbish").metadata("num_kv_heads", "rubbish");
  const LayerWeights w = load_layer(f.open(), {.num_heads = 4, .num_kv_heads = 2});
  EXPECT_EQ(w.config.num_heads, 4);
  EXPECT_EQ(refusal(gqa(), {.num_heads = -1}), "load_layer: num_heads must be at least 1, got -1");
  EXPECT_EQ(refusal(gqa(), {.num_kv_heads = -2}),
            "load_layer: num_kv_heads must be at least 1, got -2");
  EXPECT_TRUE(contains(refusal(gqa(), {.num_heads = 3}), "num_heads 3 (given) does not divide"));
  EXPECT_TRUE(contains(refusal(gqa(), {.num_kv_heads = 3}), "num_kv_heads 3 (given) does not fit"));
}

TEST(LoadLayer, NumHeads_MustBeKnown) {
  LayerFile f;
  f.add("q_proj.weight", {8, 5})
      .add("k_proj.weight", {4, 5})
      .add("v_proj.weight", {4, 5})
      .add("o_proj.weight", {5, 8});
  EXPECT_EQ(refusal(f),
            "load_layer: F: does not say num_heads in its metadata; give it with --num-heads");
  EXPECT_EQ(load_layer(f.open(), {.num_heads = 8}).config.num_kv_heads, 4);
  EXPECT_EQ(load_layer(f.open(), {.num_heads = 4}).config.num_kv_heads, 2);
  EXPECT_EQ(load_layer(f.open(), {.num_heads = 2}).config.num_kv_heads, 1);
  EXPECT_EQ(load_layer(f.metadata("num_heads", "4").open()).config.num_kv_heads, 2);
}

TEST(LoadLayer, SizesThatDoNotFit_NameBothShapes) {
  const auto replaced = [](const std::string& name, const std::vector<int64_t>& shape) {
    return gqa()
        .remove("fc_q.bias")
        .remove("fc_k.bias")
        .remove("fc_v.bias")
        .remove("fc_o.bias")
        .remove(name)
        .add(name, shape);
  };
  EXPECT_EQ(refusal(replaced("fc_o.weight", {9, 8})),
            "load_layer: F: fc_o.weight [9, 8] must have num_heads * head_dim_v = 4 * 3 columns, "
            "got fc_o.weight [9, 8] and "
            "fc_v.weight [6, 7]");
  EXPECT_EQ(
      refusal(replaced("fc_v.weight", {5, 7})),
      "load_layer: F: num_kv_heads 2 (metadata) does not divide the 5 rows of fc_v.weight [5, 7]");
  EXPECT_EQ(refusal(replaced("fc_k.weight", {5, 6})),
            "load_layer: F: the 5 rows of fc_k.weight [5, 6] are not whole heads of head_dim_qk 2 "
            "= 8 rows of fc_q.weight "
            "[8, 5] / num_heads 4 (metadata)");
  EXPECT_EQ(refusal(replaced("fc_k.weight", {6, 6}).metadata("num_kv_heads", "3")),
            "load_layer: F: num_heads 4 (metadata) is not a multiple of num_kv_heads 3 (metadata), "
            "got fc_q.weight [8, 5] "
            "and fc_k.weight [6, 6]");
  EXPECT_EQ(refusal(replaced("fc_q.weight", {0, 5})), "load_layer: F: fc_q.weight [0, 5] is empty");
  EXPECT_EQ(refusal(replaced("fc_o.weight", {9, 0})), "load_layer: F: fc_o.weight [9, 0] is empty");
}

TEST(LoadLayer, IntegerWeights_AreRefused) {
  const TemporaryFolder folder;
  const std::vector<float> x(16);
  const int8_t i[16] = {};
  const auto save = [&](const char* wrong) {
    std::vector<qkv::NamedTensor> tensors;
    for (const char* name : {"fc_q.weight", "fc_k.weight", "fc_v.weight", "fc_o.weight"}) {
      tensors.push_back({name, {x.data(), {4, 4}}});
      if (std::string(name) == wrong) tensors.back().tensor = {i, {4, 4}};
    }
    tensors.push_back({"fc_q.bias", {x.data(), {4}}});
    if (std::string("fc_q.bias") == wrong) tensors.back().tensor = {i, {4}};
    qkv::save_safetensors(folder / "x", tensors, {{"num_heads", "2"}});
  };
  save("none");
  load_layer(folder / "x");
  for (const char* wrong : {"fc_q.weight", "fc_v.weight", "fc_o.weight", "fc_q.bias"}) {
    save(wrong);
    EXPECT_TRUE(contains(error_text([&] { load_layer(folder / "x"); }), std::string(wrong) + " [4"))
        << wrong;
    EXPECT_TRUE(contains(error_text([&] { load_layer(folder / "x"); }),
                         "is i8; weights must be f32, f64, f16 or bf16"));
  }
}

TEST(SaveLayer, ReadsBackBitForBit) {
  const TemporaryFolder folder;
  LayerWeights w = load_layer(gqa().open());
  w.fc_k_bias.clear();
  w.config.bias_k = false;
  save_layer(folder / "x", w);
  const SafetensorsFile file = SafetensorsFile::open(folder / "x");
  EXPECT_EQ(file.metadata(),
            (std::map<std::string, std::string>{{"num_heads", "4"}, {"num_kv_heads", "2"}}));
  EXPECT_EQ(file.tensors().size(), 7u);
  const LayerWeights r = load_layer(file);
  EXPECT_EQ(r.fc_q_weight, w.fc_q_weight);
  EXPECT_EQ(r.fc_k_weight, w.fc_k_weight);
  EXPECT_EQ(r.fc_v_weight, w.fc_v_weight);
  EXPECT_EQ(r.fc_o_weight, w.fc_o_weight);
  EXPECT_EQ(r.fc_q_bias, w.fc_q_bias);
  EXPECT_TRUE(r.fc_k_bias.empty());
  EXPECT_EQ(r.fc_o_bias, w.fc_o_bias);
  EXPECT_EQ(r.config.dim_q, 5);
  EXPECT_FALSE(r.config.scale.has_value());
}

TEST(SaveLayer, ScaleAndSoftcap_AreKept) {
  const TemporaryFolder folder;
  LayerWeights w = load_layer(gqa().open());
  w.config.scale = 0.1;
  w.config.softcap = 1.0 / 3.0;
  save_layer(folder / "x", w);
  const LayerWeights r = load_layer(folder / "x");
  EXPECT_EQ(r.config.scale, 0.1);
  EXPECT_EQ(r.config.softcap, 1.0 / 3.0);
  EXPECT_EQ(refusal(gqa().metadata("qkv.scale", "large")),
            "load_layer: F: metadata qkv.scale is \"large\", a number is wanted");
  EXPECT_TRUE(contains(refusal(gqa().metadata("qkv.scale", "nan")),
                       "load_layer: F: scale must be a finite number"));
  EXPECT_TRUE(
      contains(refusal(gqa().metadata("qkv.softcap", "-1")), "load_layer: F: softcap must be"));
}

TEST(SaveLayer, WrongSizes_AreRefusedBeforeAnythingIsWritten) {
  const TemporaryFolder folder;
  LayerWeights w = load_layer(gqa().open());
  w.fc_v_weight.pop_back();
  EXPECT_EQ(error_text([&] { save_layer(folder / "x", w); }),
            "save_layer: fc_v_weight must hold [6, 7] numbers, got 41");
  EXPECT_TRUE(folder.names().empty());
}

/// Every size of the index, and a value against the file.
TEST(LoadLayer, GoldenLayers_HaveTheSizesOfTheirIndex) {
  const auto index = nlohmann::json::parse(qkv::test::read_bytes(data_path("layers/index.json")));
  int n_cases = 0;
  for (const auto& c : index["cases"]) {
    const std::string name = "layers/" + c["name"].get<std::string>() + "/weights.safetensors";
    std::string path = data_path(name);
    if (!std::filesystem::exists(path)) path = qkv::test::shared_data_folder() + "/" + name;
    if (!std::filesystem::exists(path)) continue;  // larger than the tree may hold
    const LayerWeights w = load_layer(path);
    w.check("test");
    EXPECT_EQ(w.config.num_heads, c["num_heads"]) << path;
    EXPECT_EQ(w.config.num_kv_heads, c["num_kv_heads"]) << path;
    EXPECT_EQ(w.config.dim_q, c["dim_k"]) << path;
    EXPECT_EQ(w.config.dim_k, c["dim_k"]) << path;
    EXPECT_EQ(w.config.dim_v, c["dim_v"]) << path;
    EXPECT_EQ(w.config.head_dim_qk, c["head_dim_qk"]) << path;
    EXPECT_EQ(w.config.head_dim_v, c["head_dim_v"]) << path;
    EXPECT_EQ(w.config.dim_out, c["dim_out"]) << path;
    EXPECT_EQ(w.config.bias_q, c["bias"]) << path;
    const SafetensorsFile file = SafetensorsFile::open(path);
    EXPECT_EQ(w.fc_o_weight.back(), qkv::test::numbers(file.tensor("fc_o.weight")).back()) << path;
    ++n_cases;
  }
  EXPECT_GE(n_cases, 11);
}

TEST(LoadLayer, MiniLm_IsTheSameUnderBothNamings) {
  const std::string folder = qkv::test::shared_data_folder();
  if (folder.empty()) GTEST_SKIP() << "the shared golden data is not here";
  const LayerWeights a = load_layer(folder + "/minilm/layer0_weights.safetensors");
  const LayerWeights b = load_layer(folder + "/minilm/layer0_original_names.safetensors");
  EXPECT_EQ(a.config.num_heads, 12);
  EXPECT_EQ(a.config.head_dim_qk, 32);
  EXPECT_EQ(a.config.dim_out, 384);
  EXPECT_TRUE(a.fc_q_weight == b.fc_q_weight && a.fc_k_weight == b.fc_k_weight &&
              a.fc_v_weight == b.fc_v_weight);
  EXPECT_TRUE(a.fc_o_weight == b.fc_o_weight && a.fc_q_bias == b.fc_q_bias &&
              a.fc_k_bias == b.fc_k_bias);
  EXPECT_TRUE(a.fc_v_bias == b.fc_v_bias && a.fc_o_bias == b.fc_o_bias && !a.fc_o_bias.empty());
}

TEST(LoadLayer, SmolLm2_Bfloat16IsTheRoundedFloat32) {
  const std::string folder = qkv::test::shared_data_folder();
  if (folder.empty()) GTEST_SKIP() << "the shared golden data is not here";
  const LayerWeights full = load_layer(folder + "/smollm2/weights_f32.safetensors");
  const LayerWeights half = load_layer(folder + "/smollm2/weights_bf16.safetensors");
  EXPECT_EQ(half.config.num_heads, 9);
  EXPECT_EQ(half.config.num_kv_heads, 3);
  ASSERT_EQ(half.fc_k_weight.size(), full.fc_k_weight.size());
  for (size_t i = 0; i < full.fc_k_weight.size(); ++i) {
    ASSERT_EQ(half.fc_k_weight[i], to_float(qkv::to_bf16(full.fc_k_weight[i]))) << i;
  }
}

/// Run under asan: a damaged file gives an error or a layer whose arrays have the sizes of its config.
TEST(LoadLayer, Damaged_IsRefusedOrConsistent) {
  std::mt19937 random(2026);
  const std::string whole =
      qkv::test::read_bytes(data_path("layers/single_token/weights.safetensors"));
  int n_refused = 0, n_read = 0;
  for (int i = 0; i < 5000; ++i) {
    try {
      load_layer(SafetensorsFile::from_bytes(qkv::test::damaged(whole, random))).check("test");
      ++n_read;
    } catch (const Error& error) {
      EXPECT_FALSE(std::string_view(error.what()).starts_with("test")) << error.what();
      ++n_refused;
    }
  }
  EXPECT_GT(n_refused, 1000);
  EXPECT_GT(n_read, 100);
}

}  // namespace
