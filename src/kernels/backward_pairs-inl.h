// SPDX-License-Identifier: Apache-2.0
// Tier: kernel (compiled once per Highway target). p and ds of two panels at once: half the rows and
// twice the vectors of the tile take 8 loads for 16 multiply-adds instead of 10, and K and V are read
// half as often.
#if defined(QKV_KERNELS_BACKWARD_PAIRS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_KERNELS_BACKWARD_PAIRS_INL_H_
#undef QKV_KERNELS_BACKWARD_PAIRS_INL_H_
#else
#define QKV_KERNELS_BACKWARD_PAIRS_INL_H_
#endif

#include "kernels/backward_scores-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::kernels {
namespace HWY_NAMESPACE {

inline constexpr int kPairRows = kTileRows / 2;

template <class T>
using PairSums = Vec<T>[kPairRows][2 * kTileVectors];

// acc[i][j] += sum_u A(i, u) * B[u][j]: as TileSteps, with the vectors j < kTileVectors from b and the others
// from b + pair.
template <class T>
HWY_INLINE void PairSteps(const T* HWY_RESTRICT a, size_t lda, const T* HWY_RESTRICT b, size_t pair,
                          size_t n, PairSums<T>& acc) {
  const Tag<T> d;
  constexpr int kV = 2 * kTileVectors;
  const T* HWY_RESTRICT other = b + pair;
  for (size_t u = 0; u < n; u++) {
    Vec<T> panel[kV];
    Each<kTileVectors>([&](auto j) HWY_ATTR {
      panel[j] = Pin(hn::Load(d, b + j * kLanes<T>));
      panel[j + kTileVectors] = Pin(hn::Load(d, other + j * kLanes<T>));
    });
    Each<kPairRows>([&](auto i) HWY_ATTR {
      const Vec<T> x = hn::Set(d, a[i * lda]);
      Each<kV>([&](auto j) HWY_ATTR { acc[i][j] = hn::MulAdd(x, panel[j], acc[i][j]); });
    });
    a++;
    b += kPanel<T>;
    other += kPanel<T>;
  }
}

template <class F>
HWY_INLINE void EachOfPair(F f) {
  Each<kPairRows>([&](auto i)
                      HWY_ATTR { Each<2 * kTileVectors>([&](auto j) HWY_ATTR { f(i, j); }); });
}

// Where vector j of row i of a pair lies.
template <class T>
HWY_INLINE size_t PairAt(int i, int j, size_t pair) {
  return static_cast<size_t>(i) * kPanel<T> + static_cast<size_t>(j % kTileVectors) * kLanes<T> +
         (j < kTileVectors ? 0 : pair);
}

// s = K q^T for n keys, a multiple of kPairRows.
template <class T>
HWY_NOINLINE void PairScores(const T* HWY_RESTRICT k, size_t k_stride, size_t head_dim,
                             const T* HWY_RESTRICT qt, size_t qt_pair, T* HWY_RESTRICT s,
                             size_t s_pair, size_t n, const NextRows<T>& next) {
  const Tag<T> d;
  for (size_t x = 0; x < n; x += kPairRows) {
    T* HWY_RESTRICT to = s + x * kPanel<T>;
    PairSums<T> acc;
    EachOfPair([&](auto i, auto j) HWY_ATTR { acc[i][j] = hn::Zero(d); });
    const size_t steps = next.steps(head_dim);
    for (size_t u = 0; u < head_dim; u += steps) {
      next.fetch(x, kPairRows, u);
      PairSteps<T>(k + x * k_stride + u, k_stride, qt + u * kPanel<T>, qt_pair,
                   HWY_MIN(steps, head_dim - u), acc);
    }
    EachOfPair([&](auto i, auto j)
                   HWY_ATTR { hn::Store(acc[i][j], d, to + PairAt<T>(i, j, s_pair)); });
  }
}

// ds = p * (init + V dout^T). `pair` is the distance of all operands of the second panel: one stride
// for each would cost gcc the registers of the tile.
template <class T>
HWY_NOINLINE void PairDp(const T* HWY_RESTRICT v, size_t v_stride, size_t head_dim,
                         const T* HWY_RESTRICT dout_t, const T* HWY_RESTRICT init,
                         const T* HWY_RESTRICT p, T* HWY_RESTRICT ds, size_t pair, size_t n) {
  const Tag<T> d;
  for (size_t x = 0; x < n; x += kPairRows) {
    const T* HWY_RESTRICT weight = p + x * kPanel<T>;
    T* HWY_RESTRICT to = ds + x * kPanel<T>;
    PairSums<T> acc;
    EachOfPair([&](auto i, auto j)
                   HWY_ATTR { acc[i][j] = hn::Load(d, init + PairAt<T>(0, j, pair)); });
    PairSteps<T>(v + x * v_stride, v_stride, dout_t, pair, head_dim, acc);
    EachOfPair([&](auto i, auto j) HWY_ATTR {
      const size_t at = PairAt<T>(i, j, pair);
      hn::Store(hn::Mul(acc[i][j], hn::Load(d, weight + at)), d, to + at);
    });
  }
}

// True if these spans, of all panels of a task, and the steps of the task allow pairs: whole panels
// that see the same keys, nothing between the products but exp.
template <class T>
HWY_INLINE bool TakesPairs(const BackwardTask& task, const KeyBlock<T>& block, const Span& span) {
  const AttentionTask& a = task.attention;
  return kTileRows >= 8 && block.n_pieces == 1 && (span.end - span.begin) % kPairRows == 0 &&
         !(a.softcap > 0) && !(a.dropout > 0) && !a.alibi_slopes && !task.dbias && task.dq;
}

// p, ds and dq of two panels.
template <class T>
HWY_INLINE void PairGradients(const BackwardTask& task, const Panel<T>* panels,
                              const GradPanel<T>* grads, const KeyBlock<T>& block, const Span& span,
                              bool fetch) {
  const AttentionTask& a = task.attention;
  const KeyPiece<T>& piece = block.piece[0];
  const T* k = piece.k + (span.begin - piece.begin) * piece.k_stride;
  const T* v = piece.v + (span.begin - piece.begin) * piece.v_stride;
  const size_t k_stride = static_cast<size_t>(piece.k_stride);
  const size_t dim_qk = static_cast<size_t>(a.head_dim_qk);
  const size_t n = static_cast<size_t>(span.end - span.begin);
  const GradPanel<T>&g = grads[0], &h = grads[1];
  const size_t pair = static_cast<size_t>(h.p - g.p);  // of every field: see BackwardWork::layout
  const size_t qt_pair = static_cast<size_t>(panels[1].qt - panels[0].qt);
  T* p = g.p + span.begin * kPanel<T>;
  T* ds = g.ds + span.begin * kPanel<T>;
  const NextRows<T> next = {fetch ? k : nullptr, v,           piece.k_stride, piece.v_stride,
                            a.head_dim_qk,       a.head_dim_v};
  PairScores(k, k_stride, dim_qk, panels[0].qt, qt_pair, p, pair, n, next);
  WeightRows<T, kTileVectors>(p, g.lse, static_cast<int>(n));
  WeightRows<T, kTileVectors>(p + pair, h.lse, static_cast<int>(n));
  PairDp(v, static_cast<size_t>(piece.v_stride), static_cast<size_t>(a.head_dim_v), g.dout_t,
         g.dlogsum, p, ds, pair, n);
  // One panel at a time: ds of two and the rows of K are more than the L1 cache holds.
  Pv<T, kTileVectors>(k, piece.k_stride, a.head_dim_qk, ds, g.dq_t, static_cast<int>(n));
  Pv<T, kTileVectors>(k, piece.k_stride, a.head_dim_qk, ds + pair, h.dq_t, static_cast<int>(n));
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::kernels
HWY_AFTER_NAMESPACE();

#endif  // toggle
