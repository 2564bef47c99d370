// SPDX-License-Identifier: Apache-2.0
// Tier: test. The kernels of a projection's way back: dw = dy^T x and dbias against a double loop at
// the edges of their memory, transposed packing, products that are added.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "kernels/kernels.h"
#include "support/bounds.h"
#include "support/guarded.h"

namespace {

using qkv::kernels::active;
using qkv::kernels::LinearGradientTask;
using Floats = qkv::test::GuardedFloats;
using qkv::test::within_bound;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kUntouched = -12345.5f;

// Every array at the end of its memory, rows apart from each other with NaN (dy, x) or a marker (dw)
// between them.
struct Problem {
  int64_t groups, rows, n, k, dy_row, x_row, dy_group, x_group, dw_row;
  Floats dy, x, dw, dbias;

  Problem(int64_t num_groups, int64_t group_rows, int64_t columns, int64_t width, int64_t gap = 3)
      : groups(num_groups),
        rows(group_rows),
        n(columns),
        k(width),
        dy_row(n + gap),
        x_row(k + gap + 1),
        dy_group(rows * dy_row + gap),
        x_group(rows * x_row + 2 * gap),
        dw_row(k + gap + 2),
        dy(extent(dy_group, dy_row, n), kNan),
        x(extent(x_group, x_row, k), kNan),
        dw((n - 1) * dw_row + k, kUntouched),
        dbias(n, kUntouched) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < n; ++j) dy_at(g, i, j) = normal(random);
        for (int64_t u = 0; u < k; ++u) x_at(g, i, u) = normal(random);
      }
    }
  }
  int64_t extent(int64_t group, int64_t row, int64_t width) const {
    return groups * rows == 0 ? 0 : (groups - 1) * group + (rows - 1) * row + width;
  }
  float& dy_at(int64_t g, int64_t i, int64_t j) const { return dy[g * dy_group + i * dy_row + j]; }
  float& x_at(int64_t g, int64_t i, int64_t u) const { return x[g * x_group + i * x_row + u]; }

  LinearGradientTask task() const {
    LinearGradientTask t{};
    t.dy = dy.data(), t.dy_group_stride = dy_group, t.dy_row_stride = dy_row;
    t.x = x.data(), t.x_group_stride = x_group, t.x_row_stride = x_row;
    t.groups = groups, t.group_rows = rows, t.n = n;
    t.n_end = n, t.k_end = k;
    t.dw = dw.data(), t.dw_stride = dw_row, t.dbias = dbias.data();
    return t;
  }
  // In parts of the largest size that a task may have, or smaller ones.
  void run(bool adds = false, int64_t block = active().gradient_block) const {
    std::vector<std::byte> memory(static_cast<size_t>(active().gradient_scratch_bytes) + 256);
    void* scratch = memory.data();
    size_t space = memory.size();
    std::align(qkv::kernels::kAlignment, memory.size() - 128, scratch, space);
    for (int64_t j = 0; j < n; j += block) {
      for (int64_t u = 0; u < k; u += block) {
        LinearGradientTask t = task();
        t.n_begin = j, t.n_end = std::min(j + block, n);
        t.k_begin = u, t.k_end = std::min(u + block, k);
        if (u > 0) t.dbias = nullptr;
        t.adds = adds, t.scratch = scratch;
        active().linear_gradient(t);
      }
    }
  }
  template <class T>
  T sum(int64_t j, int64_t u) const {  // u = k: the bias
    T total = 0;
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t i = 0; i < rows; ++i)
        total += static_cast<T>(dy_at(g, i, j)) * (u == k ? T{1} : static_cast<T>(x_at(g, i, u)));
    }
    return total;
  }
};

