// SPDX-License-Identifier: Apache-2.0
// The decode kernel against its contract: the bits of a row depend on neither its neighbours nor on how the keys are
// stored; hidden keys are never needed. Numbers against the reference are attention_test's business.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "schedule.h"
#include "support/guarded.h"

namespace qkv {
namespace {

using kernels::AttentionTask;
using kernels::KvSegment;

constexpr float kUntouched = -7.0f;

struct Problem {
  int64_t n_q = 4, n_kv = 301, group = 3, dim_qk = 20, dim_v = 13;
  DType kv_dtype = DType::f32;
  std::vector<float> q;
  test::GuardedBuffer k, v;  // rows end at a forbidden page
  std::vector<RowRange> ranges;
  double softcap = 0, dropout = 0;

  explicit Problem(uint32_t seed, DType dtype = DType::f32) : kv_dtype(dtype) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    q.resize(static_cast<size_t>(n_q * group * dim_qk));
    for (float& e : q) e = 2 * normal(random);
    k = rows(n_kv * dim_qk, [&] { return 2 * normal(random); });
    v = rows(n_kv * dim_v, [&] { return 2 * normal(random); });
    for (int64_t i = 0; i < n_q; ++i) ranges.push_back({3 * i, n_kv - 2 * n_q + i + 1});
  }
  int64_t num_rows() const { return n_q * group; }

  void set(test::GuardedBuffer& rows, int64_t at, float x) const {
    std::byte* to = rows.data() + at * size_bytes(kv_dtype);
    if (kv_dtype == DType::f32) {
      std::memcpy(to, &x, 4);
    } else {
      const uint16_t bits = kv_dtype == DType::bf16 ? to_bf16(x).bits : to_f16(x).bits;
      std::memcpy(to, &bits, 2);
    }
  }
  void set_key(int64_t j, float x) {
    for (int64_t d = 0; d < dim_qk; ++d) set(k, j * dim_qk + d, x);
    for (int64_t d = 0; d < dim_v; ++d) set(v, j * dim_v + d, x);
  }
  const void* row(const test::GuardedBuffer& rows, int64_t j, int64_t dim) const {
    return rows.data() + j * dim * size_bytes(kv_dtype);
  }
  std::vector<KvSegment> pages(int64_t page_size) const {
    std::vector<KvSegment> s;
    for (int64_t j = 0; j < n_kv; j += page_size) {
      s.push_back({row(k, j, dim_qk), row(v, j, dim_v), j, std::min(page_size, n_kv - j)});
    }
    return s;
  }

 private:
  template <class F>
  test::GuardedBuffer rows(int64_t n, F next) {
    test::GuardedBuffer buffer(static_cast<size_t>(n * size_bytes(kv_dtype)));
    for (int64_t i = 0; i < n; ++i) set(buffer, i, next());
    return buffer;
  }
};

struct Result {
  std::vector<float> out, m, l, weights;
  bool operator==(const Result& o) const {
    const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
    };
    return same(out, o.out) && same(m, o.m) && same(l, o.l) && same(weights, o.weights);
  }
};

// Attends rows [begin, begin + n) of the problem.
Result attend(const Problem& p, int64_t begin, int64_t n, const std::vector<KvSegment>& segments) {
  const kernels::KernelTable& table = kernels::active();
  Result r;
  r.out.assign(static_cast<size_t>(p.num_rows() * p.dim_v), kUntouched);
  r.weights.assign(static_cast<size_t>(p.num_rows() * p.n_kv), kUntouched);
  r.m.assign(static_cast<size_t>(n), kUntouched), r.l = r.m;
  ScratchBuffer scratch;
  AttentionTask t{};
  t.row_begin = begin, t.n_rows = n, t.group_size = p.group;
  t.head_dim_qk = p.dim_qk, t.head_dim_v = p.dim_v;
  t.q = p.q.data(), t.q_token_stride = p.group * p.dim_qk, t.q_head_stride = p.dim_qk;
  t.segments = segments.data(), t.n_segments = static_cast<int64_t>(segments.size());
  t.k_row_stride = p.dim_qk, t.v_row_stride = p.dim_v, t.kv_dtype = p.kv_dtype, t.kv_end = p.n_kv;
  t.scale = 0.3, t.softcap = p.softcap;
  t.dropout = p.dropout, t.seed = 5;
  t.ranges = p.ranges.data() + begin / p.group;
  t.out = r.out.data(), t.out_token_stride = p.group * p.dim_v, t.out_head_stride = p.dim_v;
  t.state_m = r.m.data(), t.state_l = r.l.data();
  t.scratch = scratch.reserve(table.decode_scratch_bytes[0](p.dim_qk, p.dim_v));
  table.decode[0](t);
  t.weights = r.weights.data();
  t.weights_token_stride = p.group * p.n_kv, t.weights_head_stride = p.n_kv;
  table.decode_weights[0](t, {});
  return r;
}

