// SPDX-License-Identifier: Apache-2.0
// Tier: test. Rows on their way into a cache: every pair of types, strides, and rounding to i8 with its
// sums.
#include "kv_rows.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <limits>
#include <random>
#include <vector>

#include "support/tensors.h"

namespace qkv::test {
namespace {

alignas(double) std::byte g_row[64];

RowsJob job(const TestTensor& from, const Tensor& to, float* scale, int64_t first, int64_t n) {
  return {from.view().data,
          from.view().dtype,
          from.view().stride[0],
          to.data,
          to.dtype,
          to.stride[0],
          scale,
          first,
          n,
          from.view().shape[1],
          g_row};
}

TEST(KvRows, EveryPairOfTypes_RoundsOnce) {
  std::mt19937_64 random(1);
  for (const DType from : {DType::f32, DType::f64, DType::bf16, DType::f16})
    for (const DType to : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
      TestTensor x(from, {5, 7}), y(to, {5, 7});
      x.fill_random(random);
      write_rows(job(x, y.view(), nullptr, 2, 3), {}, nullptr);
      for (int64_t i = 0; i < 3; ++i)
        for (int64_t d = 0; d < 7; ++d) {
          double room = 0;
          const int64_t shape[] = {1};
          const Tensor want(&room, to, shape);
          set_element(want, 0, element(x.view(), (2 + i) * 7 + d));
          EXPECT_EQ(element(y.view(), i * 7 + d), element(want, 0));
        }
      for (int64_t d = 0; d < 7; ++d) EXPECT_TRUE(std::isnan(element(y.view(), 3 * 7 + d)));
    }
}

TEST(KvRows, Int8_NearestStepAndItsSums) {
  const std::vector<double> values = {1.27, -0.64, 0.004,      0.0, /**/ 0, 0,
                                      0,    0,     /**/ 1e-44, 0,   0,      0};
  const TestTensor x(DType::f32, {3, 4}, values);
  std::vector<int8_t> q(12, 99);
  std::vector<float> scale(3, -1);
  QuantSums sums;
  const int64_t shape[] = {3, 4};
  write_rows(job(x, Tensor(q.data(), DType::i8, shape), scale.data(), 0, 3), {}, &sums);
  EXPECT_FLOAT_EQ(scale[0], 0.01f);
  EXPECT_EQ(q[0], 127);
  EXPECT_EQ(q[1], -64);
  EXPECT_EQ(q[2], 0);
  for (size_t i = 4; i < 12; ++i) EXPECT_EQ(q[i], 0);
  EXPECT_EQ(scale[1], 0);
  EXPECT_EQ(scale[2], 0);
  EXPECT_EQ(sums.elements, 12);
  EXPECT_NEAR(sums.max_abs, 0.004, 1e-9);
  EXPECT_NEAR(std::sqrt(sums.squares), 0.004, 1e-7);
  for (const double bad :
       {std::numeric_limits<double>::quiet_NaN(), -std::numeric_limits<double>::infinity()}) {
    TestTensor nan(DType::f32, {1, 4});
    nan.fill(1);
    set_element(nan.view(), 2, bad);
    const int64_t one[] = {1, 4};
    write_rows(job(nan, Tensor(q.data(), DType::i8, one), scale.data(), 0, 1), {}, &sums);
    EXPECT_TRUE(std::isnan(scale[0]));
    EXPECT_EQ(q[0], 0);
  }
}

TEST(KvRows, NormComesBeforeRope) {
  const std::vector<double> values = {3, 4};
  const TestTensor x(DType::f64, {1, 2}, values);
  const std::vector<float> weight = {2, 1};
  RopeTable table({}, 2, "test");
  const int64_t position = 1;
  table.fill({&position, 1});
  RowSteps steps;
  steps.norm = &weight, steps.rope = &table;
  TestTensor y(DType::f64, {1, 2});
  write_rows(job(x, y.view(), nullptr, 0, 1), steps, nullptr);
  const double rms = std::sqrt(12.5), a = 2 * 3 / rms, b = 4 / rms;
  EXPECT_NEAR(element(y.view(), 0), a * std::cos(1.0) - b * std::sin(1.0), 1e-15);
  EXPECT_NEAR(element(y.view(), 1), b * std::cos(1.0) + a * std::sin(1.0), 1e-15);
}

}  // namespace
}  // namespace qkv::test