void check(const Problem& p, bool adds = false) {
  SCOPED_TRACE(testing::Message() << "groups " << p.groups << " rows " << p.rows << " n " << p.n
                                  << " k " << p.k << " adds " << adds);
  const float before = adds ? 2.0f : kUntouched;
  if (adds) {
    for (int64_t j = 0; j < p.n; ++j) {
      p.dbias[j] = before;
      for (int64_t u = 0; u < p.k; ++u) p.dw[j * p.dw_row + u] = before;
    }
  }
  p.run(adds);
  const double add = adds ? static_cast<double>(before) : 0;
  std::vector<double> got, want;
  double plain = 0, largest = std::sqrt(static_cast<double>(p.groups * p.rows)) + add;
  for (int64_t j = 0; j < p.n; ++j) {
    for (int64_t u = 0; u <= p.k; ++u) {
      got.push_back(static_cast<double>(u == p.k ? p.dbias[j] : p.dw[j * p.dw_row + u]));
      want.push_back(p.sum<double>(j, u) + add);
      plain =
          std::max(plain, std::fabs(static_cast<double>(p.sum<float>(j, u)) + add - want.back()));
    }
  }
  EXPECT_TRUE(within_bound("dw and dbias", qkv::DType::f32, got, want, plain, largest));
  for (int64_t j = 0; j + 1 < p.n; ++j) {
    for (int64_t u = p.k; u < p.dw_row; ++u) ASSERT_EQ(p.dw[j * p.dw_row + u], kUntouched);
  }
}

TEST(LinearGradient, SizesAroundTheTile_EqualTheDefinition) {
  for (int64_t n : {1, 2, 5, 6, 7, 8, 9, 12, 13, 16, 17, 33}) {
    for (int64_t k : {1, 3, 8, 15, 16, 17, 31, 32, 33, 48, 65}) check(Problem(1, 7, n, k), k % 2);
  }
}

TEST(LinearGradient, RowsAroundTheChunks_EqualTheDefinition) {
  for (int64_t rows : {1, 2, 16, 17, 255, 256, 257, 511, 513, 1000}) {
    for (bool adds : {false, true}) check(Problem(1, rows, 19, 37), adds);
  }
}

TEST(LinearGradient, GroupsOfRows_EqualTheDefinition) {
  for (int64_t groups : {1, 2, 5, 300}) {
    for (int64_t rows : {1, 3, 70}) check(Problem(groups, rows, 11, 21));
  }
}

TEST(LinearGradient, MoreThanABlock_EqualsTheDefinition) {
  const int64_t block = active().gradient_block;
  check(Problem(1, 20, block, block + 1));
  check(Problem(3, 9, 2 * block + 5, block - 1), true);
}

TEST(LinearGradient, AnyDivision_SameBits) {
  for (bool adds : {false, true}) {
    const Problem whole(2, 150, 131, 117), parts(2, 150, 131, 117);
    for (const Problem* p : {&whole, &parts}) {
      std::fill(p->dw.span().begin(), p->dw.span().end(), -0.0f);
      std::fill(p->dbias.span().begin(), p->dbias.span().end(), 0.5f);
    }
    whole.run(adds);
    for (int64_t block : {7, 32, 50, 100}) {
      std::fill(parts.dw.span().begin(), parts.dw.span().end(), -0.0f);
      std::fill(parts.dbias.span().begin(), parts.dbias.span().end(), 0.5f);
      parts.run(adds, block);
      EXPECT_EQ(std::memcmp(parts.dw.data(), whole.dw.data(), whole.dw.span().size_bytes()), 0);
      EXPECT_EQ(
          std::memcmp(parts.dbias.data(), whole.dbias.data(), whole.dbias.span().size_bytes()), 0);
    }
  }
}

TEST(LinearGradient, GroupsThatFollowEachOther_SameBitsAsOneGroup) {
  const Problem groups(6, 50, 40, 70, 0), one(1, 300, 40, 70, 0);
  ASSERT_EQ(groups.dy_row * 50, groups.dy_group);
  std::copy(groups.dy.span().begin(), groups.dy.span().end(), one.dy.data());
  for (int64_t i = 0; i < 300; ++i) {
    for (int64_t u = 0; u < 70; ++u) one.x_at(0, i, u) = groups.x_at(i / 50, i % 50, u);
  }
  groups.run(), one.run();
  EXPECT_EQ(std::memcmp(groups.dw.data(), one.dw.data(), one.dw.span().size_bytes()), 0);
  EXPECT_EQ(std::memcmp(groups.dbias.data(), one.dbias.data(), one.dbias.span().size_bytes()), 0);
}

TEST(LinearGradient, NoRows_GiveZerosOrNothing) {
  const Problem p(0, 5, 9, 13);
  p.run();
  for (int64_t j = 0; j < 9; ++j) {
    EXPECT_EQ(p.dbias[j], 0.0f);
    for (int64_t u = 0; u < 13; ++u) EXPECT_EQ(p.dw[j * p.dw_row + u], 0.0f);
  }
  p.dw[3] = 7, p.dbias[1] = 8;
  p.run(true);
  EXPECT_EQ(p.dw[3], 7.0f);
  EXPECT_EQ(p.dbias[1], 8.0f);
}