const DType kTypes[] = {DType::f32, DType::bf16, DType::f16};

TEST(Decode, TasksOfDecodeRows_AreItsBusiness) {
  EXPECT_GE(kernels::active().decode_rows, Problem(1).num_rows());
}

TEST(Decode, KeysInPages_SameBitsAsContiguous) {
  for (const DType dtype : kTypes) {
    const Problem p(1, dtype);
    const Result whole = attend(p, 0, p.num_rows(), p.pages(p.n_kv));
    for (const int64_t page_size : {1, 3, 8, 64, 128, 200}) {
      EXPECT_TRUE(attend(p, 0, p.num_rows(), p.pages(page_size)) == whole)
          << name(dtype) << ", page_size " << page_size;
    }
  }
}

// Few keys: all KV heads of a batch entry in one call.
struct SmallProblem {
  int64_t num_kv_heads, n_q, n_kv, group, dim_qk, dim_v;
  std::vector<float> q, k, v, mask;
  std::vector<RowRange> ranges;

  SmallProblem(int64_t heads, int64_t q_rows, int64_t keys, int64_t group_size, int64_t dim,
               uint32_t seed)
      : num_kv_heads(heads),
        n_q(q_rows),
        n_kv(keys),
        group(group_size),
        dim_qk(dim),
        dim_v(dim + 1) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const auto fill = [&](int64_t n) {
      std::vector<float> x(static_cast<size_t>(n));
      for (float& e : x) e = normal(random);
      return x;
    };
    q = fill(heads * group * n_q * dim_qk), k = fill(heads * n_kv * dim_qk);
    v = fill(heads * n_kv * dim_v), mask = fill(heads * group * n_q * n_kv);
    for (float& e : mask) e = e > 1 ? -std::numeric_limits<float>::infinity() : e;
    for (int64_t i = 0; i < n_q; ++i) ranges.push_back({i % 2, std::min(i, n_kv)});
  }

  // [num_heads][n_q] rows of out, weights, m and l; at once or head by head.
  Result run(bool at_once, bool has_ranges, bool has_mask) const {
    const kernels::KernelTable& table = kernels::active();
    const int64_t rows = n_q * group, num_rows = num_kv_heads * rows;
    Result r;
    r.out.assign(static_cast<size_t>(num_rows * dim_v), kUntouched);
    r.weights.assign(static_cast<size_t>(num_rows * n_kv), kUntouched);
    r.m.assign(static_cast<size_t>(num_rows), kUntouched), r.l = r.m;
    ScratchBuffer scratch;
    AttentionTask common{};
    common.n_rows = rows, common.group_size = group;
    common.head_dim_qk = dim_qk, common.head_dim_v = dim_v;
    common.q_token_stride = dim_qk, common.q_head_stride = n_q * dim_qk;
    common.n_segments = 1, common.k_row_stride = dim_qk, common.v_row_stride = dim_v;
    common.kv_end = n_kv, common.scale = 0.5;
    common.out_token_stride = dim_v, common.out_head_stride = n_q * dim_v;
    common.weights_token_stride = n_kv, common.weights_head_stride = n_q * n_kv;
    if (has_ranges) common.ranges = ranges.data();
    common.scratch = scratch.reserve(table.decode_scratch_bytes[0](dim_qk, dim_v));
    for (int64_t h = 0; h < (at_once ? 1 : num_kv_heads); ++h) {
      AttentionTask t = common;
      const int64_t row = h * rows;
      const KvSegment segment{k.data() + h * n_kv * dim_qk, v.data() + h * n_kv * dim_v, 0, n_kv};
      const kernels::DenseTerm dense{
          mask.data() + row * n_kv, DType::f32, n_kv, n_q * n_kv, 1, nullptr, 0, 0, 0};
      t.q = q.data() + row * dim_qk, t.segments = &segment;
      if (has_mask) t.dense = &dense, t.n_dense = 1;
      t.out = r.out.data() + row * dim_v, t.weights = r.weights.data() + row * n_kv;
      t.state_m = r.m.data() + row, t.state_l = r.l.data() + row;
      if (at_once) {
        const kernels::HeadSteps steps{num_kv_heads, rows * dim_qk, n_kv * dim_qk,
                                       n_kv * dim_v, rows * dim_v,  rows * n_kv};
        if (!table.decode_small(t, steps)) return {};
      } else {
        table.decode[0](t);
        table.decode_weights[0](t, {});
      }
    }
    return r;
  }
};

