// SPDX-License-Identifier: Apache-2.0
// Tier: kernel (compiled once per Highway target). Weights and gradients of the scores of one panel
// in one key block, both transposed: p[key][lane] and ds[key][lane]. Weights come from the
// forward's lse: exp(s - lse) needs no running maximum.
//
// clang-format off
//   p^T   = 4^(K q^T - lse)                        BlockScores of the forward, WeightRows
//   ds^T  = p^T * (V dout^T + dlse - dout . out)   DpRows: sums start at the second term, end times p^T
// clang-format on
#if defined(QKV_KERNELS_BACKWARD_SCORES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_KERNELS_BACKWARD_SCORES_INL_H_
#undef QKV_KERNELS_BACKWARD_SCORES_INL_H_
#else
#define QKV_KERNELS_BACKWARD_SCORES_INL_H_
#endif

#include "kernels/backward_panel-inl.h"
#include "kernels/prefill-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::kernels {
namespace HWY_NAMESPACE {

// s = 4^(s - lse) in place, for n keys and kVectors vectors. Sums that start at -lse would save the
// subtraction but round at the magnitude of lse: up to 5 times the error of a plain loop.
template <class T, int kVectors>
HWY_NOINLINE void WeightRows(T* HWY_RESTRICT s, const T* HWY_RESTRICT lse, int n) {
  const Tag<T> d;
  constexpr int kUnroll = kVectors >= 3 ? 1 : kVectors == 2 ? 2 : 4;  // 2 to 4 vectors in flight
  Vec<T> less[kVectors];
  Each<kVectors>([&](auto v) HWY_ATTR { less[v] = hn::Load(d, lse + v * kLanes<T>); });
  const auto row = [&](T* at) HWY_ATTR {
    Each<kVectors>([&](auto v) HWY_ATTR {
      const Vec<T> score = hn::Load(d, at + v * kLanes<T>);
      hn::Store(Exp4(hn::Sub(score, less[v])), d, at + v * kLanes<T>);
    });
  };
  int x = 0;
  for (; x + kUnroll <= n; x += kUnroll)
    Each<kUnroll>([&](auto u) HWY_ATTR { row(s + (x + u) * kPanel<T>); });
  for (; x < n; x++) row(s + x * kPanel<T>);
}

// ds = p * (init + V dout^T) for n keys (a multiple of kRows). kHides: some p are 0 because the key is
// hidden; then ds is 0 whatever the product is, which may be NaN or overflow.
template <class T, int kVectors, bool kHides, int kRows>
HWY_NOINLINE void DpRows(const T* HWY_RESTRICT v, size_t v_stride, size_t head_dim,
                         const T* HWY_RESTRICT dout_t, const T* HWY_RESTRICT init,
                         const T* HWY_RESTRICT p, T* HWY_RESTRICT ds, size_t n) {
  const Tag<T> d;
  for (size_t x = 0; x < n; x += kRows) {
    const T* HWY_RESTRICT weight = p + x * kPanel<T>;
    T* HWY_RESTRICT to = ds + x * kPanel<T>;
    Tile<T, kRows, kVectors, true>(
        v + x * v_stride, v_stride, dout_t, kPanel<T>, head_dim,
        [&](auto, auto u) HWY_ATTR { return hn::Load(d, init + u * kLanes<T>); },
        [&](auto i, auto u, Vec<T> sum) HWY_ATTR {
          const auto at = i * kPanel<T> + u * kLanes<T>;
          const Vec<T> w = hn::Load(d, weight + at);
          const Vec<T> product = hn::Mul(sum, w);
          hn::Store(kHides ? hn::IfThenZeroElse(hn::Eq(w, hn::Zero(d)), product) : product, d,
                    to + at);
        });
  }
}

template <class T, int kVectors, bool kHides>
HWY_INLINE void Dp(const T* v, int64_t v_stride, int64_t head_dim, const T* dout_t, const T* init,
                   const T* p, T* ds, int n) {
  const size_t ld = static_cast<size_t>(v_stride), dim = static_cast<size_t>(head_dim);
  constexpr int kRows = kRowsOf<kVectors>;
  ForTiles<kRows>(static_cast<size_t>(n), [&](size_t x, size_t keys, auto rows) HWY_ATTR {
    const size_t at = x * kPanel<T>;
    DpRows<T, kVectors, kHides || rows != kRows, rows>(v + x * ld, ld, dim, dout_t, init, p + at,
                                                       ds + at, keys);
  });
}

// to[key][lane] = f(key, lane vector) for the vectors of a span.
template <class T, class F>
HWY_INLINE void ForSpan(const Span& span, F f) {
  for (int x = span.begin; x < span.end; x++) {
    for (int v = span.v0; v < span.v0 + span.nv; v++) f(x, v * kLanes<T>);
  }
}

template <class T>
HWY_NOINLINE void CopySpan(const Span& span, const T* HWY_RESTRICT from, T* HWY_RESTRICT to) {
  const Tag<T> d;
  ForSpan<T>(span, [&](int x, int w) HWY_ATTR {
    hn::Store(hn::Load(d, from + x * kPanel<T> + w), d, to + x * kPanel<T> + w);
  });
}

// ds += factor[lane] * p, the part of the score's gradient that dropout leaves alone; 0 where p is.
template <class T>
HWY_NOINLINE void AddWeighted(const Span& span, const T* HWY_RESTRICT p,
                              const T* HWY_RESTRICT factor, T* HWY_RESTRICT ds) {
  const Tag<T> d;
  ForSpan<T>(span, [&](int x, int w) HWY_ATTR {
    const int at = x * kPanel<T> + w;
    const Vec<T> weight = hn::Load(d, p + at);
    const Vec<T> sum = hn::MulAdd(weight, hn::Load(d, factor + w), hn::Load(d, ds + at));
    hn::Store(hn::IfThenZeroElse(hn::Eq(weight, hn::Zero(d)), sum), d, ds + at);
  });
}

template <class T>
HWY_NOINLINE void MultiplySpan(const Span& span, const T* HWY_RESTRICT by, T* HWY_RESTRICT ds) {
  const Tag<T> d;
  ForSpan<T>(span, [&](int x, int w) HWY_ATTR {
    const int at = x * kPanel<T> + w;
    hn::Store(hn::Mul(hn::Load(d, by + at), hn::Load(d, ds + at)), d, ds + at);
  });
}

// dslope -= sum of ds * |p - j|.
template <class T>
HWY_NOINLINE void SumDistances(const Span& span, const T* HWY_RESTRICT position,
                               const T* HWY_RESTRICT ds, T* HWY_RESTRICT dslope) {
  const Tag<T> d;
  ForSpan<T>(span, [&](int x, int w) HWY_ATTR {
    const Vec<T> distance =
        hn::Abs(hn::Sub(hn::Load(d, position + w), hn::Set(d, static_cast<T>(x))));
    hn::Store(hn::NegMulAdd(hn::Load(d, ds + x * kPanel<T> + w), distance, hn::Load(d, dslope + w)),
              d, dslope + w);
  });
}

// dbias += ds for the rows and keys of a span.
template <class T>
HWY_NOINLINE void AddBias(const BackwardTask& task, const BackwardWork<T>& work,
                          const Panel<T>& panel, int64_t k0, const Span& span, const T* ds) {
  const int64_t stride = HWY_MAX(HWY_MAX(work.base.k_stride, work.base.v_stride), kBlock);
  const int64_t key_stride = task.dbias_key_stride;
  const int n = span.end - span.begin;
  const int end = HWY_MIN((span.v0 + span.nv) * kLanes<T>, panel.n_rows);
  T* rows[kLanes<T>];
  for (int i = 0; i < kLanes<T>; i++) rows[i] = work.base.rows + i * stride;
  for (int w = span.v0 * kLanes<T>; w < end; w += kLanes<T>) {
    PanelToRows(ds + span.begin * kPanel<T> + w, kPanel<T>, work.ones, n, rows);
    for (int i = 0; i < HWY_MIN(kLanes<T>, end - w); i++) {
      const T* HWY_RESTRICT from = rows[i];
      T* HWY_RESTRICT to =
          static_cast<T*>(task.dbias) + panel.token[w + i] * task.dbias_token_stride +
          panel.head[w + i] * task.dbias_head_stride + (k0 + span.begin) * key_stride;
      if (key_stride == 1) {
        for (int x = 0; x < n; x++) to[x] += from[x];
      } else {
        for (int x = 0; x < n; x++) to[x * key_stride] += from[x];
      }
    }
  }
}

// Some lane must not see some key of the spans.
HWY_INLINE bool Hides(const AttentionTask& task, const SpanList& spans) {
  bool hides = spans.dense || task.q_ids;
  for (int i = 0; i < spans.n; i++) hides |= spans.span[i].masked;
  return hides;
}

// What is known of the key rows of a block.
enum class Finite : uint8_t { unknown, yes, no };

// True if 0 of a hidden key could meet a NaN or Inf in a product; work.seen then says which lanes see
// what.
template <class T>
HWY_INLINE bool FindUnsafe(const AttentionTask& task, const PanelWork<T>& work,
                           const GradPanel<T>& grad, const KeyBlock<T>& block,
                           const SpanList& spans, Finite* finite) {
  if (*finite == Finite::unknown) {
    bool all = true;
    ForPieces(block, 0, kBlock, [&](const KeyPiece<T>& piece, int, int n) HWY_ATTR {
      all = all && FiniteRows(piece.k, piece.k_stride, task.head_dim_qk, n);
    });
    *finite = all ? Finite::yes : Finite::no;
  }
  if (HWY_LIKELY(grad.finite && *finite == Finite::yes)) return false;
  for (int i = 0; i < spans.n; i++) RecordSeen(work, spans.span[i]);
  return true;
}

// The spans with neighbours of the same vectors as one; masks matter no more once the scores are
// there.
HWY_INLINE void JoinSpans(SpanList* spans) {
  int n = 0;
  for (int i = 0; i < spans->n; i++) {
    Span& last = spans->span[n > 0 ? n - 1 : 0];
    const Span& next = spans->span[i];
    if (n > 0 && last.end == next.begin && last.v0 == next.v0 && last.nv == next.nv) {
      last.end = next.end;
    } else {
      spans->span[n++] = next;
    }
  }
  spans->n = n;
}

// p and ds of one panel in one block, on the spans; joins the spans. Returns FindUnsafe.
template <class T>
HWY_INLINE bool BlockGradients(const BackwardTask& task, const BackwardWork<T>& work,
                               const Panel<T>& panel, const GradPanel<T>& grad,
                               const KeyBlock<T>& block, SpanList* spans, bool fetch,
                               Finite* finite) {
  const AttentionTask& a = task.attention;
  PanelWork<T> base = work.base;
  base.s = grad.p;
  BlockScores(a, base, panel, block, *spans, fetch);
  const bool hides = Hides(a, *spans);
  const bool unsafe = hides && FindUnsafe(a, base, grad, block, *spans, finite);
  JoinSpans(spans);
  for (int i = 0; i < spans->n; i++) {
    const Span& span = spans->span[i];
    const int w = span.v0 * kLanes<T>;
    WithVectors(span.nv, [&](auto vectors) HWY_ATTR {
      WeightRows<T, vectors>(grad.p + span.begin * kPanel<T> + w, grad.lse + w,
                             span.end - span.begin);
    });
    if (a.dropout > 0) {
      CopySpan(span, grad.p, work.undropped);
      DropWeights(a, panel, block.begin, span, grad.p);
    }
    if (!task.dq && !task.dk && !task.dbias && !task.dslope && !task.dscale) continue;
    const T* init = (a.dropout > 0 ? work.zeros : grad.dlogsum) + w;
    ForPieces(block, span.begin, span.end,
              [&](const KeyPiece<T>& piece, int begin, int n) HWY_ATTR {
                const T* v = piece.v + (begin - piece.begin) * piece.v_stride;
                const int at = begin * kPanel<T> + w;
                WithVectors(span.nv, [&](auto vectors) HWY_ATTR {
                  const auto run = [&](auto h) HWY_ATTR {
                    Dp<T, vectors, h>(v, piece.v_stride, a.head_dim_v, grad.dout_t + w, init,
                                      grad.p + at, grad.ds + at, n);
                  };
                  if (hides) {
                    run(std::true_type());
                  } else {
                    run(std::false_type());
                  }
                });
              });
    if (a.dropout > 0) AddWeighted(span, work.undropped, grad.dlogsum, grad.ds);
    if (task.dbias) AddBias(task, work, panel, block.begin, span, grad.ds);
    if (task.dslope) SumDistances(span, base.position, grad.ds, grad.dslope);
    if (a.softcap > 0) MultiplySpan(span, work.capped_slope, grad.ds);
  }
  return unsafe;
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::kernels
HWY_AFTER_NAMESPACE();

#endif  // toggle
