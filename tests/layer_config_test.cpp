// SPDX-License-Identifier: Apache-2.0
// Tier: test. LayerConfig and LayerWeights: the lesson's counts, and refusal of sizes that cannot
// be.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>

#include "qkv/layer.h"

namespace {

using qkv::DType;
using qkv::Error;
using qkv::LayerConfig;
using qkv::LayerParameters;
using qkv::LayerWeights;

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

TEST(LayerConfig, Lesson_Mha) {
  const LayerConfig c = LayerConfig::mha(8, 128, 64, 16, 16, 8);
  EXPECT_EQ(c.num_kv_heads, 8);
  EXPECT_EQ(c.group_size(), 1);
  EXPECT_EQ(c.dim_q, 128);
  EXPECT_EQ(c.num_parameters(),
            (128 * 128 + 128) + (128 * 128 + 128) + (64 * 128 + 128) + (128 * 8 + 8));
  EXPECT_EQ(c.kv_bytes_per_token(DType::f32), 8 * (16 + 16) * 4);
}

TEST(LayerConfig, Lesson_Mqa) {
  const LayerConfig c = LayerConfig::mqa(8, 128, 64, 16, 16, 8);
  EXPECT_EQ(c.num_kv_heads, 1);
  EXPECT_EQ(c.group_size(), 8);
  EXPECT_EQ(c.num_parameters(),
            (128 * 128 + 128) + (128 * 16 + 16) + (64 * 16 + 16) + (128 * 8 + 8));
  EXPECT_EQ(c.kv_bytes_per_token(DType::bf16), (16 + 16) * 2);
}

TEST(LayerConfig, Gqa_AllSizesDifferent) {
  LayerConfig c = LayerConfig::gqa(6, 2, 11, 13, 5, 7, 17, 19);
  EXPECT_EQ(c.group_size(), 3);
  EXPECT_EQ(c.dim_q, 19);
  const int64_t weights = 6 * 5 * 19 + 2 * 5 * 11 + 2 * 7 * 13 + 17 * 6 * 7;
  EXPECT_EQ(c.num_parameters(), weights + 6 * 5 + 2 * 5 + 2 * 7 + 17);
  c.bias_k = false;
  EXPECT_EQ(c.num_parameters(), weights + 6 * 5 + 2 * 7 + 17);
  c.bias_q = c.bias_v = c.bias_o = false;
  EXPECT_EQ(c.num_parameters(), weights);
  EXPECT_EQ(c.kv_bytes_per_token(DType::f64), 2 * (5 + 7) * 8);
}

TEST(LayerConfig, BadSizes_AreNamed) {
  EXPECT_EQ(error_of([] { LayerConfig::gqa(12, 8, 64, 64, 8, 8, 64); }),
            "LayerConfig::gqa: num_heads 12 is not a multiple of num_kv_heads 8");
  EXPECT_EQ(error_of([] { LayerConfig::mha(0, 64, 64, 8, 8, 64); }),
            "LayerConfig::mha: num_heads must be at least 1, got 0");
  EXPECT_EQ(error_of([] { LayerConfig::mqa(4, 64, 64, 8, -8, 64); }),
            "LayerConfig::mqa: head_dim_v must be at least 1, got -8");
  EXPECT_EQ(error_of([] { LayerConfig::mha(4, 64, 64, 8, 8, 64, -1); }),
            "LayerConfig::mha: dim_q must be at least 1, got -1");
  EXPECT_EQ(error_of([] { LayerConfig::mha(4, 64, 64, 8, 8, 0); }),
            "LayerConfig::mha: dim_out must be at least 1, got 0");
  const int64_t huge = std::numeric_limits<int64_t>::max() / 4;
  EXPECT_NE(error_of([&] { LayerConfig::mha(8, huge, 1, 1, 1, 1); }).find("too large"),
            std::string::npos);
}

TEST(LayerConfig, ScaleAndSoftcap_MustBeNumbers) {
  LayerConfig c = LayerConfig::mha(2, 4, 4, 2, 2, 4);
  c.scale = -0.5;
  c.softcap = 30;
  c.check("caller");
  c.scale = std::numeric_limits<double>::quiet_NaN();
  EXPECT_NE(error_of([&] { c.check("caller"); }).find("caller: scale"), std::string::npos);
  c.scale.reset();
  c.softcap = -1;
  EXPECT_NE(error_of([&] { c.check("caller"); }).find("caller: softcap"), std::string::npos);
  c.softcap = std::numeric_limits<double>::quiet_NaN();
  EXPECT_NE(error_of([&] { c.check("caller"); }).find("caller: softcap"), std::string::npos);
}

TEST(LayerWeights, Check_ComparesEveryArrayWithTheConfig) {
  LayerWeights w;
  w.config = LayerConfig::gqa(4, 2, 5, 6, 3, 2, 7);
  w.fc_q_weight.resize(4 * 3 * 5);
  w.fc_k_weight.resize(2 * 3 * 5);
  w.fc_v_weight.resize(2 * 2 * 6);
  w.fc_o_weight.resize(7 * 4 * 2);
  w.fc_q_bias.resize(12);
  w.fc_k_bias.resize(6);
  w.fc_v_bias.resize(4);
  w.fc_o_bias.resize(7);
  w.check("caller");

  for (auto* array : {&w.fc_q_weight, &w.fc_k_weight, &w.fc_v_weight, &w.fc_o_weight, &w.fc_q_bias,
                      &w.fc_k_bias, &w.fc_v_bias, &w.fc_o_bias}) {
    array->push_back(0);
    EXPECT_THROW(w.check("caller"), Error);
    array->pop_back();
  }
  w.config.bias_v = false;
  EXPECT_EQ(error_of([&] { w.check("caller"); }),
            "caller: fc_v_bias must hold 0 numbers (config says that it is absent; fc_v_weight [4, "
            "6]), got 4");
  w.fc_v_bias.clear();
  w.check("caller");
  w.fc_k_weight.clear();
  EXPECT_EQ(error_of([&] { w.check("caller"); }),
            "caller: fc_k_weight must hold [6, 5] numbers, got 0");
}

TEST(LayerParameters, Check_ComparesEveryTensorWithTheConfig) {
  LayerWeights w;
  w.config = LayerConfig::gqa(4, 2, 5, 6, 3, 2, 7);
  w.fc_q_weight.resize(60), w.fc_q_bias.resize(12);
  w.fc_k_weight.resize(30), w.fc_k_bias.resize(6);
  w.fc_v_weight.resize(24), w.fc_v_bias.resize(4);
  w.fc_o_weight.resize(56), w.fc_o_bias.resize(7);
  const LayerParameters right = LayerParameters::of(w);
  right.check("caller");
  const auto error = [&](auto change) {
    LayerParameters p = right;
    change(p);
    return error_of([&] { p.check("caller"); });
  };
  EXPECT_EQ(error([](auto& p) { p.fc_k_weight = {}; }),
            "caller: fc_k_weight must be f32 [6, 5] in C order, got none");
  EXPECT_EQ(error([](auto& p) { p.fc_k_weight.dtype = qkv::DType::bf16; }),
            "caller: fc_k_weight must be f32 [6, 5] in C order, got bf16 [6, 5]");
  EXPECT_EQ(error([](auto& p) { p.fc_o_weight.shape[1] = 9; }),
            "caller: fc_o_weight must be f32 [7, 8] in C order, got f32 [7, 9]");
  EXPECT_NE(error([](auto& p) { p.fc_q_weight.stride[0] = 6; }), "");
  EXPECT_NE(error([](auto& p) { p.fc_v_weight.data = nullptr; }), "");
  EXPECT_NE(error([](auto& p) { p.fc_v_bias = {}; }), "");
  EXPECT_EQ(error([](auto& p) { p.config.bias_v = false; }),
            "caller: fc_v_bias is given [4], but config says that it is absent");
  w.fc_v_bias.clear();
  EXPECT_THROW(LayerParameters::of(w), Error);
}

}  // namespace