// A row of x that no column of dy wants, as that of a hidden key.
TEST(LinearGradient, NanInARowWithoutGradient_ReachesNothing) {
  const Problem hidden(2, 40, 300, 290), clean(2, 40, 300, 290);
  for (const Problem* p : {&hidden, &clean}) {
    for (int64_t j = 0; j < p->n; ++j) p->dy_at(1, 7, j) = j % 2 ? 0.0f : -0.0f;
  }
  hidden.x_at(1, 7, 0) = kNan, hidden.x_at(1, 7, 33) = kInfinity,
                    hidden.x_at(1, 7, 289) = -kInfinity;
  hidden.run(), clean.run();
  EXPECT_EQ(std::memcmp(hidden.dw.data(), clean.dw.data(), clean.dw.span().size_bytes()), 0);
  // One number other than zero, in another part of the columns: the row counts.
  hidden.dy_at(1, 7, 299) = 1;
  hidden.run();
  for (int64_t j : {0, 150, 299}) EXPECT_TRUE(std::isnan(hidden.dw[j * hidden.dw_row]));
}

TEST(LinearGradient, NanStaysInItsRowAndColumn) {
  const Problem p(1, 30, 40, 70);
  p.x_at(0, 4, 20) = kNan;
  p.dy_at(0, 9, 11) = kInfinity;
  p.run();
  for (int64_t j = 0; j < p.n; ++j) {
    for (int64_t u = 0; u < p.k; ++u)
      EXPECT_EQ(std::isfinite(p.dw[j * p.dw_row + u]), j != 11 && u != 20) << j << " " << u;
    EXPECT_EQ(std::isfinite(p.dbias[j]), j != 11);
  }
}

TEST(LinearGradient, PackTransposed_EqualsPackOfTheTransposed) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  const int64_t c = active().linear_columns;
  for (int64_t n : {int64_t{1}, int64_t{5}, c / 2, c - 1, c, c + 1, 2 * c + c / 2, 3 * c}) {
    for (int64_t k : {int64_t{1}, int64_t{7}, c / 2 + 1, c, 2 * c, 2 * c + 3}) {
      std::vector<float> w(static_cast<size_t>(n * k)), turned(w.size());
      for (float& x : w) x = normal(random);
      for (int64_t j = 0; j < n; ++j) {
        for (int64_t u = 0; u < k; ++u)
          turned[static_cast<size_t>(u * n + j)] = w[static_cast<size_t>(j * k + u)];
      }
      const Floats packed(active().packed_floats(n, k), kNan),
          want(active().packed_floats(k, n), kNan), got(active().packed_floats(k, n), kNan);
      active().pack(w.data(), n, k, packed.data());
      active().pack(turned.data(), k, n, want.data());
      active().pack_transposed(packed.data(), n, k, got.data());
      EXPECT_EQ(std::memcmp(got.data(), want.data(), want.span().size_bytes()), 0) << n << " " << k;
    }
  }
}

// y += x w^T: what was there takes the place of the bias.
TEST(LinearGradient, AddedProduct_EqualsTheProductWithThatBias) {
  std::mt19937 random(4);
  std::normal_distribution<float> normal;
  for (int64_t m : {1, 2, 3, 9, 150}) {
    for (int64_t k : {1, 40, 700}) {
      for (int64_t n : {1, 13, 32, 33, 70, 150}) {
        Floats x(m * k), w(n * k), packed(active().packed_floats(n, k)), bias(n);
        for (const Floats* f : {&x, &w, &bias}) {
          for (float& value : f->span()) value = normal(random);
        }
        active().pack(w.data(), n, k, packed.data());
        Floats want(m * n), got(m * n);
        qkv::kernels::LinearTask t{};
        t.x = x.data(), t.x_stride = k, t.w = packed.data(), t.bias = bias.data();
        t.y = want.data(), t.y_stride = n, t.m = m, t.k = k, t.n = n;
        active().linear(t);
        for (int64_t i = 0; i < m; ++i) std::copy_n(bias.data(), n, got.data() + i * n);
        t.bias = nullptr, t.y = got.data(), t.adds = true;
        active().linear(t);
        ASSERT_EQ(std::memcmp(got.data(), want.data(), want.span().size_bytes()), 0)
            << m << " " << k << " " << n;
      }
    }
  }
}

}  // namespace
