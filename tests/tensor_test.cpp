// SPDX-License-Identifier: Apache-2.0
// Tier: test. Views: default strides, conversions, refusals, and the text of shapes.
#include "qkv/tensor.h"

#include <gtest/gtest.h>

#include <vector>

namespace {

using qkv::ConstTensor;
using qkv::DType;
using qkv::Error;
using qkv::shape_text;
using qkv::Tensor;

TEST(Tensor, ShapeText_AllRanks) {
  const float x = 0;
  EXPECT_EQ(shape_text(ConstTensor()), "[]");
  EXPECT_EQ(shape_text(ConstTensor(&x, {7})), "[7]");
  EXPECT_EQ(shape_text(ConstTensor(&x, {2, 8, 4, 64})), "[2, 8, 4, 64]");
  EXPECT_EQ(shape_text(ConstTensor(&x, {0, int64_t{1} << 40})), "[0, 1099511627776]");
  EXPECT_EQ(shape_text(std::vector<int64_t>{1, 2, 3, 4, 5}), "[1, 2, 3, 4, 5]");
}

TEST(Tensor, DefaultStrides_LastAxisFastest) {
  double x[24] = {};
  const Tensor t(x, {2, 3, 4});
  EXPECT_EQ(t.dtype, DType::f64);
  EXPECT_EQ(t.stride[0], 12);
  EXPECT_EQ(t.stride[1], 4);
  EXPECT_EQ(t.stride[2], 1);
  EXPECT_EQ(t.num_elements(), 24);
  EXPECT_TRUE(t.is_contiguous());
  EXPECT_FALSE(Tensor(x, {2, 3}, {1, 2}).is_contiguous());
  EXPECT_TRUE(Tensor(x, {1, 3}, {77, 1}).is_contiguous()) << "the stride of an axis of 1 is free";
  EXPECT_TRUE(Tensor(x, {0, 3}, {1, 9}).is_contiguous()) << "nothing to be out of order";
}

TEST(Tensor, Given_MeansRankOrData) {
  const float x = 0;
  const int64_t empty[] = {0};
  EXPECT_FALSE(ConstTensor());
  EXPECT_TRUE(ConstTensor(&x, {}));
  EXPECT_TRUE(ConstTensor(nullptr, DType::f32, empty));
}

TEST(Tensor, WrongArguments_AreRefused) {
  float x[1] = {};
  EXPECT_THROW(Tensor(x, {1, 1, 1, 1, 1}), Error);
  EXPECT_THROW(Tensor(x, {1, -1}), Error);
  EXPECT_THROW(Tensor(x, {1, 1}, {1}), Error);
}

TEST(Tensor, ToConst_KeepsEverything) {
  int64_t x[6] = {};
  const ConstTensor c = Tensor(x, {3, 2}, {1, 3});
  EXPECT_EQ(c.data, x);
  EXPECT_EQ(c.dtype, DType::i64);
  EXPECT_EQ(shape_text(c), "[3, 2]");
  EXPECT_EQ(c.stride[1], 3);
}

}  // namespace
