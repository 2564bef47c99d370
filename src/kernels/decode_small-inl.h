// SPDX-License-Identifier: Apache-2.0
// Tier: kernel (compiled once per Highway target). Decode with at most four keys: the scores of one
// row fill a 128-bit block, so one vector holds those of several rows, from the products to the
// weights. Queries and outputs are used in place. The same operations in the same order as
// decode-inl.h, so the same bits; what this file does not know is left to that. One call for several
// KV heads: a call of the lesson's size has 80 of them, and each costs a few hundred instructions.
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

// f32 everywhere, one run of at most four keys, all rows, masks of ranges and dense terms only.
HWY_INLINE bool IsSmall(const AttentionTask& task) {
  return kLanes<float> >= 4 && task.kv_end <= kSmallKeys && task.kv_begin == 0 && task.kv_end > 0 &&
         task.row_begin == 0 && task.n_segments == 1 && task.q_dtype == DType::f32 &&
         task.kv_dtype == DType::f32 && task.out_dtype == DType::f32 && task.out &&
         !task.unnormalised && task.softcap == 0 && task.dropout == 0 && !task.q_ids &&
         !task.alibi_slopes && !task.sinks;
}

#if HWY_TARGET == HWY_SCALAR
inline bool DecodeSmall(const AttentionTask&, const HeadSteps&) { return false; }
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

// Adds the dense terms and hides what a row must not see. Rows of kHeads KV heads, the first one h.
template <int kHeads, int kRows>
HWY_NOINLINE Vec<float> SmallMask(const AttentionTask& task, int64_t h, const int64_t* tokens,
                                  const int64_t* heads, int n, Vec<float> s) {
  const Tag<float> d;
  const Vec<float> hidden = NegativeInfinity<float>();
  alignas(64) float room[kLanes<float>] = {};
  for (int64_t i = 0; i < task.n_dense; i++) {
    const DenseTerm& term = task.dense[i];
    for (int a = 0; a < kHeads * kRows; a++) {
      const int64_t head = (h + a / kRows) * task.group_size + heads[a % kRows];
      const int64_t offset = tokens[a % kRows] * term.token_stride + head * term.head_stride;
      DenseRow(term, offset, n, room + 4 * SmallBlock(a));
    }
    const Vec<float> bias = hn::Load(d, room);
    s = hn::IfThenElse(hn::Eq(bias, hidden), hidden, hn::Add(s, bias));
  }
  if (!task.ranges) return s;
  for (int a = 0; a < kHeads * kRows; a++) {
    const RowRange range = task.ranges[tokens[a % kRows]];
    for (int x = 0; x < n; x++) {
      room[4 * SmallBlock(a) + x] = range.lo <= x && x < range.hi ? 0.0f : 1.0f;
    }
  }
  return hn::IfThenElse(hn::Eq(hn::Load(d, room), hn::Zero(d)), s, hidden);
}

