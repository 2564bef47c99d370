// SPDX-License-Identifier: Apache-2.0
// Tier: test. The projection kernel against a double loop, at the edges of its memory, and its bits
// under every division of the work.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "kernels/kernels.h"
#include "support/bounds.h"
#include "support/guarded.h"

namespace {

using qkv::kernels::active;
using qkv::kernels::LinearTask;
using Floats = qkv::test::GuardedFloats;
using qkv::test::within_bound;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kUntouched = -12345.5f;

// y = x w^T + bias with every array at the end of its memory, rows of x and y apart from each other
// with NaN (x) and a marker (y) between them.
struct Problem {
  int64_t m, k, n, x_stride, y_stride;
  Floats x, w, bias, packed, y;
  bool has_bias;

  Problem(int64_t rows, int64_t inner, int64_t columns, bool with_bias = true, int64_t x_gap = 3,
          int64_t y_gap = 5, uint32_t seed = 1)
      : m(rows),
        k(inner),
        n(columns),
        x_stride(inner + x_gap),
        y_stride(columns + y_gap),
        x(rows ? (rows - 1) * x_stride + inner : 0, kNan),
        w(columns * inner),
        bias(with_bias ? columns : 0),
        packed(active().packed_floats(columns, inner), kNan),
        y(rows ? (rows - 1) * y_stride + columns : 0, kUntouched),
        has_bias(with_bias) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t u = 0; u < k; ++u) x[i * x_stride + u] = normal(random);
    }
    for (float& value : w.span()) value = normal(random);
    for (float& value : bias.span()) value = normal(random);
    pack();
  }

  void pack() { active().pack(w.data(), n, k, packed.data()); }

  LinearTask task() const {
    LinearTask t{};
    t.x = x.data(), t.x_stride = x_stride;
    t.w = packed.data(), t.bias = has_bias ? bias.data() : nullptr;
    t.y = y.data(), t.y_stride = y_stride;
    t.m = m, t.k = k, t.n = n;
    return t;
  }
  void run() { active().linear(task()); }

  float at(int64_t i, int64_t j) const { return y[i * y_stride + j]; }
  double exact(int64_t i, int64_t j) const {
    double sum = 0;
    for (int64_t u = 0; u < k; ++u)
      sum += static_cast<double>(x[i * x_stride + u]) * static_cast<double>(w[j * k + u]);
    return has_bias ? sum + static_cast<double>(bias[j]) : sum;
  }
  float plain(int64_t i, int64_t j) const {
    float sum = 0;
    for (int64_t u = 0; u < k; ++u) sum += x[i * x_stride + u] * w[j * k + u];
    return has_bias ? sum + bias[j] : sum;
  }
};

// One element alone may be exact by chance in the plain loop: its error and its size are also taken
// from 64 sums of the same length.
struct Plain {
  double error = 0, largest = 0;
  void see(const Problem& p) {
    for (int64_t i = 0; i < p.m; ++i) {
      for (int64_t j = 0; j < p.n; ++j) {
        const double exact = p.exact(i, j);
        largest = std::max(largest, std::fabs(exact));
        error = std::max(error, std::fabs(static_cast<double>(p.plain(i, j)) - exact));
      }
    }
  }
};

void expect_untouched_gaps(const Problem& p) {
  for (int64_t i = 0; i + 1 < p.m; ++i) {
    for (int64_t j = p.n; j < p.y_stride; ++j) ASSERT_EQ(p.at(i, j), kUntouched) << i << " " << j;
  }
}

void check(int64_t m, int64_t k, int64_t n, bool with_bias = true) {
  SCOPED_TRACE(testing::Message() << "m " << m << " k " << k << " n " << n << " bias "
                                  << with_bias);
  Problem p(m, k, n, with_bias);
  p.run();
  Plain plain;
  plain.see(p);
  plain.see(Problem(8, k, 8, true, 0, 0, 77));
  std::vector<double> got, want;
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      got.push_back(static_cast<double>(p.at(i, j)));
      want.push_back(p.exact(i, j));
    }
  }
  EXPECT_TRUE(within_bound("y", qkv::DType::f32, got, want, plain.error, plain.largest));
  expect_untouched_gaps(p);
}

