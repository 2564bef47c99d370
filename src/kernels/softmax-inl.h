// SPDX-License-Identifier: Apache-2.0
// Tier: kernel (compiled once per Highway target). The score part of prefill: what happens to a
// block of transposed scores s[key][lane] between the two products. Online softmax: Milakov &
// Gimelshein, arXiv:1805.02867.
//
// The reference of a row is the largest score of its first block and is raised only when a score
// passes it by more than 8 in units of log 2: corrections are rare. A row that sees one key has weight 4^0: its value
// comes out bit for bit, and equal scores weigh exactly the same. Scores are kept without it and lose it right before exp: as a
// start value of the products it would save that subtraction (1 % at head dim 64) but round every
// score in another way in each block, so that equal scores differ and weights do not sum to 1.
#if defined(QKV_KERNELS_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_KERNELS_SOFTMAX_INL_H_
#undef QKV_KERNELS_SOFTMAX_INL_H_
#else
#define QKV_KERNELS_SOFTMAX_INL_H_
#endif

#include "hwy/contrib/math/math-inl.h"
#include "kernels/convert-inl.h"
#include "kernels/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::kernels {
namespace HWY_NAMESPACE {

inline constexpr double kLog4E = 0.72134752044448170368;
inline constexpr double kRaiseAbove =
    4.0;  // 4^4 * n_kv stays far from overflow; FlashAttention 4 uses the same bound

template <class T>
using LaneInt = hn::TFromD<hn::RebindToSigned<Tag<T>>>;

template <class T>
HWY_INLINE Vec<T> NegativeInfinity() {
  const Tag<T> d;
  return hn::Neg(hn::Inf(d));
}

// What is done to the scores of one panel in one key block. Pointers to lane vectors have kPanel<T>
// elements; nullptr means that the step is not wanted. Everything is in log4 units.
template <class T>
struct ScoreSteps {
  T softcap;          // > 0: s = softcap * tanh(s)
  T* capped_slope;    // [key][lane], written: 1 - tanh^2
  const T* dense;     // [key][lane], added; -inf hides
  const T* slope;     // s -= slope * |position - key|
  const T* position;  // relative to the block
  const LaneInt<T>* q_ids;
  const int32_t* kv_ids;  // of the keys of the block
  const T* lo;            // visible keys [lo, hi) of each lane, relative to the block
  const T* hi;
};

// Keys [begin, end) of the block, vectors [v0, v0 + nv) of the panel. max: running maximum of each
// lane.
template <class T>
HWY_NOINLINE void FinishScores(const ScoreSteps<T>& steps, T* HWY_RESTRICT s, T* HWY_RESTRICT max,
                               int begin, int end, int v0, int nv) {
  const Tag<T> d;
  const hn::RebindToSigned<Tag<T>> di;
  const Vec<T> hidden = NegativeInfinity<T>();
  for (int v = v0; v < v0 + nv; v++) {
    const int w = v * kLanes<T>;
    Vec<T> mx = hn::Load(d, max + w);
    const Vec<T> lo = steps.lo ? hn::Load(d, steps.lo + w) : hn::Zero(d);
    const Vec<T> hi = steps.hi ? hn::Load(d, steps.hi + w) : hn::Zero(d);
    for (int x = begin; x < end; x++) {
      T* at = s + x * kPanel<T> + w;
      Vec<T> score = hn::Load(d, at);
      const Vec<T> key = hn::Set(d, static_cast<T>(x));
      if (steps.softcap > 0) {
        const Vec<T> t = hn::Tanh(d, score);
        if (steps.capped_slope) {
          const Vec<T> slope = hn::NegMulAdd(t, t, hn::Set(d, T{1}));
          hn::Store(slope, d, steps.capped_slope + x * kPanel<T> + w);
        }
        score = hn::Mul(hn::Set(d, steps.softcap), t);
      }
      if (steps.slope) {
        const Vec<T> distance = hn::Abs(hn::Sub(hn::Load(d, steps.position + w), key));
        score = hn::NegMulAdd(hn::Load(d, steps.slope + w), distance, score);
      }
      if (steps.dense) {  // a hidden score may be NaN: select, do not add
        const Vec<T> bias = hn::Load(d, steps.dense + x * kPanel<T> + w);
        score = hn::IfThenElse(hn::Eq(bias, hidden), hidden, hn::Add(score, bias));
      }
      if (steps.q_ids) {
        const auto same = hn::Eq(hn::Load(di, steps.q_ids + w),
                                 hn::Set(di, static_cast<LaneInt<T>>(steps.kv_ids[x])));
        score = hn::IfThenElse(hn::RebindMask(d, same), score, hidden);
      }
      if (steps.lo) {
        score = hn::IfThenElse(hn::And(hn::Ge(key, lo), hn::Lt(key, hi)), score, hidden);
      }
      hn::Store(score, d, at);
      mx = hn::Max(mx, score);
    }
    hn::Store(mx, d, max + w);
  }
}

// The same where the sum of dense terms is the only step.
template <class T>
HWY_NOINLINE void AddDense(const T* HWY_RESTRICT dense, T* HWY_RESTRICT s, T* HWY_RESTRICT max,
                           int begin, int end, int v0, int nv) {
  const Tag<T> d;
  const Vec<T> hidden = NegativeInfinity<T>();
  for (int w = v0 * kLanes<T>; w < (v0 + nv) * kLanes<T>; w += kLanes<T>) {
    Vec<T> mx = hn::Load(d, max + w);
    for (int x = begin; x < end; x++) {
      const Vec<T> bias = hn::Load(d, dense + x * kPanel<T> + w);
      const Vec<T> sum = hn::Add(hn::Load(d, s + x * kPanel<T> + w), bias);
      const Vec<T> score = hn::IfThenElse(hn::Eq(bias, hidden), hidden, sum);
      hn::Store(score, d, s + x * kPanel<T> + w);
      mx = hn::Max(mx, score);
    }
    hn::Store(mx, d, max + w);
  }
}

// The same where ranges are the only step, which is what a causal diagonal needs.
template <class T>
HWY_NOINLINE void HideOutside(const T* HWY_RESTRICT lo_all, const T* HWY_RESTRICT hi_all,
                              T* HWY_RESTRICT s, T* HWY_RESTRICT max, int begin, int end, int v0,
                              int nv) {
  const Tag<T> d;
  const Vec<T> hidden = NegativeInfinity<T>();
  for (int w = v0 * kLanes<T>; w < (v0 + nv) * kLanes<T>; w += kLanes<T>) {
    const Vec<T> lo = hn::Load(d, lo_all + w), hi = hn::Load(d, hi_all + w);
    Vec<T> mx = hn::Load(d, max + w);
    Vec<T> key = hn::Set(d, static_cast<T>(begin));
    for (int x = begin; x < end; x++) {
      const auto visible = hn::And(hn::Ge(key, lo), hn::Lt(key, hi));
      const Vec<T> score = hn::IfThenElse(visible, hn::Load(d, s + x * kPanel<T> + w), hidden);
      hn::Store(score, d, s + x * kPanel<T> + w);
      mx = hn::Max(mx, score);
      key = hn::Add(key, hn::Set(d, T{1}));
    }
    hn::Store(mx, d, max + w);
  }
}

// Running state of one panel; lane vectors of kPanel<T>.
template <class T>
struct PanelState {
  T* reference;  // m
  T* sum;        // l
  T* threshold;  // a score above it raises: m + 8, or -inf before the first visible key
  T* out;        // [head_dim_v][lane], unnormalised
};

// Raises the reference of the lanes whose maximum passed their threshold.
template <class T>
HWY_NOINLINE void Raise(const PanelState<T>& state, const T* HWY_RESTRICT max, int64_t head_dim_v) {
  const Tag<T> d;
  for (int w = 0; w < kPanel<T>; w += kLanes<T>) {
    const Vec<T> mx = hn::Load(d, max + w), threshold = hn::Load(d, state.threshold + w);
    const auto raise = hn::Gt(mx, threshold);
    if (hn::AllFalse(d, raise)) continue;
    const auto started = hn::Gt(threshold, NegativeInfinity<T>());
    const Vec<T> old = hn::Load(d, state.reference + w);
    const Vec<T> reference = hn::IfThenElse(raise, mx, old);
    hn::Store(reference, d, state.reference + w);
    hn::Store(hn::IfThenElse(raise, hn::Add(reference, hn::Set(d, static_cast<T>(kRaiseAbove))),
                             threshold),
              d, state.threshold + w);
    const auto correct = hn::And(raise, started);
    if (hn::AllFalse(d, correct)) continue;
    const Vec<T> factor = hn::IfThenElse(correct, Exp4(hn::Sub(old, reference)), hn::Set(d, T{1}));
    hn::Store(hn::Mul(hn::Load(d, state.sum + w), factor), d, state.sum + w);
    for (int64_t x = 0; x < head_dim_v; x++) {
      T* at = state.out + x * kPanel<T> + w;
      hn::Store(hn::Mul(hn::Load(d, at), factor), d, at);
    }
  }
}

// s = 4^(s - reference) in place, sum += s, for n keys and kVectors vectors.
template <class T, int kVectors>
HWY_NOINLINE void ExpRows(T* HWY_RESTRICT s, const T* HWY_RESTRICT reference, T* HWY_RESTRICT sum,
                          int n) {
  const Tag<T> d;
  constexpr int kUnroll = kVectors >= 3 ? 1 : kVectors == 2 ? 2 : 4;  // 2 to 4 vectors in flight
  Vec<T> total[kVectors], m[kVectors];
  Each<kVectors>([&](auto v) HWY_ATTR {
    total[v] = hn::Load(d, sum + v * kLanes<T>);
    m[v] = hn::Load(d, reference + v * kLanes<T>);
  });
  const auto row = [&](T* at) HWY_ATTR {
    Each<kVectors>([&](auto v) HWY_ATTR {
      const Vec<T> p = Exp4(hn::Sub(hn::Load(d, at + v * kLanes<T>), m[v]));
      hn::Store(p, d, at + v * kLanes<T>);
      total[v] = hn::Add(total[v], p);
    });
  };
  int x = 0;
  for (; x + kUnroll <= n; x += kUnroll) {
    Each<kUnroll>([&](auto u) HWY_ATTR { row(s + (x + u) * kPanel<T>); });
  }
  for (; x < n; x++) row(s + x * kPanel<T>);
  Each<kVectors>([&](auto v) HWY_ATTR { hn::Store(total[v], d, sum + v * kLanes<T>); });
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::kernels
HWY_AFTER_NAMESPACE();

#endif  // toggle