// Rows [first_row, first_row + kRows) of the KV heads [h, h + kHeads). Returns false if a sum is
// not finite where keys are hidden: a hidden NaN may be in it.
template <int kHeads, int kRows>
HWY_NOINLINE bool SmallHeads(const AttentionTask& task, const HeadSteps& step, int64_t h,
                             int64_t first_row, int64_t token, int64_t head) {
  constexpr int kAll = kHeads * kRows;
  const Tag<float> d;
  const int n = static_cast<int>(task.kv_end);
  const float *q[kAll], *k[kHeads], *v[kHeads];
  float* out[kAll];
  int64_t tokens[kRows], heads[kRows];
  Each<kRows>([&](auto r) HWY_ATTR {
    tokens[r] = token, heads[r] = head;
    Each<kHeads>([&](auto i) HWY_ATTR {
      q[i * kRows + r] = static_cast<const float*>(task.q) + (h + i) * step.q +
                         token * task.q_token_stride + head * task.q_head_stride;
      out[i * kRows + r] = static_cast<float*>(task.out) + (h + i) * step.out +
                           token * task.out_token_stride + head * task.out_head_stride;
    });
    if (++head == task.group_size) head = 0, token++;
  });
  Each<kHeads>([&](auto i) HWY_ATTR {
    k[i] = static_cast<const float*>(task.segments->k) + (h + i) * step.k;
    v[i] = static_cast<const float*>(task.segments->v) + (h + i) * step.v;
  });

  // Scores: four keys, the last ones repeated if there are fewer.
  const int64_t key1 = n > 1 ? task.k_row_stride : 0, key2 = n > 2 ? 2 * task.k_row_stride : key1;
  const int64_t key3 = n > 3 ? 3 * task.k_row_stride : key2;
  const Vec<float> scale = hn::Set(d, static_cast<float>(task.scale * kLog4E));
  Vec<float> acc[kAll][4];
  Each<kAll>([&](auto a) HWY_ATTR { Each<4>([&](auto x) HWY_ATTR { acc[a][x] = hn::Zero(d); }); });
  const auto add = [&](auto load) HWY_ATTR {
    Each<kHeads>([&](auto i) HWY_ATTR {
      const Vec<float> k0 = load(k[i]), k1 = load(k[i] + key1), k2 = load(k[i] + key2),
                       k3 = load(k[i] + key3);
      Each<kRows>([&](auto r) HWY_ATTR {
        constexpr int kA = i * kRows + r;
        const Vec<float> x = hn::Mul(load(q[kA]), scale);
        acc[kA][0] = hn::MulAdd(x, k0, acc[kA][0]);
        acc[kA][1] = hn::MulAdd(x, k1, acc[kA][1]);
        acc[kA][2] = hn::MulAdd(x, k2, acc[kA][2]);
        acc[kA][3] = hn::MulAdd(x, k3, acc[kA][3]);
      });
    });
  };
  int64_t c = 0;
  for (; c + kLanes<float> <= task.head_dim_qk; c += kLanes<float>) {
    add([&](const float* p) HWY_ATTR { return hn::LoadU(d, p + c); });
  }
  if (c < task.head_dim_qk) {
    const int tail = static_cast<int>(task.head_dim_qk - c);
    add([&](const float* p) HWY_ATTR { return LoadKvTail<float>(p + c, tail); });
  }
  Vec<float> s = SumsInBlocks<kAll>(acc);

  const Vec<float> hidden = NegativeInfinity<float>();
  const bool masked = task.n_dense > 0 || task.ranges;
  if (masked) s = SmallMask<kHeads, kRows>(task, h, tokens, heads, n, s);
  if (n < kSmallKeys) {
    const hn::RebindToSigned<Tag<float> > di;
    const auto key = hn::And(hn::Iota(di, 0), hn::Set(di, kSmallKeys - 1));
    s = hn::IfThenElse(hn::RebindMask(d, hn::Lt(key, hn::Set(di, n))), s, hidden);
  }
  Vec<float> mx = hn::Max(s, hn::Shuffle1032(s));
  mx = hn::Max(mx, hn::Shuffle2301(mx));
  const Vec<float> m = hn::IfThenElseZero(hn::Gt(mx, hidden), mx);
  const Vec<float> weight = Exp4(hn::Sub(s, m));
  const Vec<float> l = SumInBlocks(weight);
  const Vec<float> factor =
      hn::IfThenZeroElse(hn::Eq(l, hn::Zero(d)), hn::Div(hn::Set(d, 1.0f), l));
  alignas(64) float p[kLanes<float>], inverse[kLanes<float>];
  hn::Store(weight, d, p);
  hn::Store(factor, d, inverse);

  // Values.
  Vec<float> check = hn::Zero(d);
  const auto columns = [&](auto load, auto store) HWY_ATTR {
    Vec<float> sum[kAll];
    Each<kAll>([&](auto a) HWY_ATTR { sum[a] = hn::Zero(d); });
    for (int x = 0; x < n; x++) {
      Each<kHeads>([&](auto i) HWY_ATTR {
        const Vec<float> value = load(v[i] + x * task.v_row_stride);
        Each<kRows>([&](auto r) HWY_ATTR {
          constexpr int kA = i * kRows + r;
          sum[kA] = hn::MulAdd(hn::Set(d, p[4 * SmallBlock(kA) + x]), value, sum[kA]);
        });
      });
    }
    Each<kAll>([&](auto a) HWY_ATTR {
      check = hn::MulAdd(sum[a], hn::Zero(d), check);
      store(hn::Mul(sum[a], hn::Set(d, inverse[4 * SmallBlock(a)])), out[a]);
    });
  };
  for (c = 0; c + kLanes<float> <= task.head_dim_v; c += kLanes<float>) {
    columns([&](const float* from) HWY_ATTR { return hn::LoadU(d, from + c); },
            [&](Vec<float> sum, float* to) HWY_ATTR { hn::StoreU(sum, d, to + c); });
  }
  if (c < task.head_dim_v) {
    const int tail = static_cast<int>(task.head_dim_v - c);
    columns([&](const float* from) HWY_ATTR { return LoadKvTail<float>(from + c, tail); },
            [&](Vec<float> sum, float* to) HWY_ATTR { StoreTail(sum, tail, to + c); });
  }
  if (masked && !hn::AllTrue(d, hn::Eq(check, hn::Zero(d)))) return false;

  alignas(64) float room[kLanes<float>];
  const auto each_row = [&](Vec<float> values, auto f) HWY_ATTR {
    hn::Store(values, d, room);
    for (int a = 0; a < kAll; a++) f(a / kRows, a % kRows, room + 4 * SmallBlock(a));
  };
  const auto state = [&](void* to, Vec<float> values) HWY_ATTR {
    each_row(values, [&](int i, int r, const float* from) HWY_ATTR {
      static_cast<float*>(to)[(h + i) * task.n_rows + first_row + r] = *from;
    });
  };
  if (task.state_m) state(task.state_m, m), state(task.state_l, l);
  if (task.weights) {
    const auto is_hidden = hn::Eq(s, hidden);  // 0, even if the sum is NaN
    each_row(hn::IfThenZeroElse(is_hidden, hn::Mul(weight, factor)),
             [&](int i, int r, const float* from) HWY_ATTR {
               float* to = static_cast<float*>(task.weights) + (h + i) * step.weights +
                           tokens[r] * task.weights_token_stride +
                           heads[r] * task.weights_head_stride;
               for (int x = 0; x < n; x++) to[x] = from[x];
             });
  }
  return true;
}

inline bool DecodeSmall(const AttentionTask& task, const HeadSteps& step) {
  if (!IsSmall(task)) return false;
  bool done = true;
  int64_t token = 0, head = 0;
  ForRowGroups<kSmallRows>(static_cast<int>(task.n_rows), [&](int r, auto rows) HWY_ATTR {
    constexpr int kRows = rows, kHeads = kSmallRows / kRows;
    int64_t h = 0;
    for (; h + kHeads <= step.count; h += kHeads) {
      done &= SmallHeads<kHeads, kRows>(task, step, h, r, token, head);
    }
    if constexpr (kHeads > 1) {
      for (; h < step.count; h++) done &= SmallHeads<1, kRows>(task, step, h, r, token, head);
    }
    for (head += kRows; head >= task.group_size; head -= task.group_size) token++;
  });
  return done;
}
#endif  // HWY_TARGET == HWY_SCALAR

}  // namespace HWY_NAMESPACE
}  // namespace qkv::kernels
HWY_AFTER_NAMESPACE();

#endif  // toggle
