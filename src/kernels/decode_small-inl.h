// SPDX-License-Identifier: Apache-2.0
// Tier: kernel (compiled once per Highway target). Decode with at most four keys: the scores of one
// row fill a 128-bit block, so one vector holds those of several rows, from the products to the
// weights. Queries and outputs are used in place. The same operations in the same order as
// decode-inl.h, so the same bits; what this file does not know is left to that.
#if defined(QKV_KERNELS_DECODE_SMALL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_KERNELS_DECODE_SMALL_INL_H_
#undef QKV_KERNELS_DECODE_SMALL_INL_H_
#else
#define QKV_KERNELS_DECODE_SMALL_INL_H_
#endif

#include "kernels/decode_rows-inl.h"
#include "kernels/decode_scores-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::kernels {
namespace HWY_NAMESPACE {

inline constexpr int kSmallKeys = 4;

// f32 everywhere, a run of at most four keys, masks of ranges and dense terms only.
HWY_INLINE bool IsSmall(const AttentionTask& task) {
  const int64_t n = task.kv_end - task.kv_begin;
  return n <= kSmallKeys && n > 0 && kLanes<float> >= 4 && task.n_segments == 1 &&
         task.q_dtype == DType::f32 && task.kv_dtype == DType::f32 &&
         task.out_dtype == DType::f32 && task.out && !task.unnormalised && task.softcap == 0 &&
         task.dropout == 0 && !task.q_ids && !task.alibi_slopes && !task.sinks;
}

#if HWY_TARGET == HWY_SCALAR
HWY_INLINE bool DecodeSmall(const AttentionTask&) { return false; }
#else

// Rows in one vector, and the block of each.
inline constexpr int kSmallRows = kLanes<float> >= 16 ? 4 : kLanes<float> / 4;
HWY_INLINE constexpr int SmallBlock(int row) {
  return kSmallRows == 4 ? (row & 1) * 2 + row / 2 : row;
}

// Block r of the result (in the order of SmallBlock) = the four sums of row r. Blocks without a row
// hold copies.
template <int kRows>
HWY_INLINE Vec<float> SumsInBlocks(const Vec<float> (*acc)[4]) {
  const Tag<float> d;
  Vec<float> t[kRows];
  Each<kRows>([&](auto r)
                  HWY_ATTR { t[r] = SumFourths(acc[r][0], acc[r][1], acc[r][2], acc[r][3]); });
  if constexpr (kSmallRows == 1) {
    return t[0];
  } else {
    const auto pair = [&](Vec<float> low, Vec<float> high) HWY_ATTR {
      return hn::Add(hn::ConcatLowerLower(d, high, low), hn::ConcatUpperUpper(d, high, low));
    };
    const Vec<float> first = pair(t[0], t[kRows > 1 ? 1 : 0]);
    if constexpr (kSmallRows == 2) {
      return first;
    } else {
      const auto whole = [](Vec<float> v)
                             HWY_ATTR { return hn::Add(v, hn::SwapAdjacentBlocks(v)); };
      if constexpr (kRows <= 2) return whole(first);
      const Vec<float> second = pair(t[kRows > 2 ? 2 : 0], t[kRows > 3 ? 3 : 0]);
      return hn::OddEvenBlocks(whole(second), whole(first));
    }
  }
}

// One row of a small problem.
struct SmallRow {
  int64_t token, head;
  const float* q;
  float* out;
};

// Scores of kRows rows and n keys, unmasked.
template <int kRows>
HWY_INLINE Vec<float> SmallScores(const SmallRow* rows, float factor, const float* HWY_RESTRICT k,
                                  int64_t k_stride, int64_t dim, int n) {
  const Tag<float> d;
  const Vec<float> scale = hn::Set(d, factor);
  const int64_t whole = dim / kLanes<float> * kLanes<float>;
  const int tail = static_cast<int>(dim - whole);
  const float* key[4];
  for (int i = 0; i < 4; i++) key[i] = k + HWY_MIN(i, n - 1) * k_stride;
  Vec<float> acc[kRows][4];
  Each<kRows>([&](auto r) HWY_ATTR { Each<4>([&](auto i) HWY_ATTR { acc[r][i] = hn::Zero(d); }); });
  const auto add = [&](auto load) HWY_ATTR {
    Vec<float> keys[4];
    Each<4>([&](auto i) HWY_ATTR { keys[i] = load(key[i]); });
    Each<kRows>([&](auto r) HWY_ATTR {
      const Vec<float> q = hn::Mul(load(rows[r].q), scale);
      Each<4>([&](auto i) HWY_ATTR { acc[r][i] = hn::MulAdd(q, keys[i], acc[r][i]); });
    });
  };
  for (int64_t u = 0; u < whole; u += kLanes<float>) {
    add([&](const float* p) HWY_ATTR { return hn::LoadU(d, p + u); });
  }
  if (tail) add([&](const float* p) HWY_ATTR { return LoadKvTail<float>(p + whole, tail); });
  return SumsInBlocks<kRows>(acc);
}

// Adds the dense terms and hides what a row must not see.
template <int kRows>
HWY_NOINLINE Vec<float> SmallMask(const AttentionTask& task, const SmallRow* rows, int n,
                                  Vec<float> s) {
  const Tag<float> d;
  const Vec<float> hidden = NegativeInfinity<float>();
  alignas(64) float room[kLanes<float>] = {};
  for (int64_t i = 0; i < task.n_dense; i++) {
    const DenseTerm& term = task.dense[i];
    for (int r = 0; r < kRows; r++) {
      const int64_t offset = rows[r].token * term.token_stride + rows[r].head * term.head_stride +
                             task.kv_begin * term.key_stride;
      DenseRow(term, offset, n, room + 4 * SmallBlock(r));
    }
    const Vec<float> bias = hn::Load(d, room);
    s = hn::IfThenElse(hn::Eq(bias, hidden), hidden, hn::Add(s, bias));
  }
  if (task.ranges) {
    const int64_t base = task.group_size == 1 ? task.row_begin : task.row_begin / task.group_size;
    for (int r = 0; r < kRows; r++) {
      const RowRange range = task.ranges[rows[r].token - base];
      for (int x = 0; x < n; x++) {
        const int64_t j = task.kv_begin + x;
        room[4 * SmallBlock(r) + x] = range.lo <= j && j < range.hi ? 0.0f : 1.0f;
      }
    }
    s = hn::IfThenElse(hn::Eq(hn::Load(d, room), hn::Zero(d)), s, hidden);
  }
  return s;
}

// Returns false if a sum is not finite where keys are hidden: a hidden NaN may be in it.
template <int kRows>
HWY_NOINLINE bool AttendSmall(const AttentionTask& task, int64_t first_row) {
  const Tag<float> d;
  const int n = static_cast<int>(task.kv_end - task.kv_begin);
  const int64_t skip = task.kv_begin - task.segments->begin;
  const float* k = static_cast<const float*>(task.segments->k) + skip * task.k_row_stride;
  const float* v = static_cast<const float*>(task.segments->v) + skip * task.v_row_stride;
  int64_t token = task.group_size == 1 ? first_row : first_row / task.group_size;
  int64_t head = first_row - token * task.group_size;
  SmallRow rows[kRows];
  Each<kRows>([&](auto r) HWY_ATTR {
    rows[r] = {
        token, head,
        static_cast<const float*>(task.q) + token * task.q_token_stride + head * task.q_head_stride,
        static_cast<float*>(task.out) + token * task.out_token_stride +
            head * task.out_head_stride};
    if (++head == task.group_size) head = 0, token++;
  });

  const Vec<float> hidden = NegativeInfinity<float>();
  Vec<float> s = SmallScores<kRows>(rows, static_cast<float>(task.scale * kLog2E), k,
                                    task.k_row_stride, task.head_dim_qk, n);
  const bool masked = task.n_dense > 0 || task.ranges;
  if (masked) s = SmallMask<kRows>(task, rows, n, s);
  if (n < kSmallKeys) {
    const hn::RebindToSigned<Tag<float> > di;
    const auto key = hn::And(hn::Iota(di, 0), hn::Set(di, kSmallKeys - 1));
    s = hn::IfThenElse(hn::RebindMask(d, hn::Lt(key, hn::Set(di, n))), s, hidden);
  }
  Vec<float> mx = hn::Max(s, hn::Shuffle1032(s));
  mx = hn::Max(mx, hn::Shuffle2301(mx));
  const Vec<float> m = hn::IfThenElseZero(hn::Gt(mx, hidden), mx);
  const Vec<float> weight = Exp2(hn::Sub(s, m));
  const Vec<float> l = SumInBlocks(weight);
  const Vec<float> factor =
      hn::IfThenZeroElse(hn::Eq(l, hn::Zero(d)), hn::Div(hn::Set(d, 1.0f), l));
  alignas(64) float p[kLanes<float>], inverse[kLanes<float>];
  hn::Store(weight, d, p);
  hn::Store(factor, d, inverse);
  if (task.state_m) {
    alignas(64) float state[2][kLanes<float>];
    hn::Store(m, d, state[0]);
    hn::Store(l, d, state[1]);
    const int64_t at = first_row - task.row_begin;
    Each<kRows>([&](auto r) HWY_ATTR {
      static_cast<float*>(task.state_m)[at + r] = state[0][4 * SmallBlock(r)];
      static_cast<float*>(task.state_l)[at + r] = state[1][4 * SmallBlock(r)];
    });
  }

  Vec<float> check = hn::Zero(d);
  const auto columns = [&](int64_t c, auto load, auto store) HWY_ATTR {
    Vec<float> acc[kRows];
    Each<kRows>([&](auto r) HWY_ATTR { acc[r] = hn::Zero(d); });
    for (int x = 0; x < n; x++) {
      const Vec<float> value = load(v + x * task.v_row_stride + c);
      Each<kRows>([&](auto r) HWY_ATTR {
        acc[r] = hn::MulAdd(hn::Set(d, p[4 * SmallBlock(r) + x]), value, acc[r]);
      });
    }
    Each<kRows>([&](auto r) HWY_ATTR {
      check = hn::MulAdd(acc[r], hn::Zero(d), check);
      store(hn::Mul(acc[r], hn::Set(d, inverse[4 * SmallBlock(r)])), rows[r].out + c);
    });
  };
  int64_t c = 0;
  for (; c + kLanes<float> <= task.head_dim_v; c += kLanes<float>) {
    columns(
        c, [&](const float* from) HWY_ATTR { return hn::LoadU(d, from); },
        [&](Vec<float> sum, float* to) HWY_ATTR { hn::StoreU(sum, d, to); });
  }
  if (c < task.head_dim_v) {
    const int tail = static_cast<int>(task.head_dim_v - c);
    columns(
        c, [&](const float* from) HWY_ATTR { return LoadKvTail<float>(from, tail); },
        [&](Vec<float> sum, float* to) HWY_ATTR { StoreTail(sum, tail, to); });
  }
  return !masked || hn::AllTrue(d, hn::Eq(check, hn::Zero(d)));
}

HWY_INLINE bool DecodeSmall(const AttentionTask& task) {
  bool done = true;
  ForRowGroups<kSmallRows>(static_cast<int>(task.n_rows), [&](int r, auto count) HWY_ATTR {
    done &= AttendSmall<count>(task, task.row_begin + r);
  });
  return done;
}
#endif  // HWY_TARGET == HWY_SCALAR

}  // namespace HWY_NAMESPACE
}  // namespace qkv::kernels
HWY_AFTER_NAMESPACE();

#endif  // toggle
