// SPDX-License-Identifier: Apache-2.0
// Tier: kernel (compiled once per Highway target). What is made of softmax weights beside writing
// them: sums of rows, entropy, the largest of a row. Shared by the weights of prefill and decode.
// Contract: WeightForms in kernels.h.
#if defined(QKV_KERNELS_WEIGHT_FORMS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_KERNELS_WEIGHT_FORMS_INL_H_
#undef QKV_KERNELS_WEIGHT_FORMS_INL_H_
#else
#define QKV_KERNELS_WEIGHT_FORMS_INL_H_
#endif

#include "kernels/softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::kernels {
namespace HWY_NAMESPACE {

inline constexpr double kLn4 = 1.3862943611198906188;

// to[x] += factor * from[x] for x < n. from may be read to whole vectors.
template <class T>
HWY_INLINE void AddRow(const T* HWY_RESTRICT from, T factor, int n, T* HWY_RESTRICT to) {
  const Tag<T> d;
  const Vec<T> f = hn::Set(d, factor);
  int x = 0;
  for (; x + kLanes<T> <= n; x += kLanes<T>)
    hn::StoreU(hn::MulAdd(hn::LoadU(d, from + x), f, hn::LoadU(d, to + x)), d, to + x);
  if (x == n) return;
  alignas(64) T room[kLanes<T>] = {};
  for (int i = 0; i < n - x; i++) room[i] = to[x + i];
  hn::Store(hn::MulAdd(hn::LoadU(d, from + x), f, hn::Load(d, room)), d, room);
  for (int i = 0; i < n - x; i++) to[x + i] = room[i];
}

// The largest weights of a row, kept where they are wanted: a heap whose root is the worst of them.
// Of equal weights the one with the larger key is worse. Before the end -1 stands for "no key yet"
// and infinity for NaN.
template <class T>
struct TopRow {
  T* weights;
  int64_t* keys;
  int64_t k;

  TopRow(const WeightForms& forms, int64_t token, int64_t head)
      : weights(static_cast<T*>(forms.top_weights) + token * forms.top_weights_token_stride +
                head * forms.top_weights_head_stride),
        keys(forms.top_keys + token * forms.top_keys_token_stride +
             head * forms.top_keys_head_stride),
        k(forms.top_k) {}

  static HWY_INLINE bool is_worse(T a, int64_t key_a, T b, int64_t key_b) {
    return a < b || (a == b && key_a > key_b);
  }

  HWY_INLINE void start() {
    for (int64_t n = 0; n < k; n++) weights[n] = T{-1}, keys[n] = -1;
  }
  // What a weight must pass to come in.
  T threshold() const { return weights[0]; }

  // Puts (p, key) into the place of the root of the first n.
  HWY_INLINE void sift(T p, int64_t key, int64_t n) {
    int64_t at = 0;
    for (int64_t child; (child = 2 * at + 1) < n; at = child) {
      if (child + 1 < n &&
          is_worse(weights[child + 1], keys[child + 1], weights[child], keys[child]))
        child++;
      if (!is_worse(weights[child], keys[child], p, key)) break;
      weights[at] = weights[child], keys[at] = keys[child];
    }
    weights[at] = p, keys[at] = key;
  }
  // Keys come in rising order: an equal weight stays outside.
  HWY_INLINE void offer(T p, int64_t key) {
    if (p != p) p = static_cast<T>(__builtin_inff());
    if (p > threshold()) sift(p, key, k);
  }

  // A heap becomes a list, the largest first.
  HWY_NOINLINE void sort() {
    for (int64_t end = k - 1; end > 0; end--) {
      const T p = weights[end];
      const int64_t key = keys[end];
      weights[end] = weights[0], keys[end] = keys[0];
      sift(p, key, end);
    }
  }
  // Writes zeros and NaN where they stand for something else.
  HWY_INLINE void finish() {
    const T infinity = static_cast<T>(__builtin_inff());
    for (int64_t n = 0; n < k; n++) {
      if (keys[n] < 0) weights[n] = T{0};
      if (weights[n] == infinity) weights[n] = static_cast<T>(__builtin_nanf(""));
    }
  }
};

// Weights p of one vector of scores, 0 where hidden. distance: score - reference.
template <class T, class M>
HWY_INLINE Vec<T> Weight(Vec<T> distance, Vec<T> factor, M hidden) {
  return hn::IfThenZeroElse(hidden, hn::Mul(Exp4(distance), factor));
}

// sum - p log4(p), with log4(p) = distance - log4(l): no term is negative, so none cancels another.
// 0 log 0 = 0.
template <class T>
HWY_INLINE Vec<T> AddEntropy(Vec<T> p, Vec<T> distance, Vec<T> log_sum, Vec<T> sum) {
  const auto none = hn::Eq(p, hn::Zero(Tag<T>()));
  return hn::IfThenElse(none, sum, hn::MulAdd(p, hn::Sub(log_sum, distance), sum));
}

// log4 of l, 0 where the row sees nothing.
template <class T, class M>
HWY_INLINE Vec<T> LogOfSum(Vec<T> sum, M nothing) {
  const Tag<T> d;
  const Vec<T> log2 = hn::Log2(d, hn::IfThenElse(nothing, hn::Set(d, T{1}), sum));
  return hn::Mul(log2, hn::Set(d, static_cast<T>(0.5)));
}

// f(i) for every lane of the mask, in rising order.
template <class T, class M, class F>
HWY_INLINE void ForLanes(M mask, F f) {
  uint8_t bytes[8] = {};  // at most 64 lanes; the call may write 8 bytes
  hn::StoreMaskBits(Tag<T>(), mask, bytes);
  uint64_t bits = 0;
  for (int i = 0; i < (kLanes<T> + 7) / 8; i++) bits |= uint64_t{bytes[i]} << (8 * i);
  for (; bits; bits &= bits - 1) f(__builtin_ctzll(bits));
}

// Lanes whose weight passes the threshold of their row, or is NaN.
template <class T, class M>
HWY_INLINE auto Passing(Vec<T> p, Vec<T> threshold, M hidden) {
  return hn::AndNot(hidden, hn::Not(hn::Le(p, threshold)));
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::kernels
HWY_AFTER_NAMESPACE();

#endif  // toggle