TEST(Decode, FewKeysOfAllHeads_SameBitsAsHeadByHead) {
  if (kernels::active().target == std::string("SCALAR"))
    GTEST_SKIP() << "heads are done one by one";
  for (const int64_t n_kv : {1, 2, 3, 4}) {
    for (const int64_t dim : {1, 15, 16, 37}) {
      for (const auto& [heads, n_q, group] :
           {std::array<int64_t, 3>{8, 2, 1}, {5, 1, 1}, {3, 1, 3}, {7, 2, 2}, {1, 13, 1}}) {
        for (const int options : {0, 1, 2, 3}) {
          const SmallProblem p(heads, n_q, n_kv, group, dim, 7);
          const Result want = p.run(false, options & 1, options & 2);
          EXPECT_TRUE(p.run(true, options & 1, options & 2) == want)
              << heads << " heads, n_q " << n_q << ", n_kv " << n_kv << ", group " << group
              << ", dim " << dim << ", options " << options;
        }
      }
    }
  }
}

TEST(Decode, FewKeysWithHiddenNan_AreLeftToTheGeneralPath) {
  SmallProblem p(2, 2, 4, 1, 16, 8);
  p.ranges = {{0, 3}, {0, 4}};
  p.v[static_cast<size_t>(3 * p.dim_v)] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(p.run(true, true, false).out.empty());
  EXPECT_EQ(std::isnan(p.run(false, true, false).out[0]), false);
}

TEST(Decode, RowsAlone_SameBitsAsTogether) {
  for (const DType dtype : kTypes) {
    const Problem p(2, dtype);
    const auto pages = p.pages(p.n_kv);
    const Result whole = attend(p, 0, p.num_rows(), pages);
    for (int64_t n = 1; n < p.num_rows(); ++n) {
      for (int64_t row = 0; row + n <= p.num_rows(); row += n) {
        const Result some = attend(p, row, n, pages);
        for (int64_t r = row; r < row + n; ++r) {
          const auto at = [](const std::vector<float>& x, int64_t i) {
            return &x[static_cast<size_t>(i)];
          };
          ASSERT_EQ(std::memcmp(at(some.out, r * p.dim_v), at(whole.out, r * p.dim_v),
                                static_cast<size_t>(p.dim_v) * sizeof(float)),
                    0)
              << name(dtype) << ", row " << r << " of " << n;
          ASSERT_EQ(std::memcmp(at(some.weights, r * p.n_kv), at(whole.weights, r * p.n_kv),
                                static_cast<size_t>(p.n_kv) * sizeof(float)),
                    0);
          EXPECT_EQ(some.m[static_cast<size_t>(r - row)], whole.m[static_cast<size_t>(r)]);
          EXPECT_EQ(some.l[static_cast<size_t>(r - row)], whole.l[static_cast<size_t>(r)]);
        }
      }
    }
  }
}