std::vector<int64_t> column_counts() {
  const int64_t c = active().linear_columns;
  std::vector<int64_t> counts = {0, 1, 2, 7, 13};
  for (int64_t panels : {1, 2, 3, 4, 5}) {
    for (int64_t d : {-1, 0, 1}) counts.push_back(panels * c + d);
  }
  for (int64_t part : {c / 2 - 1, c / 2, c / 2 + 1, 2 * c + c / 2}) counts.push_back(part);
  return counts;
}

TEST(Linear, EveryRowAndColumnTail) {
  for (int64_t n : column_counts()) {
    for (int64_t m = 0; m <= 27; ++m) {
      for (int64_t k : {1, 16, 67}) check(m, k, n, (m + n) % 3 != 0);
    }
  }
}

TEST(Linear, EveryLengthAroundTheChunks) {
  for (int64_t k : {0, 2, 15, 17, 64, 127, 511, 512, 513, 1023, 1024, 1025, 1537}) {
    for (int64_t m : {1, 2, 3, 4, 9, 20}) {
      for (int64_t n : {1, 33, 80}) check(m, k, n);
    }
  }
}

TEST(Linear, RowsAroundTheBlock) {
  for (int64_t m : {64, 127, 128, 129, 137, 256, 261}) check(m, 40, 47);
}

// More weights than a second-level cache: the path that asks for cache lines ahead.
TEST(Linear, LargeWeights) {
  for (int64_t m : {1, 2, 3, 5, 8, 11, 16, 140}) check(m, 1100, 331);
  check(40, 300, 1030);
}

TEST(Linear, NoInputsLeaveTheBias) {
  Problem p(3, 0, 5);
  p.run();
  for (int64_t i = 0; i < 3; ++i) {
    for (int64_t j = 0; j < 5; ++j) EXPECT_EQ(p.at(i, j), p.bias[j]);
  }
  Problem without(3, 0, 5, false);
  without.run();
  for (int64_t j = 0; j < 5; ++j) EXPECT_EQ(without.at(2, j), 0.0f);
}

// Weights as they are, ending where their memory ends: the bits of packed ones.
TEST(Linear, WeightsInPlace_SameBits) {
  const auto check_bits = [](int64_t m, int64_t k, int64_t n, bool with_bias, bool adds) {
    const Problem p(m, k, n, with_bias);
    Floats panel(active().linear_panel_floats, kNan);
    std::vector<float> want(p.y.span().begin(), p.y.span().end()), got = want;
    if (adds) {
      for (size_t i = 0; i < got.size(); ++i) want[i] = got[i] = static_cast<float>(i % 7);
    }
    LinearTask task = p.task();
    task.adds = adds, task.y = want.data();
    active().linear(task);
    task.w = p.w.data(), task.panel = panel.data(), task.y = got.data();
    active().linear(task);
    ASSERT_TRUE(m == 0 || n == 0 || !got.empty());
    if (got.empty()) return;
    EXPECT_EQ(std::memcmp(got.data(), want.data(), got.size() * sizeof(float)), 0)
        << "m " << m << " k " << k << " n " << n << " bias " << with_bias << " adds " << adds;
  };
  for (int64_t n : column_counts()) {
    for (int64_t m : {0, 1, 2, 3, 8, 9, 20, 131}) {
      for (int64_t k : {0, 1, 7, 8, 15, 16, 17, 67, 530})
        check_bits(m, k, n, (m + n + k) % 2 == 0, m % 3 == 0);
    }
  }
  check_bits(140, 1100, 331, true, false);
}

TEST(Linear, RowAlone_SameBitsAsInABatch) {
  for (int64_t k : {64, 700, 1100}) {
    const int64_t n = 3 * active().linear_columns + 5;
    Problem batch(150, k, n);
    batch.run();
    for (int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 20}) {
      for (int64_t first : {0, 41, 125}) {
        LinearTask part = batch.task();
        std::vector<float> y(static_cast<size_t>(rows * n));
        part.x += first * part.x_stride;
        part.m = rows, part.y = y.data(), part.y_stride = n;
        active().linear(part);
        for (int64_t i = 0; i < rows; ++i) {
          ASSERT_EQ(
              std::memcmp(&y[static_cast<size_t>(i * n)], &batch.y[(first + i) * batch.y_stride],
                          static_cast<size_t>(n) * sizeof(float)),
              0)
              << "k " << k << " rows " << rows << " first " << first << " row " << i;
        }
      }
    }
  }
}

