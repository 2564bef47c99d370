// SPDX-License-Identifier: Apache-2.0
// Tier: kernel (compiled once per Highway target). The score part of decode: what happens to the scores s[key] of one query
// row in one key block between the two products. Keys lie in the lanes, so masks and biases need no transposes. Reference
// and raising as in softmax-inl.h.
#if defined(QKV_KERNELS_DECODE_SCORES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_KERNELS_DECODE_SCORES_INL_H_
#undef QKV_KERNELS_DECODE_SCORES_INL_H_
#else
#define QKV_KERNELS_DECODE_SCORES_INL_H_
#endif

#include "hwy/contrib/math/math-inl.h"
#include "kernels/dense-inl.h"
#include "kernels/dropout-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::kernels {
namespace HWY_NAMESPACE {

// One query row of a decode task.
template <class T>
struct DecodeRow {
  int64_t token, head;
  int64_t lo, hi;  // visible keys
  T reference;     // m
  T limit;  // a score above it raises the reference: m + 8, or -inf before the first visible key
};

// Keys [from, to) of a block, and whole vectors around them.
template <class T>
struct KeySpan {
  int64_t k0;
  int from, to;
  int first() const { return from / kLanes<T> * kLanes<T>; }
  int last() const { return (to + kLanes<T> - 1) / kLanes<T> * kLanes<T>; }
};

// s = f(s, key relative to the block) for whole vectors.
template <class T, class F>
HWY_INLINE void EachVector(const KeySpan<T>& span, T* HWY_RESTRICT s, F f) {
  const Tag<T> d;
  for (int x = span.first(); x < span.last(); x += kLanes<T>)
    hn::Store(f(hn::Load(d, s + x), x), d, s + x);
}

template <class T>
HWY_NOINLINE void SoftcapRow(const KeySpan<T>& span, T softcap, T* HWY_RESTRICT s) {
  const Tag<T> d;
  EachVector(span, s, [&](Vec<T> score, int) HWY_ATTR {
    return hn::Mul(hn::Set(d, softcap), hn::Tanh(d, score));
  });
}

template <class T>
HWY_NOINLINE void AlibiRow(const KeySpan<T>& span, T slope, T position, T* HWY_RESTRICT s) {
  const Tag<T> d;
  EachVector(span, s, [&](Vec<T> score, int x) HWY_ATTR {
    const Vec<T> distance = hn::Abs(hn::Sub(hn::Set(d, position), hn::Iota(d, static_cast<T>(x))));
    return hn::NegMulAdd(hn::Set(d, slope), distance, score);
  });
}

// Adds the dense terms. bias: kBlock elements of room.
template <class T>
HWY_NOINLINE void DenseTermsRow(const AttentionTask& task, const DecodeRow<T>& row,
                                const KeySpan<T>& span, T* HWY_RESTRICT bias, T* HWY_RESTRICT s) {
  const Vec<T> hidden = NegativeInfinity<T>();
  const Tag<T> d;
  for (int64_t i = 0; i < task.n_dense; i++) {
    const DenseTerm& term = task.dense[i];
    const int64_t offset = row.token * term.token_stride + row.head * term.head_stride +
                           (span.k0 + span.from) * term.key_stride;
    DenseRow(term, offset, span.to - span.from, bias + span.from);
    EachVector(span, s,
               [&](Vec<T> score, int x) HWY_ATTR {  // a hidden score may be NaN: select, do not add
                 const Vec<T> b = hn::Load(d, bias + x);
                 return hn::IfThenElse(hn::Eq(b, hidden), hidden, hn::Add(score, b));
               });
  }
}

template <class T>
HWY_NOINLINE void DocumentsRow(const KeySpan<T>& span, int32_t q_id, const int32_t* kv_ids,
                               T* HWY_RESTRICT s) {
  const T hidden = -static_cast<T>(__builtin_inff());
  for (int x = span.from; x < span.to; x++) s[x] = kv_ids[span.k0 + x] == q_id ? s[x] : hidden;
}

// Keys outside [lo, hi) become -inf, up to the ends of the vectors.
template <class T>
HWY_INLINE void HideOutside(const KeySpan<T>& span, int lo, int hi, T* HWY_RESTRICT s) {
  const Tag<T> d;
  const auto hide = [&](int x) HWY_ATTR {
    const Vec<T> key = hn::Iota(d, static_cast<T>(x));
    const auto seen = hn::And(hn::Ge(key, hn::Set(d, static_cast<T>(lo))),
                              hn::Lt(key, hn::Set(d, static_cast<T>(hi))));
    hn::Store(hn::IfThenElse(seen, hn::Load(d, s + x), NegativeInfinity<T>()), d, s + x);
  };
  for (int x = span.first(); x < span.last() && x < lo; x += kLanes<T>) hide(x);
  const int end = HWY_MAX(hi / kLanes<T> * kLanes<T>, span.first());
  for (int x = end; x < span.last(); x += kLanes<T>) hide(x);
}

// Scores of a row from products to log4 units, -inf where hidden.
template <class T>
HWY_INLINE void FinishRow(const AttentionTask& task, const DecodeRow<T>& row,
                          const KeySpan<T>& span, bool dense, T* HWY_RESTRICT bias,
                          T* HWY_RESTRICT s) {
  if (task.softcap > 0) SoftcapRow(span, static_cast<T>(task.softcap * kLog4E), s);
  if (task.alibi_slopes) {
    AlibiRow(span, static_cast<T>(task.alibi_slopes[row.head] * kLog4E),
             static_cast<T>(task.first_position + row.token - span.k0), s);
  }
  if (dense) DenseTermsRow(task, row, span, bias, s);
  if (task.q_ids) DocumentsRow(span, task.q_ids[row.token], task.kv_ids, s);
  HideOutside(span, HWY_MAX(span.from, Within(row.lo - span.k0)),
              HWY_MIN(span.to, Within(row.hi - span.k0)), s);
}

template <class T>
HWY_INLINE T MaxOfRow(const KeySpan<T>& span, const T* HWY_RESTRICT s) {
  const Tag<T> d;
  Vec<T> mx = hn::Load(d, s + span.first());
  for (int x = span.first() + kLanes<T>; x < span.last(); x += kLanes<T>)
    mx = hn::Max(mx, hn::Load(d, s + x));
  return hn::GetLane(hn::MaxOfLanes(d, mx));
}

// Moves the reference of a row to its new maximum and corrects what was summed so far.
template <class T>
HWY_NOINLINE void RaiseRow(T mx, DecodeRow<T>* row, T* HWY_RESTRICT sum, T* HWY_RESTRICT out,
                           int64_t head_dim_v) {
  const Tag<T> d;
  const bool started = row->limit > -static_cast<T>(__builtin_inff());
  if (started) {
    const Vec<T> factor = Exp4(hn::Set(d, row->reference - mx));
    hn::Store(hn::Mul(hn::Load(d, sum), factor), d, sum);
    for (int64_t x = 0; x < head_dim_v; x += kLanes<T>)
      hn::Store(hn::Mul(hn::Load(d, out + x), factor), d, out + x);
  }
  row->reference = mx;
  row->limit = mx + static_cast<T>(kRaiseAbove);
}

// s = 4^(s - m) in place, sum += s. A hidden key gets -0, which tells it from a visible one of weight 0.
template <class T, bool kMasked>
HWY_INLINE void ExpRow(const KeySpan<T>& span, T reference, T* HWY_RESTRICT s,
                       T* HWY_RESTRICT sum) {
  const Tag<T> d;
  Vec<T> total = hn::Load(d, sum);
  const Vec<T> m = hn::Set(d, reference), hidden = NegativeInfinity<T>();
  EachVector(span, s, [&](Vec<T> score, int) HWY_ATTR {
    Vec<T> p = Exp4(hn::Sub(score, m));
    if constexpr (kMasked) p = hn::IfThenElse(hn::Eq(score, hidden), hn::Neg(hn::Zero(d)), p);
    total = hn::Add(total, p);
    return p;
  });
  hn::Store(total, d, sum);
}

// Dropped weights become 0, the others grow by 1 / (1 - dropout); hidden ones stay -0.
template <class T>
HWY_NOINLINE void DropRow(const AttentionTask& task, const DecodeRow<T>& row,
                          const KeySpan<T>& span, T* HWY_RESTRICT p) {
  const double threshold = task.dropout * 4294967296.0;
  const T factor = task.dropout < 1 ? static_cast<T>(1.0 / (1.0 - task.dropout)) : T{0};
  uint32_t random[4];
  int64_t group = -1;
  for (int x = span.from; x < span.to; x++) {
    const int64_t j = span.k0 + x;
    if (j / 4 != group) {
      group = j / 4;
      PhiloxCounter(group, row.token, task.dropout_stream + row.head, random);
      PhiloxBlock(task.seed, random);
    }
    if (random[j % 4] >= threshold) {
      p[x] *= factor;
    } else if (!__builtin_signbit(p[x])) {
      p[x] = T{0};
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::kernels
HWY_AFTER_NAMESPACE();

#endif  // toggle