TEST(Decode, RowsOutsideTheTask_AreNotWritten) {
  const Problem p(3);
  const Result some = attend(p, 5, 4, p.pages(p.n_kv));
  for (int64_t row = 0; row < p.num_rows(); ++row) {
    const bool inside = row >= 5 && row < 9;
    EXPECT_EQ(some.out[static_cast<size_t>(row * p.dim_v)] == kUntouched, !inside) << "row " << row;
    EXPECT_EQ(some.weights[static_cast<size_t>(row * p.n_kv)] == kUntouched, !inside)
        << "row " << row;
  }
}

// Keys that no row sees are not even read; those that only some rows see do not reach the others.
TEST(Decode, HiddenNanAndInf_NeverReachARow) {
  for (const float poison :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    for (const DType dtype : kTypes) {
      Problem p(4, dtype);
      const Result clean = attend(p, 0, p.num_rows(), p.pages(p.n_kv));
      for (int64_t j = 0; j < 9; ++j) p.set_key(j, poison);  // rows of token i see keys from 3 i on
      for (int64_t j = p.ranges[0].hi; j < p.n_kv; ++j) p.set_key(j, poison);
      const Result got = attend(p, 0, p.num_rows(), p.pages(64));
      for (int64_t token = 0; token < p.n_q; ++token) {
        const bool sees_poison = p.ranges[static_cast<size_t>(token)].lo < 9 ||
                                 p.ranges[static_cast<size_t>(token)].hi > p.ranges[0].hi;
        for (int64_t d = 0; d < p.dim_v; ++d) {
          const size_t at = static_cast<size_t>(token * p.group * p.dim_v + d);
          if (sees_poison) {
            EXPECT_FALSE(std::isfinite(got.out[at])) << name(dtype) << ", token " << token;
          } else {
            EXPECT_EQ(got.out[at], clean.out[at]) << name(dtype) << ", token " << token;
          }
        }
      }
    }
  }
}

TEST(Decode, HiddenKeyOfOneRow_ReachesOnlyTheOthers) {
  for (const DType dtype : kTypes) {
    Problem p(5, dtype);
    p.ranges = {{0, 150}, {0, 151}, {0, 300}, {120, 150}};
    const Result clean = attend(p, 0, p.num_rows(), p.pages(p.n_kv));
    p.set_key(150, std::numeric_limits<float>::quiet_NaN());
    const Result got = attend(p, 0, p.num_rows(), p.pages(p.n_kv));
    for (int64_t row = 0; row < p.num_rows(); ++row) {
      const bool sees = p.ranges[static_cast<size_t>(row / p.group)].hi > 150;
      const size_t at = static_cast<size_t>(row * p.dim_v);
      EXPECT_EQ(std::isnan(got.out[at]), sees) << name(dtype) << ", row " << row;
      if (sees) continue;
      EXPECT_EQ(got.out[at], clean.out[at]) << name(dtype) << ", row " << row;
    }
  }
}

// The pages of keys outside every range do not exist.
TEST(Decode, KeysThatNoRowSees_AreNotRead) {
  Problem p(6);
  p.ranges = {{130, 140}, {131, 141}, {132, 142}, {133, 143}};
  const Result want = attend(p, 0, p.num_rows(), p.pages(p.n_kv));
  auto pages = p.pages(10);
  for (KvSegment& s : pages) {
    if (s.begin < 130 || s.begin > 140) s.k = s.v = nullptr;
  }
  EXPECT_TRUE(attend(p, 0, p.num_rows(), pages) == want);
}

TEST(Decode, RowThatSeesNoKey_IsZero) {
  Problem p(7);
  p.ranges = {{0, 0}, {0, 5}, {0, 0}, {0, 300}};
  const Result r = attend(p, 0, p.num_rows(), p.pages(p.n_kv));
  EXPECT_EQ(r.l[0], 0.0f);
  EXPECT_EQ(r.out[0], 0.0f);
  EXPECT_EQ(r.weights[0], 0.0f);
  EXPECT_GT(r.l[3], 0.0f);
}

}  // namespace
}  // namespace qkv
