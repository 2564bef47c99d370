// SPDX-License-Identifier: Apache-2.0
// Tier: kernel (compiled once per Highway target). The softmax weights of the rows of a task, and
// what is made of them, from the state that Decode left. Contract: AttentionTask and WeightForms in
// kernels.h.
#if defined(QKV_KERNELS_DECODE_WEIGHTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_KERNELS_DECODE_WEIGHTS_INL_H_
#undef QKV_KERNELS_DECODE_WEIGHTS_INL_H_
#else
#define QKV_KERNELS_DECODE_WEIGHTS_INL_H_
#endif

#include "kernels/decode-inl.h"
#include "kernels/weight_forms-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::kernels {
namespace HWY_NAMESPACE {

// Scores of a row become weights, 0 where hidden. entropy: a lane vector, added to.
template <class T, bool kEntropy>
HWY_INLINE void RowWeights(const KeySpan<T>& span, T reference, T sum, T* HWY_RESTRICT s,
                           T* HWY_RESTRICT entropy) {
  const Tag<T> d;
  const Vec<T> factor = hn::Set(d, sum == 0 ? T{0} : 1 / sum), m = hn::Set(d, reference);
  const Vec<T> l = hn::Set(d, sum);
  const Vec<T> log_sum = kEntropy ? LogOfSum<T>(l, hn::Eq(l, hn::Zero(d))) : hn::Zero(d);
  Vec<T> total = hn::Zero(d);
  EachVector(span, s, [&](Vec<T> score, int) HWY_ATTR {
    const auto hidden = hn::Eq(score, NegativeInfinity<T>());  // 0, even if the sum is NaN
    const Vec<T> distance = hn::Sub(score, m), p = Weight<T>(distance, factor, hidden);
    if constexpr (kEntropy) total = AddEntropy<T>(p, distance, log_sum, total);
    return p;
  });
  if constexpr (kEntropy) hn::Store(hn::Add(hn::Load(d, entropy), total), d, entropy);
}

// Offers the weights of a block to the largest of the row: scores must still be there.
template <class T>
HWY_NOINLINE void TopOfRow(const KeySpan<T>& span, T reference, T sum, const T* HWY_RESTRICT s,
                           TopRow<T> top) {
  const Tag<T> d;
  const Vec<T> factor = hn::Set(d, sum == 0 ? T{0} : 1 / sum), m = hn::Set(d, reference);
  alignas(64) T room[kLanes<T>];
  for (int x = span.first(); x < span.last(); x += kLanes<T>) {
    const Vec<T> score = hn::Load(d, s + x);
    const auto hidden = hn::Eq(score, NegativeInfinity<T>());
    const Vec<T> p = Weight<T>(hn::Sub(score, m), factor, hidden);
    const auto passing = Passing<T>(p, hn::Set(d, top.threshold()), hidden);
    if (hn::AllFalse(d, passing)) continue;
    hn::Store(p, d, room);
    ForLanes<T>(passing, [&](int i) HWY_ATTR { top.offer(room[i], span.k0 + x + i); });
  }
}

template <class T>
void DecodeWeights(const AttentionTask& with_values, const WeightForms& forms) {
  const Tag<T> d;
  AttentionTask task = with_values;
  task.head_dim_v = 0;  // values are not looked at
  DecodeWork<T> work;
  const RowRange needed = StartDecode(task, &work);
  const T* m = static_cast<const T*>(task.state_m);
  const T* l = static_cast<const T*>(task.state_l);
  const bool wants_top = forms.top_weights && forms.top_k > 0;
  for (int r = 0; r < work.rows; r++) {
    hn::Store(hn::Zero(d), d, work.sum + r * kLanes<T>);  // of entropy, from here on
    if (wants_top) TopRow<T>(forms, work.row[r].token, work.row[r].head).start();
  }
  const auto weights = [&](int r) HWY_ATTR {
    return static_cast<T*>(task.weights) +
           (work.row[r].token - task.weights_first_token) * task.weights_token_stride +
           work.row[r].head * task.weights_head_stride;
  };
  const auto clear = [&](int64_t begin, int64_t end) HWY_ATTR {
    for (int r = 0; task.weights && r < work.rows; r++) {
      for (int64_t j = begin; j < end; j++) weights(r)[j] = 0;
    }
  };
  const auto consume = [&](int r, const KeySpan<T>& span) HWY_ATTR {
    const DecodeRow<T>& row = work.row[r];
    T* s = work.s + r * kScoreStride;
    if (wants_top) TopOfRow(span, m[r], l[r], s, TopRow<T>(forms, row.token, row.head));
    if (forms.entropy) {
      RowWeights<T, true>(span, m[r], l[r], s, work.sum + r * kLanes<T>);
    } else {
      RowWeights<T, false>(span, m[r], l[r], s, nullptr);
    }
    if (task.weights) {
      T* to = weights(r) + span.k0;
      for (int x = span.from; x < span.to; x++) to[x] = s[x];
    }
    const int seen = span.to - span.from;
    const int64_t first = span.k0 + span.from;
    if (forms.mean) {
      AddRow(s + span.from, static_cast<T>(forms.mean_factor), seen,
             static_cast<T*>(forms.mean) + row.token * forms.mean_token_stride + first);
    }
    if (forms.column_sums) {
      AddRow(s + span.from, T{1}, seen,
             static_cast<T*>(forms.column_sums) + row.head * forms.column_sums_head_stride + first);
    }
  };
  clear(task.kv_begin, needed.lo);
  clear(needed.hi, task.kv_end);
  WithKv<T>(task.kv_dtype, [&](auto kv, auto stored) HWY_ATTR {
    using Stored = decltype(stored);
    RunWalk<Stored> walk(task, needed);
    for (KeyRun run = walk.next(); run.n; run = walk.next()) {
      const KeySpan<T> span = SpanOf<T>(run);
      const DenseUse use = DenseOf(task, work, span);
      if (use == DenseUse::hidden) {
        clear(run.begin, run.begin + run.n);
        continue;
      }
      RunScores<T, decltype(kv), Stored>(task, run, span, use == DenseUse::some, false, &work);
      for (int r = 0; r < work.rows; r++) consume(r, span);
    }
  });
  for (int r = 0; r < work.rows; r++) {
    const DecodeRow<T>& row = work.row[r];
    if (forms.entropy) {
      static_cast<T*>(forms.entropy)[row.token * forms.entropy_token_stride +
                                     row.head * forms.entropy_head_stride] =
          SumOfLanes(hn::Load(d, work.sum + r * kLanes<T>)) * static_cast<T>(kLn4);
    }
    if (!wants_top) continue;
    TopRow<T> top(forms, row.token, row.head);
    top.sort();
    top.finish();
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::kernels
HWY_AFTER_NAMESPACE();

#endif  // toggle
