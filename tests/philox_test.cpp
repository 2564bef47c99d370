// SPDX-License-Identifier: Apache-2.0
// The generator against the known answers published with it, and the keying of dropout.
#include "philox.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

namespace qkv {
namespace {

void expect_block(PhiloxBlock got, PhiloxBlock want) {
  for (int w = 0; w < 4; ++w) EXPECT_EQ(got.word[w], want.word[w]) << "word " << w;
}

// Known-answer vectors of philox4x32, 10 rounds (Random123, kat_vectors).
TEST(Philox, KnownAnswers) {
  expect_block(philox4x32({{0, 0, 0, 0}}, 0, 0),
               {{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}});
  expect_block(
      philox4x32({{0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu}}, 0xffffffffu, 0xffffffffu),
      {{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}});
  expect_block(
      philox4x32({{0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}}, 0xa4093822u, 0x299f31d0u),
      {{0xd16cfe09u, 0x94fdcceb, 0x5001e420u, 0x24126ea1u}});
}

TEST(Philox, CanBeEvaluatedByTheCompiler) {
  static_assert(philox4x32({{0, 0, 0, 0}}, 0, 0).word[0] == 0x6627e8d5u);
  static_assert(dropout_word(0, 0, 0, 3) == 0x9b00dbd8u);
}

TEST(Philox, DropoutWord_IsKeyedAsDocumented) {
  const uint64_t seed = 0x299f31d0a4093822u;
  for (int64_t j : {0, 1, 2, 3, 4, 7, 1001}) {
    const PhiloxBlock want =
        philox4x32({{static_cast<uint32_t>(j / 4), 5, 7, 0}}, 0xa4093822u, 0x299f31d0u);
    EXPECT_EQ(dropout_word(seed, 7, 5, j), want.word[j % 4]) << j;
  }
}

TEST(Philox, DropoutWord_DiffersInEveryArgument) {
  std::set<uint32_t> words;
  const int64_t big = int64_t{1} << 32;
  int count = 0;
  for (int64_t head : {int64_t{0}, int64_t{1}, big, big + 1})
    for (int64_t i : {int64_t{0}, int64_t{1}, big, 2 * big})
      for (int64_t j : {int64_t{0}, int64_t{1}, int64_t{4}, 4 * big, 4 * big + 4})
        for (uint64_t seed : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 32}) {
          words.insert(dropout_word(seed, head, i, j));
          ++count;
        }
  EXPECT_EQ(words.size(), static_cast<size_t>(count));
}

TEST(Philox, Threshold_IsExactAtTheEndsAndBetween) {
  EXPECT_EQ(dropout_threshold(0), 0u);
  EXPECT_EQ(dropout_threshold(1), uint64_t{1} << 32);
  EXPECT_EQ(dropout_threshold(0.5), uint64_t{1} << 31);
  EXPECT_EQ(dropout_threshold(1e-300), 1u);  // word 0 is below any positive probability
  EXPECT_EQ(dropout_threshold(0.1), 429496730u);
}

TEST(Philox, ShareOfDroppedWords_IsTheProbability) {
  const uint64_t threshold = dropout_threshold(0.2);
  const int64_t n = 1 << 20;
  int64_t dropped = 0;
  for (int64_t j = 0; j < n; ++j) dropped += dropout_word(99, 3, 17, j) < threshold;
  // Five standard deviations of the binomial distribution.
  EXPECT_NEAR(static_cast<double>(dropped), 0.2 * n, 5 * std::sqrt(0.2 * 0.8 * n));
}

}  // namespace
}  // namespace qkv