TEST(Linear, ColumnsDivided_SameBits) {
  const int64_t c = active().linear_columns, n = 9 * c + c / 2 + 1;
  for (int64_t m : {1, 2, 3, 7, 33}) {
    Problem whole(m, 530, n), parts(m, 530, n);
    whole.run();
    for (int64_t begin = 0, panels = 1; begin < n; ++panels) {  // 1, 2, 3, ... panels
      const int64_t end = std::min(n, begin + panels * c);
      LinearTask part = parts.task();
      part.w += begin * part.k;
      part.bias += begin, part.y_column = begin, part.n = end - begin;
      active().linear(part);
      begin = end;
    }
    ASSERT_EQ(std::memcmp(whole.y.data(), parts.y.data(), whole.y.span().size_bytes()), 0) << m;
  }
}

// y cut into blocks (heads) that lie apart, in parts of the columns that begin inside a block.
TEST(Linear, ColumnsInBlocks_SameBits) {
  const int64_t lanes = active().linear_block, c = active().linear_columns;
  for (int64_t block : {lanes, 3 * lanes, 4 * lanes, 5 * lanes}) {
    for (int64_t m : {1, 2, 3, 6, 30}) {
      for (int64_t k : {70, 1100}) {
        const int64_t blocks = 5, n = blocks * block;
        const Problem whole(m, k, n);
        active().linear(whole.task());
        for (const int64_t columns : {n, c, 2 * c}) {
          Floats y(blocks * m * block, kUntouched);
          for (int64_t begin = 0; begin < n; begin += columns) {
            LinearTask part = whole.task();
            part.w += begin * k, part.bias += begin, part.n = std::min(columns, n - begin);
            part.y = y.data(), part.y_stride = block, part.y_column = begin;
            part.y_block = block, part.y_block_stride = m * block;
            active().linear(part);
          }
          for (int64_t i = 0; i < m; ++i) {
            for (int64_t j = 0; j < n; ++j) {
              ASSERT_EQ(y[j / block * m * block + i * block + j % block], whole.at(i, j))
                  << "block " << block << " m " << m << " k " << k << " row " << i << " column "
                  << j;
            }
          }
        }
      }
    }
  }
}

TEST(Linear, NanAndInfinityStayInTheirRowAndColumn) {
  const int64_t n = 2 * active().linear_columns + 3, m = 21, k = 40;
  Problem p(m, k, n);
  p.x[4 * p.x_stride + 7] = kNan;
  p.x[9 * p.x_stride + 1] = std::numeric_limits<float>::infinity();
  p.w[(n - 1) * k + 3] = kNan;
  p.w[5 * k] = -std::numeric_limits<float>::infinity();
  p.pack();
  p.run();
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      const bool touched = i == 4 || i == 9 || j == n - 1 || j == 5;
      EXPECT_EQ(std::isfinite(p.at(i, j)), !touched) << i << " " << j;
    }
  }
}

TEST(Linear, NoBias_SameBitsAsZeros) {
  Problem with(19, 130, 70), without(19, 130, 70, false);
  std::fill(with.bias.span().begin(), with.bias.span().end(), 0.0f);
  std::copy(with.x.span().begin(), with.x.span().end(), without.x.data());
  std::copy(with.w.span().begin(), with.w.span().end(), without.w.data());
  without.pack();
  with.run(), without.run();
  EXPECT_EQ(std::memcmp(with.y.data(), without.y.data(), with.y.span().size_bytes()), 0);
}

TEST(Linear, RowsThatRepeat) {  // stride 0: one row of x for all rows of y
  Problem p(10, 33, 50);
  LinearTask task = p.task();
  task.x_stride = 0;
  active().linear(task);
  for (int64_t i = 1; i < p.m; ++i) {
    EXPECT_EQ(std::memcmp(&p.y[0], &p.y[i * p.y_stride], 50 * sizeof(float)), 0) << i;
  }
}

}  // namespace
