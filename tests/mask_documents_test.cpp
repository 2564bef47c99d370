// SPDX-License-Identifier: Apache-2.0
// Documents: what becomes a range, what stays scattered, and codes that never match by accident.
#include <gtest/gtest.h>

#include "mask_terms.h"

namespace qkv {
namespace {

TEST(MaskDocuments, ContiguousRuns_BecomeRanges) {
  const int32_t q[] = {3, 3, 5, 8, 5};
  const int32_t kv[] = {5, 5, 8, 3, 3, 3};
  const auto d = make_documents(ConstTensor(q, {5}), ConstTensor(kv, {6}));
  EXPECT_FALSE(d->is_scattered);
  const int64_t want[5][2] = {{3, 6}, {3, 6}, {0, 2}, {2, 3}, {0, 2}};
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(d->hull(0)[i].lo, want[i][0]) << i;
    EXPECT_EQ(d->hull(0)[i].hi, want[i][1]) << i;
  }
}

TEST(MaskDocuments, ScatteredIds_KeepAHullAndCodes) {
  const int64_t ids[] = {1, 2, 1, 2, 2};
  const auto d = make_documents(ConstTensor(ids, {5}), ConstTensor(ids, {5}));
  EXPECT_TRUE(d->is_scattered);
  EXPECT_EQ(d->hull(0)[0].lo, 0);
  EXPECT_EQ(d->hull(0)[0].hi, 3);
  EXPECT_EQ(d->hull(0)[1].lo, 1);
  EXPECT_EQ(d->hull(0)[1].hi, 5);
}

TEST(MaskDocuments, ScatteredKeysThatNoQueryAsksFor_DoNotMatter) {
  const int64_t q[] = {7, 7};
  const int64_t kv[] = {1, 7, 7, 1};
  EXPECT_FALSE(make_documents(ConstTensor(q, {2}), ConstTensor(kv, {4}))->is_scattered);
}

TEST(MaskDocuments, IdsOnOneSide_NeverMatch) {
  const int64_t q[] = {-1, 10, INT64_MIN};
  const int64_t kv[] = {-2, 11, 10, INT64_MAX};
  const auto d = make_documents(ConstTensor(q, {3}), ConstTensor(kv, {4}));
  for (int i = 0; i < 3; ++i)
    for (int j = 0; j < 4; ++j)
      EXPECT_EQ(d->q(0)[i] == d->kv(0)[j], q[i] == kv[j]) << i << " " << j;
  EXPECT_EQ(d->hull(0)[0].lo, d->hull(0)[0].hi);
}

TEST(MaskDocuments, PerBatchIds_AreJudgedPerEntry) {
  const int32_t q[] = {1, 2, 1, 2};
  const int32_t kv[] = {1, 1, 2, 1, 2, 1};  // entry 0 in runs, entry 1 scattered
  const auto d = make_documents(ConstTensor(q, {2, 2}), ConstTensor(kv, {2, 3}));
  EXPECT_TRUE(d->is_scattered);
  EXPECT_EQ(d->hull(0)[0].hi, 2);
  EXPECT_EQ(d->hull(1)[0].hi, 3);
  EXPECT_EQ(d->hull(1)[1].lo, 1);
  EXPECT_EQ(d->hull(1)[1].hi, 2);
}

TEST(MaskDocuments, StridedIds_AreReadByTheirStrides) {
  const int32_t ids[] = {1, 9, 2, 9, 2, 9};
  const auto d = make_documents(ConstTensor(ids, {3}, {2}), ConstTensor(ids + 4, {3}, {-2}));
  EXPECT_EQ(d->hull(0)[0].lo, 2);
  EXPECT_EQ(d->hull(0)[1].lo, 0);
  EXPECT_EQ(d->hull(0)[1].hi, 2);
}

TEST(MaskDocuments, WrongIds_AreRefused) {
  const float x[4] = {};
  const int64_t ids[4] = {};
  EXPECT_THROW(make_documents(ConstTensor(x, {4}), ConstTensor(ids, {4})), Error);
  EXPECT_THROW(make_documents(ConstTensor(ids, {4}), ConstTensor(ids, {1, 2, 2})), Error);
  EXPECT_THROW(make_documents(ConstTensor(ids, {2, 2}), ConstTensor(ids, {1, 4})), Error);
  const auto a = make_documents(ConstTensor(ids, {4}), ConstTensor(ids, {4}));
  const auto b = make_documents(ConstTensor(ids, {3}), ConstTensor(ids, {4}));
  EXPECT_THROW(intersect_documents(*a, *b), Error);
}

}  // namespace
}  // namespace qkv
