// SPDX-License-Identifier: Apache-2.0
// The prefill kernel against its contract: the bits of a row depend on neither its neighbours nor on how the keys are
// stored. Numbers against the reference are attention_test's business.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "kernels/kernels.h"
#include "schedule.h"

namespace qkv {
namespace {

using kernels::AttentionTask;
using kernels::KvSegment;

struct Problem {
  int64_t n_q = 37, n_kv = 301, group = 3, dim_qk = 20, dim_v = 13;
  bool is_causal = true;
  std::vector<float> q, k, v;
  std::vector<RowRange> ranges;
  explicit Problem(uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const auto fill = [&](int64_t n) {
      std::vector<float> x(static_cast<size_t>(n));
      for (float& e : x) e = 2 * normal(random);
      return x;
    };
    q = fill(n_q * group * dim_qk), k = fill(n_kv * dim_qk), v = fill(n_kv * dim_v);
    for (int64_t i = 0; i < n_q; ++i) ranges.push_back({i % 5, n_kv - n_q + i + 1});
  }
};

struct Result {
  std::vector<float> out, m, l;
  bool operator==(const Result& o) const {
    const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
    };
    return same(out, o.out) && same(m, o.m) && same(l, o.l);
  }
};

// Attends rows [begin, begin + n) with the keys in the segments given.
Result attend(const Problem& p, int64_t begin, int64_t n, const std::vector<KvSegment>& segments) {
  const kernels::KernelTable& table = kernels::active();
  Result r;
  r.out.assign(static_cast<size_t>(p.n_q * p.group * p.dim_v), -7.0f);
  r.m.assign(static_cast<size_t>(n), -7.0f), r.l = r.m;
  ScratchBuffer scratch;
  AttentionTask t{};
  t.row_begin = begin, t.n_rows = n, t.group_size = p.group, t.head_dim_qk = p.dim_qk,
  t.head_dim_v = p.dim_v;
  t.q = p.q.data(), t.q_token_stride = p.group * p.dim_qk, t.q_head_stride = p.dim_qk;
  t.segments = segments.data(), t.n_segments = static_cast<int64_t>(segments.size());
  t.k_row_stride = p.dim_qk, t.v_row_stride = p.dim_v, t.kv_end = p.n_kv, t.scale = 0.3;
  t.ranges = p.ranges.data() + begin / p.group;
  t.out = r.out.data(), t.out_token_stride = p.group * p.dim_v, t.out_head_stride = p.dim_v;
  t.state_m = r.m.data(), t.state_l = r.l.data();
  t.scratch = scratch.reserve(table.prefill_scratch_bytes[0](p.dim_qk, p.dim_v));
  table.prefill[0](t);
  return r;
}

std::vector<KvSegment> pages(const Problem& p, int64_t page_size) {
  std::vector<KvSegment> s;
  for (int64_t j = 0; j < p.n_kv; j += page_size) {
    s.push_back(
        {p.k.data() + j * p.dim_qk, p.v.data() + j * p.dim_v, j, std::min(page_size, p.n_kv - j)});
  }
  return s;
}

TEST(Prefill, KeysInPages_SameBitsAsContiguous) {
  const Problem p(1);
  const int64_t rows = std::min<int64_t>(p.n_q * p.group, kernels::active().task_rows[0]);
  const Result whole = attend(p, 0, rows, pages(p, p.n_kv));
  for (const int64_t page_size : {1, 3, 8, 64, 128, 200}) {
    EXPECT_TRUE(attend(p, 0, rows, pages(p, page_size)) == whole) << "page_size " << page_size;
  }
}

TEST(Prefill, RowsAlone_SameBitsAsTogether) {
  const Problem p(2);
  const int64_t rows = std::min<int64_t>(p.n_q * p.group, kernels::active().task_rows[0]);
  const Result whole = attend(p, 0, rows, pages(p, p.n_kv));
  for (int64_t row = 0; row < rows; ++row) {
    const Result one = attend(p, row, 1, pages(p, p.n_kv));
    ASSERT_EQ(std::memcmp(&one.out[static_cast<size_t>(row * p.dim_v)],
                          &whole.out[static_cast<size_t>(row * p.dim_v)],
                          static_cast<size_t>(p.dim_v) * sizeof(float)),
              0)
        << "row " << row;
    EXPECT_EQ(one.m[0], whole.m[static_cast<size_t>(row)]);
    EXPECT_EQ(one.l[0], whole.l[static_cast<size_t>(row)]);
  }
}

TEST(Prefill, RowsOutsideTheTask_AreNotWritten) {
  const Problem p(3);
  const Result some = attend(p, 5, 7, pages(p, p.n_kv));
  for (int64_t row = 0; row < p.n_q * p.group; ++row) {
    const bool inside = row >= 5 && row < 12;
    EXPECT_EQ(some.out[static_cast<size_t>(row * p.dim_v)] == -7.0f, !inside) << "row " << row;
  }
}

}  // namespace
}  // namespace qkv
