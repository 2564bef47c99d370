// SPDX-License-Identifier: Apache-2.0
// The checks of arguments that all calls share: what is refused, and what a call then holds.
#include "check.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace qkv {
namespace {

struct Arguments {
  std::vector<float> data = std::vector<float>(4096);
  ConstTensor q{data.data(), {2, 6, 5, 8}};
  ConstTensor k{data.data(), {2, 3, 7, 8}};
  ConstTensor v{data.data(), {2, 3, 7, 4}};
  AttentionOptions options;
};

std::string refusal(const Arguments& a) {
  try {
    Check("caller").call(a.q, a.k, a.v, a.options);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

TEST(Check, GoodArguments_FillTheCall) {
  Arguments a;
  const float slopes[6] = {1, 2, 3, 4, 5, 6};
  a.options.alibi_slopes = ConstTensor(slopes, {6});
  const Call call = Check("caller").call(a.q, a.k, a.v, a.options);
  EXPECT_EQ(call.batch, 2);
  EXPECT_EQ(call.group_size, 2);
  EXPECT_EQ(call.n_q, 5);
  EXPECT_EQ(call.n_kv, 7);
  EXPECT_EQ(call.head_dim_qk, 8);
  EXPECT_EQ(call.head_dim_v, 4);
  EXPECT_EQ(call.scale, 1 / std::sqrt(8.0));
  EXPECT_EQ(call.sinks.data(), nullptr);
  EXPECT_EQ(call.alibi_slopes.data()[5], 6);
  EXPECT_EQ(call.arithmetic, 0);
  EXPECT_NE(call.kernels, nullptr);
}

TEST(Check, ScaleIsTakenLiterally) {
  Arguments a;
  a.options.scale = -0.25;
  EXPECT_EQ(Check("caller").call(a.q, a.k, a.v, a.options).scale, -0.25);
  a.options.scale = 0;
  EXPECT_EQ(Check("caller").call(a.q, a.k, a.v, a.options).scale, 0);
}

TEST(Check, BadArguments_AreNamedWithTheirShapes) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<std::pair<const char*, void (*)(Arguments&)>> cases = {
      {"num_heads 6 is not a multiple of num_kv_heads 4, got q [2, 6, 5, 8] and k [2, 4, 7, 8]",
       [](Arguments& a) { a.k.shape[1] = 4, a.v.shape[1] = 4; }},
      {"num_kv_heads of k and v differ", [](Arguments& a) { a.v.shape[1] = 6; }},
      {"n_kv of k and v differ", [](Arguments& a) { a.v.shape[2] = 6; }},
      {"head_dim_qk of q and k differ", [](Arguments& a) { a.k.shape[3] = 4; }},
      {"batch differs", [](Arguments& a) { a.k.shape[0] = 1; }},
      {"need 4 axes", [](Arguments& a) { a.q.rank = 3; }},
      {"the last axis of k must be contiguous", [](Arguments& a) { a.k.stride[3] = 2; }},
      {"v has no data", [](Arguments& a) { a.v.data = nullptr; }},
      {"f64 goes with f64 only", [](Arguments& a) { a.q.dtype = DType::f64; }},
      {"element types", [](Arguments& a) { a.k.dtype = DType::i8; }},
      {"softcap must be", [](Arguments& a) { a.options.softcap = -1; }},
      {"dropout must lie in [0, 1]", [](Arguments& a) { a.options.dropout = 1.5; }},
      {"num_threads must not be negative", [](Arguments& a) { a.options.num_threads = -1; }},
      {"sinks needs one floating-point number per head, [6]",
       [](Arguments& a) { a.options.sinks = ConstTensor(a.data.data(), {3}); }},
      {"bias must be floating point",
       [](Arguments& a) {
         a.options.bias = ConstTensor(static_cast<const void*>(a.data.data()), DType::boolean,
                                      std::vector<int64_t>{5, 7});
       }},
      {"bias does not broadcast",
       [](Arguments& a) {
         a.options.bias = ConstTensor(a.data.data(), {5, 6});
       }},
  };
  for (const auto& [text, spoil] : cases) {
    Arguments a;
    spoil(a);
    const std::string got = refusal(a);
    EXPECT_EQ(got.rfind("caller: ", 0), 0u) << got;
    EXPECT_NE(got.find(text), std::string::npos) << "got: " << got << ", want: " << text;
  }
  Arguments a;
  a.options.scale = nan;
  EXPECT_NE(refusal(a).find("scale must be finite"), std::string::npos);
}

TEST(Check, Outputs_NeedShapeTypeDataAndEveryElementOnce) {
  const Check check("caller");
  std::vector<float> data(64);
  const auto refused = [&](const Tensor& t, const char* text) {
    try {
      check.output(t, "outputs.out", {2, 3}, DType::f32);
    } catch (const Error& e) {
      return std::string(e.what()).find(text) != std::string::npos;
    }
    return false;
  };
  EXPECT_NO_THROW(check.output(Tensor(data.data(), {2, 3}), "outputs.out", {2, 3}, DType::f32));
  EXPECT_TRUE(refused(Tensor(data.data(), {3, 2}), "outputs.out needs shape [2, 3], got [3, 2]"));
  EXPECT_TRUE(refused(Tensor(static_cast<float*>(nullptr), {2, 3}), "has no data"));
  EXPECT_TRUE(refused(Tensor(reinterpret_cast<double*>(data.data()), {2, 3}), "must be f32"));
  EXPECT_TRUE(refused(Tensor(data.data(), {2, 3}, {0, 1}), "repeats elements: axis 0"));
}

}  // namespace
}  // namespace qkv
