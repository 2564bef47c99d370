// SPDX-License-Identifier: Apache-2.0
// Tier: test. rope() against the formula in double, both styles, all types and layouts; ALiBi slopes.
#include "qkv/rope.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "support/bounds.h"
#include "support/files.h"
#include "support/tensors.h"

namespace qkv::test {
namespace {

TEST(Rope, TurnsPairsByTheirAngle) {
  std::mt19937_64 random(1);
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16})
    for (const Layout layout : {Layout::contiguous, Layout::bshd, Layout::reversed})
      for (const RopeStyle style : {RopeStyle::half_split, RopeStyle::interleaved})
        for (const int64_t rot_dim : {-1, 0, 6}) {
          TestTensor x(dtype, {2, 3, 5, 10}, layout), out(dtype, {2, 3, 5, 10}, layout);
          x.fill_random(random);
          const int64_t positions[] = {0, 3, -2, 100, 4000, 1, 2, 3, 4, 5};
          rope(x, ConstTensor(positions, {2, 5}), out.view(), {1000, style, rot_dim});
          const int64_t n = rot_dim < 0 ? 10 : rot_dim;
          std::vector<double> want;
          for (int64_t b = 0; b < 2; ++b)
            for (int64_t h = 0; h < 3; ++h)
              for (int64_t i = 0; i < 5; ++i)
                for (int64_t d = 0; d < 10; ++d) {
                  const bool split = style == RopeStyle::half_split;
                  const int64_t pair = split ? d % std::max<int64_t>(n / 2, 1) : d / 2;
                  const bool is_second = split ? d >= n / 2 : d % 2 == 1;
                  const int64_t step = split ? n / 2 : 1;
                  const double own = x.get(b, h, i, d);
                  if (d >= n) {
                    want.push_back(own);
                    continue;
                  }
                  const double other = x.get(b, h, i, is_second ? d - step : d + step);
                  const double angle =
                      static_cast<double>(positions[b * 5 + i]) *
                      std::pow(1000.0, -2.0 * static_cast<double>(pair) / static_cast<double>(n));
                  want.push_back(own * std::cos(angle) +
                                 (is_second ? other : -other) * std::sin(angle));
                }
          EXPECT_TRUE(within_bound("out", dtype, out.values(), want, 0));
          EXPECT_TRUE(out.is_padding_untouched());
          rope(x, ConstTensor(positions, {2, 5}), x.view(), {1000, style, rot_dim});  // in place
          EXPECT_EQ(x.bits(), out.bits());
        }
}

TEST(Rope, Errors) {
  TestTensor x(DType::f32, {1, 2, 3, 8});
  x.fill(1);
  const int64_t positions[] = {0, 1, 2};
  const ConstTensor three(positions, {3}), two(positions, {2});
  const auto refused = [&](auto call, const std::string& words) {
    const std::string text = error_text(call);
    EXPECT_NE(text.find(words), std::string::npos) << words << " in: " << text;
    EXPECT_EQ(x.get(0, 1, 2, 0), 1);
  };
  refused([&] { rope(x, two, x.view()); }, "positions need [tokens] or [batch, tokens] integers");
  refused([&] { rope(x, three, x.view(), {.rot_dim = 3}); }, "rot_dim must be even");
  refused([&] { rope(x, three, x.view(), {.rot_dim = 10}); }, "at most the head dim 8, got 10");
  refused([&] { rope(x, three, x.view(), {.base = 0}); }, "base of rope must be positive");
  TestTensor small(DType::f32, {1, 2, 3, 7});
  refused([&] { rope(x, three, small.view()); }, "out needs shape [1, 2, 3, 8]");
}

TEST(AlibiSlopes, AreThoseOfThePaper) {
  EXPECT_EQ(alibi_slopes(8), (std::vector<float>{0.5f, 0.25f, 0.125f, 0.0625f, 0.03125f, 0.015625f,
                                                 0.0078125f, 0.00390625f}));
  const std::vector<float> twelve = alibi_slopes(12);
  ASSERT_EQ(twelve.size(), 12u);
  for (size_t i = 0; i < 4; ++i)  // every second slope of 16 heads
    EXPECT_FLOAT_EQ(twelve[8 + i], std::exp2(-0.5f * static_cast<float>(2 * i + 1)));
  EXPECT_EQ(alibi_slopes(1), std::vector<float>{1.0f / 256});
  EXPECT_NE(error_text([] { alibi_slopes(0); }).find("must be positive, got 0"), std::string::npos);
}

}  // namespace
}  // namespace qkv::test
