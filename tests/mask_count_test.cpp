// SPDX-License-Identifier: Apache-2.0
// count_visible at sizes where pairs cannot be visited one by one. Small sizes: mask_test.
#include <gtest/gtest.h>

#include "qkv/mask.h"

namespace qkv {
namespace {

TEST(MaskCount, HugeRangeMasks_AreCountedInClosedForm) {
  const int64_t n = int64_t{1} << 31;
  const MaskShape square{1, 1, n, n};
  EXPECT_EQ(Mask::full().count_visible(square), n * n);
  EXPECT_EQ(Mask::causal_top_left().count_visible(square), n * (n + 1) / 2);
  EXPECT_EQ(Mask::causal_bottom_right().count_visible(square), n * (n + 1) / 2);
  EXPECT_EQ(Mask::window(3, 0).count_visible(square), 4 * n - 6);
  EXPECT_EQ(Mask::window(0, 3).count_visible(square), 4 * n - 6);
  EXPECT_EQ((Mask::window(3, 3) & Mask::causal_top_left()).count_visible(square), 4 * n - 6);
  EXPECT_EQ(Mask::prefix(n / 2).count_visible(square),
            n / 2 * (n / 2) + n / 2 * (n / 2 + 1) / 2 + n / 2 * (n / 2));
  EXPECT_EQ(Mask::window(INT64_MAX, INT64_MAX).count_visible(square), n * n);
}

TEST(MaskCount, EntriesAndHeads_AreMultiplied) {
  const int64_t lengths[] = {10, 0, 3};
  EXPECT_EQ(Mask::lengths(lengths).count_visible({3, 4, 5, 10}), 4 * 5 * 13);
  EXPECT_EQ(Mask::causal_bottom_right().count_visible({3, 4, 5, 5}), 3 * 4 * 15);
  EXPECT_EQ(Mask::full().count_visible({0, 4, 5, 5}), 0);
  EXPECT_EQ(Mask::full().count_visible({3, 0, 5, 5}), 0);
}

TEST(MaskCount, MoreThan63Bits_IsRefused) {
  EXPECT_THROW(Mask::full().count_visible({1, 1, INT64_MAX, 2}), Error);
  EXPECT_THROW(
      Mask::causal_bottom_right().count_visible({INT64_MAX, INT64_MAX, INT64_MAX, INT64_MAX}),
      Error);
  EXPECT_EQ(Mask::full().count_visible({1, 1, INT64_MAX, 1}), INT64_MAX);
}

}  // namespace
}  // namespace qkv
