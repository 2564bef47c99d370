// SPDX-License-Identifier: Apache-2.0
// What the schedule asks of a mask.
#include "mask_terms.h"

#include <gtest/gtest.h>

#include <vector>

namespace qkv {
namespace {

TEST(MaskTerms, ScoreStrides_AreZeroOnBroadcastAxes) {
  const float x[1] = {};
  const ScoreStrides two = score_strides(ConstTensor(x, {3, 5}));
  EXPECT_EQ(two.offset(1, 1, 2, 4), 14);
  const ScoreStrides three = score_strides(ConstTensor(x, {2, 3, 5}));
  EXPECT_EQ(three.offset(1, 7, 2, 4), 29);
  const ScoreStrides four = score_strides(ConstTensor(x, {1, 2, 1, 5}));
  EXPECT_EQ(four.offset(9, 1, 9, 4), 9);
  const ScoreStrides strided = score_strides(ConstTensor(x, {4, 2, 3, 5}, {0, -100, 7, 2}));
  EXPECT_EQ(strided.offset(3, 1, 2, 4), -78);
}

TEST(MaskTerms, FirstPosition_FollowsTheAlignmentNamed) {
  const int64_t lengths[] = {4, 6};
  const MaskShape shape{2, 1, 5, 9};
  EXPECT_EQ(first_position(Mask::full(), shape, 0), 4);
  EXPECT_EQ(first_position(Mask::causal_bottom_right(), shape, 0), 4);
  EXPECT_EQ(first_position(Mask::causal_top_left(), shape, 0), 0);
  EXPECT_EQ(first_position(Mask::window(1, 1, Alignment::top_left), shape, 0), 0);
  EXPECT_EQ(first_position(Mask::causal_top_left() & Mask::chunk(2), shape, 0), 4);
  EXPECT_EQ(first_position(Mask::lengths(lengths), shape, 0), 4);
  EXPECT_EQ(first_position(Mask::lengths(lengths) & Mask::causal_top_left(), shape, 1), 0);
  EXPECT_EQ(first_position(Mask::lengths(lengths) & Mask::causal_bottom_right(), shape, 0), -1);
  EXPECT_EQ(first_position(Mask::lengths(lengths) & Mask::causal_bottom_right(), shape, 1), 1);
}

TEST(MaskTerms, ScatteredDocuments_AreTheOnlyOnesToCompare) {
  const int64_t runs[] = {1, 1, 2}, scattered[] = {1, 2, 1};
  EXPECT_EQ(scattered_documents(Mask::full()), nullptr);
  EXPECT_EQ(scattered_documents(Mask::documents(ConstTensor(runs, {3}), ConstTensor(runs, {3}))),
            nullptr);
  EXPECT_NE(
      scattered_documents(Mask::documents(ConstTensor(runs, {3}), ConstTensor(scattered, {3}))),
      nullptr);
}

TEST(MaskTerms, LengthsAndDocuments_AreMergedIntoOneTermEach) {
  const int64_t a[] = {3, 9}, b[] = {5, 2}, ids[] = {1, 1, 2}, others[] = {1, 2, 2};
  const Mask lengths = Mask::lengths(a) & Mask::lengths(b);
  ASSERT_EQ(lengths.terms().size(), 1u);
  EXPECT_EQ(*lengths.terms()[0].lengths, (std::vector<int64_t>{3, 2}));
  const Mask documents = Mask::documents(ConstTensor(ids, {3}), ConstTensor(ids, {3})) &
                         Mask::documents(ConstTensor(others, {3}), ConstTensor(others, {3}));
  EXPECT_EQ(documents.terms().size(), 1u);
  EXPECT_EQ(documents.to_text({1, 1, 3, 3}), "x..\n.x.\n..x\n");
}

TEST(MaskTerms, Narrowed_CutsDenseArraysAlone) {
  // Rows 1 and 2 and the first three keys of an array of four rows and five keys.
  std::vector<uint8_t> seen(20);
  for (size_t i = 0; i < seen.size(); ++i) seen[i] = i % 3 == 0;
  const MaskShape array{1, 1, 4, 5}, entry{1, 1, 2, 3};
  const int64_t shape[] = {4, 5};
  const Mask dense = Mask::dense(ConstTensor(seen.data(), DType::boolean, shape));
  const Mask narrow = Mask::Term::narrowed((dense & Mask::prefix(9)).prepared(), array, 1, 2, 3);
  narrow.check(entry, "test");
  for (int64_t i = 0; i < 2; ++i)
    for (int64_t j = 0; j < 3; ++j)
      EXPECT_EQ(narrow.visible(entry, 0, 0, i, j), seen[static_cast<size_t>((1 + i) * 5 + j)] != 0);
  // What broadcasts stays: one row for all, one key for all.
  const int64_t row[] = {1, 5}, column[] = {4, 1};
  const ConstTensor one_row(seen.data(), DType::boolean, row),
      one_key(seen.data(), DType::boolean, column);
  EXPECT_EQ(narrow_scores(one_row, array, 1, 2, 3).data, seen.data());
  EXPECT_EQ(narrow_scores(one_row, array, 1, 2, 3).shape[1], 3);
  EXPECT_EQ(narrow_scores(one_key, array, 1, 2, 3).shape[0], 2);
  EXPECT_EQ(narrow_scores(one_key, array, 1, 2, 3).shape[1], 1);
  EXPECT_EQ(narrow_scores(one_key, array, 1, 2, 3).data, seen.data() + 1);
  EXPECT_TRUE(Mask::Term::narrowed(Mask::chunk(2), array, 1, 2, 3).visible(entry, 0, 0, 1, 2));
}

}  // namespace
}  // namespace qkv
