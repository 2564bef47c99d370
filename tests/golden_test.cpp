// SPDX-License-Identifier: Apache-2.0
// The 423 kernel cases of the shared golden data, in every element type they hold for, and the reference on the same cases.
// The bounds are those of the file: tol_f32, a 2^26th of it for f64, rounding of the output on top for the 16-bit types.
#include <gtest/gtest.h>

#include <fstream>
#include <map>

#include "qkv/attention.h"
#include "qkv/weights.h"
#include "reference.h"
#include "support/bounds.h"
#include "support/files.h"
#include "support/json_cases.h"

namespace qkv {
namespace {

using test::Array;
using test::Json;
using test::TestTensor;

class GoldenCases {
 public:
  explicit GoldenCases(const std::string& folder)
      : index_(Json::parse(std::ifstream(folder + "/attention_cases/index.json"))),
        file_(SafetensorsFile::open(folder + "/attention_cases/tensors.safetensors")) {}
  const Json& cases() const { return index_.at("cases"); }
  Array array(const Json& c, const std::string& name) const {
    const ConstTensor t = file_.tensor(c.at("name").get<std::string>() + "/" + name);
    return {std::vector<int64_t>(t.shape, t.shape + t.rank), test::values(t)};
  }

 private:
  Json index_;
  SafetensorsFile file_;
};

// The inputs of a case in one element type. Options stay in f32 (f64 for f64).
struct Inputs {
  Inputs(const GoldenCases& golden, const Json& c, DType dtype) {
    const DType arithmetic = dtype == DType::f64 ? DType::f64 : DType::f32;
    for (const Json& input : c.at("inputs")) {
      const std::string name = input.get<std::string>();
      const Array a = golden.array(c, name);
      if (name == "q") q = a.tensor(dtype);
      if (name == "k") k = a.tensor(dtype);
      if (name == "v") v = a.tensor(dtype);
      if (name == "dout") dout = a.tensor(dtype);
      if (name == "bias") options.bias = bias = a.tensor(arithmetic);
      if (name == "sinks") options.sinks = sinks = a.tensor(arithmetic);
      if (name == "alibi_slopes") options.alibi_slopes = alibi_slopes = a.tensor(arithmetic);
    }
    options.mask =
        masks.make(c.at("mask"), [&](const std::string& name) { return golden.array(c, name); });
    if (!c.at("scale").is_null()) options.scale = c.at("scale").get<double>();
    if (!c.at("softcap").is_null()) options.softcap = c.at("softcap").get<double>();
  }
  test::JsonMasks masks;
  TestTensor q, k, v, dout, bias, sinks, alibi_slopes;
  AttentionOptions options;
};

// Compares what was computed with what the case expects of it; returns the number of tensors compared.
int compare(const GoldenCases& golden, const Json& c,
            const std::map<std::string, std::vector<double>>& got, DType dtype, double extra_out) {
  int compared = 0;
  for (const Json& expected : c.at("expected")) {
    const std::string name = expected.get<std::string>();
    const auto found = got.find(name);
    if (found == got.end()) continue;
    const double tol_f32 = c.at("tol_f32").at(name).get<double>();
    const double allowed = dtype == DType::f64 ? std::ldexp(tol_f32, -26) + 1e-13
                                               : tol_f32 + (name == "out" ? extra_out : 0);
    EXPECT_TRUE(test::within(name.c_str(), found->second, golden.array(c, name).values,
                             [&](size_t) { return allowed; }))
        << c.at("name") << " " << qkv::name(dtype);
    ++compared;
  }
  return compared;
}

#define QKV_REQUIRE_SHARED_DATA(folder)                  \
  const std::string folder = test::shared_data_folder(); \
  if (folder.empty())                                    \
  GTEST_SKIP() << "the shared golden data is not here (QKV_SHARED_DATA names its folder)"

TEST(Golden, ReferenceForwardAndBackward_EqualAnIndependentImplementation) {
  QKV_REQUIRE_SHARED_DATA(folder);
  const GoldenCases golden(folder);
  int compared = 0;
  for (const Json& c : golden.cases()) {
    const Inputs in(golden, c, DType::f64);
    const auto forward = reference::forward(in.q, in.k, in.v, in.options);
    std::map<std::string, std::vector<double>> got = {
        {"out", forward.out}, {"lse", forward.lse}, {"weights", forward.weights}};
    if (in.dout) {
      const auto g = reference::backward(in.q, in.k, in.v, in.dout, {}, in.options);
      got.insert(
          {{"dq", g.dq}, {"dk", g.dk}, {"dv", g.dv}, {"dbias", g.dbias}, {"dsinks", g.dsinks}});
    }
    compared += compare(golden, c, got, DType::f64, 0);
  }
  EXPECT_EQ(golden.cases().size(), 423u);
  EXPECT_EQ(compared, 423 + 415 + 406 + 3 * 393 + 54 + 23);
}

int expect_attention(const GoldenCases& golden, DType dtype, bool only_exact_in_half) {
  const DType arithmetic = dtype == DType::f64 ? DType::f64 : DType::f32;
  const double unit = dtype == DType::f16    ? std::ldexp(1, -11)
                      : dtype == DType::bf16 ? std::ldexp(1, -8)
                                             : 0;
  int compared = 0;
  for (const Json& c : golden.cases()) {
    if (only_exact_in_half && !c.at("exact_in_half").get<bool>()) continue;
    const Inputs in(golden, c, dtype);
    const auto& q = in.q.view().shape;
    TestTensor out(dtype, {q[0], q[1], q[2], in.v.view().shape[3]}),
        lse(arithmetic, {q[0], q[1], q[2]}),
        weights(arithmetic, {q[0], q[1], q[2], in.k.view().shape[2]});
    attention(in.q, in.k, in.v, {.out = out.view(), .lse = lse.view(), .weights = weights.view()},
              in.options);
    compared += compare(
        golden, c, {{"out", out.values()}, {"lse", lse.values()}, {"weights", weights.values()}},
        dtype, 4 * unit * test::max_magnitude(in.v.values()));
    TestTensor alone(dtype, {q[0], q[1], q[2], in.v.view().shape[3]});
    attention(in.q, in.k, in.v, {.out = alone.view()}, in.options);
    EXPECT_EQ(alone.bits(), out.bits())
        << c.at("name") << ": out changes when lse and weights are asked for";
  }
  return compared;
}

int expect_gradients(const GoldenCases& golden, DType dtype) {
  int compared = 0;
  for (const Json& c : golden.cases()) {
    const Inputs in(golden, c, dtype);
    if (!in.dout) continue;
    const auto& q = in.q.view().shape;
    TestTensor out(dtype, {q[0], q[1], q[2], in.v.view().shape[3]}), lse(dtype, {q[0], q[1], q[2]});
    attention(in.q, in.k, in.v, {.out = out.view(), .lse = lse.view()}, in.options);
    const auto like = [&](const TestTensor& t) {
      return t ? TestTensor(dtype, {t.view().shape, t.view().shape + t.view().rank}) : TestTensor();
    };
    const TestTensor dq = like(in.q), dk = like(in.k), dv = like(in.v), dbias = like(in.bias),
                     dsinks = like(in.sinks);
    attention_backward({.q = in.q, .k = in.k, .v = in.v, .out = out, .lse = lse, .dout = in.dout},
                       {.dq = dq.view(),
                        .dk = dk.view(),
                        .dv = dv.view(),
                        .dbias = dbias.view(),
                        .dsinks = dsinks.view()},
                       in.options);
    compared += compare(golden, c,
                        {{"dq", dq.values()},
                         {"dk", dk.values()},
                         {"dv", dv.values()},
                         {"dbias", dbias.values()},
                         {"dsinks", dsinks.values()}},
                        dtype, 0);
  }
  return compared;
}

TEST(Golden, AttentionF32) {
  QKV_REQUIRE_SHARED_DATA(folder);
  EXPECT_EQ(expect_attention(GoldenCases(folder), DType::f32, false), 423 + 415 + 406);
}

TEST(Golden, AttentionF64) {
  QKV_REQUIRE_SHARED_DATA(folder);
  EXPECT_EQ(expect_attention(GoldenCases(folder), DType::f64, false), 423 + 415 + 406);
}

TEST(Golden, GradientsF32) {
  QKV_REQUIRE_SHARED_DATA(folder);
  EXPECT_EQ(expect_gradients(GoldenCases(folder), DType::f32), 3 * 393 + 54 + 23);
}

TEST(Golden, GradientsF64) {
  QKV_REQUIRE_SHARED_DATA(folder);
  EXPECT_EQ(expect_gradients(GoldenCases(folder), DType::f64), 3 * 393 + 54 + 23);
}

TEST(Golden, AttentionF16) {
  QKV_REQUIRE_SHARED_DATA(folder);
  EXPECT_GE(expect_attention(GoldenCases(folder), DType::f16, true), 2 * 147);
}

TEST(Golden, AttentionBf16) {
  QKV_REQUIRE_SHARED_DATA(folder);
  EXPECT_GE(expect_attention(GoldenCases(folder), DType::bf16, true), 2 * 147);
}

}  // namespace
}  // namespace qkv
