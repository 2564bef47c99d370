// SPDX-License-Identifier: Apache-2.0
// Tier: kernel (compiled once per Highway target). Called through the kernel table by the schedule.
// Gradients of attention: panels of query rows against blocks of keys as in the forward, weights
// recomputed from lse, so nothing of size n_q x n_kv is stored. Five products, all on the register
// tile, and none needs a transpose of p or ds:
//
// clang-format off
//   p^T, ds^T          queries in the lanes    backward_scores-inl.h
//   dq^T += K^T ds^T   queries in the lanes    the forward's second product, with ds for p and K for V
//   dv   += p^T dout   head dim in the lanes   OuterRows: rows of p^T and ds^T are keys, read by broadcast
//   dk   += ds^T q     head dim in the lanes
// clang-format on
//
// Dao et al., arXiv:2205.14135 and arXiv:2307.08691. Contract: BackwardTask in kernels.h.
#if defined(QKV_KERNELS_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_KERNELS_BACKWARD_INL_H_
#undef QKV_KERNELS_BACKWARD_INL_H_
#else
#define QKV_KERNELS_BACKWARD_INL_H_
#endif

#include "kernels/backward_pairs-inl.h"
#include "kernels/backward_panel-inl.h"
#include "kernels/backward_scores-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::kernels {
namespace HWY_NAMESPACE {

// One product with the head dim in the lanes: to[key][d] += sum over lanes of from[key][lane] *
// rows[lane][d].
template <class T>
struct Outer {
  const T* from;                  // [key][lane] of the first panel
  const T* rows;                  // [lane][stride]
  T* to;                          // [key][stride]
  size_t from_panel, rows_panel;  // elements between panels
  size_t stride;
};

// n keys (a multiple of kRows), kVectors vectors of d; lanes [0, steps) of each of n_panels panels.
template <class T, int kVectors, int kRows>
HWY_NOINLINE void OuterRows(const Outer<T>& o, size_t n_panels, size_t steps, size_t n) {
  const Tag<T> d;
  for (size_t x = 0; x < n; x += kRows) {
    T* HWY_RESTRICT to = o.to + x * o.stride;
    Vec<T> acc[kRows][kVectors];
    Each<kRows>([&](auto i) HWY_ATTR {
      Each<kVectors>([&](auto j)
                         HWY_ATTR { acc[i][j] = hn::Load(d, to + i * o.stride + j * kLanes<T>); });
    });
    for (size_t p = 0; p < n_panels; p++) {
      const T* HWY_RESTRICT a = o.from + p * o.from_panel + x * kPanel<T>;
      const T* HWY_RESTRICT b = o.rows + p * o.rows_panel;
      TileSteps<T, kRows, kVectors, true>(a, kPanel<T>, b, o.stride, steps, acc);
    }
    Each<kRows>([&](auto i) HWY_ATTR {
      Each<kVectors>([&](auto j)
                         HWY_ATTR { hn::Store(acc[i][j], d, to + i * o.stride + j * kLanes<T>); });
    });
  }
}

template <class T, int kVectors>
HWY_INLINE void OuterColumns(const Outer<T>& o, size_t n_panels, size_t steps, size_t n) {
  ForTiles<kRowsOf<kVectors>>(n, [&](size_t x, size_t keys, auto rows) HWY_ATTR {
    Outer<T> part = o;
    part.from += x * kPanel<T>, part.to += x * o.stride;
    OuterRows<T, kVectors, rows>(part, n_panels, steps, keys);
  });
}

template <class T>
HWY_INLINE void OuterProduct(Outer<T> o, size_t n_panels, size_t steps, size_t n) {
  size_t vectors = o.stride / kLanes<T>;
#if HWY_TARGET <= HWY_AVX3
  for (; vectors >= 2 * kTileVectors; vectors -= 2 * kTileVectors) {
    OuterColumns<T, 2 * kTileVectors>(o, n_panels, steps, n);
    o.rows += 2 * kPanel<T>, o.to += 2 * kPanel<T>;
  }
#endif
  for (; vectors >= kTileVectors; vectors -= kTileVectors) {
    OuterColumns<T, kTileVectors>(o, n_panels, steps, n);
    o.rows += kPanel<T>, o.to += kPanel<T>;
  }
  if (vectors) {
    WithVectors(static_cast<int>(vectors),
                [&](auto count) HWY_ATTR { OuterColumns<T, count>(o, n_panels, steps, n); });
  }
}

// The same where a hidden key and a row hold NaN or Inf: only what is seen is added.
template <class T>
HWY_NOINLINE void OuterSelect(const Outer<T>& o, const T* HWY_RESTRICT seen, size_t steps,
                              size_t n) {
  const Tag<T> d;
  for (size_t x = 0; x < n; x++) {
    for (size_t w = 0; w < steps; w++) {
      if (seen[x * kPanel<T> + w] == T{0}) continue;
      const Vec<T> factor = hn::Set(d, o.from[x * kPanel<T> + w]);
      for (size_t c = 0; c < o.stride; c += kLanes<T>) {
        T* to = o.to + x * o.stride + c;
        hn::Store(hn::MulAdd(factor, hn::Load(d, o.rows + w * o.stride + c), hn::Load(d, to)), d,
                  to);
      }
    }
  }
}

// Accumulators of the keys of a block.
template <class T>
HWY_INLINE Outer<T> ValueOuter(const BackwardTask& task, const GradPanel<T>& grad, int64_t key) {
  const int64_t stride = RowElements<T>(task.attention.head_dim_v);
  T* to = static_cast<T*>(task.dv) + (key - task.attention.kv_begin) * stride;
  return {grad.p, grad.dout, to, 0, 0, static_cast<size_t>(stride)};
}
template <class T>
HWY_INLINE Outer<T> KeyOuter(const BackwardTask& task, const GradPanel<T>& grad, int64_t key) {
  const int64_t stride = RowElements<T>(task.attention.head_dim_qk);
  T* to = static_cast<T*>(task.dk) + (key - task.attention.kv_begin) * stride;
  return {grad.ds, grad.q, to, 0, 0, static_cast<size_t>(stride)};
}

// dq, dk and dv of one span of a panel.
template <class T>
HWY_INLINE void QueryProduct(const BackwardTask& task, const BackwardWork<T>& work,
                             const GradPanel<T>& grad, const KeyBlock<T>& block, const Span& span,
                             bool unsafe) {
  const int w = span.v0 * kLanes<T>;
  ForPieces(block, span.begin, span.end, [&](const KeyPiece<T>& piece, int begin, int n) HWY_ATTR {
    const T* k = piece.k + (begin - piece.begin) * piece.k_stride;
    const T* ds = grad.ds + begin * kPanel<T>;
    if (HWY_UNLIKELY(unsafe)) {
      const T* seen = work.base.seen + begin * kPanel<T>;
      return PvSelect(k, piece.k_stride, task.attention.head_dim_qk, ds, seen, grad.dq_t, n,
                      span.v0, span.nv);
    }
    WithVectors(span.nv, [&](auto vectors) HWY_ATTR {
      Pv<T, vectors>(k, piece.k_stride, task.attention.head_dim_qk, ds + w, grad.dq_t + w, n);
    });
  });
}

template <class T>
HWY_INLINE void KeyProduct(Outer<T> o, const T* seen, const Panel<T>& panel, const Span& span,
                           bool unsafe) {
  const int w = span.v0 * kLanes<T>;
  const size_t at = static_cast<size_t>(span.begin) * kPanel<T> + static_cast<size_t>(w);
  o.from += at;
  o.rows += static_cast<size_t>(w) * o.stride;
  const size_t steps = static_cast<size_t>(HWY_MIN(panel.n_rows, w + span.nv * kLanes<T>) - w);
  const size_t n = static_cast<size_t>(span.end - span.begin);
  if (HWY_UNLIKELY(unsafe)) return OuterSelect(o, seen + at, steps, n);
  OuterProduct(o, 1, steps, n);
}

// All panels against one key block.
template <class T>
HWY_INLINE void BackwardBlock(const BackwardTask& task, const BackwardWork<T>& work,
                              const Panel<T>* panels, int num_panels, const KeyBlock<T>& block) {
  const AttentionTask& a = task.attention;
  SpanList spans[kMaxPanels];
  Finite finite = Finite::unknown;
  bool plain = true;  // all panels are full and need the same keys: dk and dv in one go
  for (int p = 0; p < num_panels; p++) {
    const int from = Within(panels[p].begin - block.begin),
              to = Within(panels[p].end - block.begin);
    spans[p].n = 0;
    if (from < to) panels[p].find_spans(a, block.begin, from, to, &spans[p]);
    plain &= spans[p].n == 1 && spans[p].span[0].nv == kTileVectors &&
             panels[p].n_rows == kPanel<T> && !spans[p].span[0].masked && !spans[p].dense &&
             !a.q_ids && spans[p].span[0].begin == spans[0].span[0].begin &&
             spans[p].span[0].end == spans[0].span[0].end;
  }
  bool fetch = true;
  int p = 0;
  if (plain && TakesPairs(task, block, spans[0].span[0])) {
    for (; p + 2 <= num_panels; p += 2, fetch = false)
      PairGradients(task, panels + p, work.grads + p, block, spans[0].span[0], fetch);
  }
  for (; p < num_panels; p++) {
    if (spans[p].n == 0) continue;
    const GradPanel<T>& grad = work.grads[p];
    const bool unsafe =
        BlockGradients(task, work, panels[p], grad, block, &spans[p], fetch, &finite);
    fetch = false;
    for (int i = 0; i < spans[p].n; i++) {
      const Span& span = spans[p].span[i];
      if (task.dq || task.dscale) QueryProduct(task, work, grad, block, span, unsafe);
      if (plain) continue;
      const int64_t key = block.begin + span.begin;
      if (task.dv) KeyProduct(ValueOuter(task, grad, key), work.base.seen, panels[p], span, unsafe);
      if (task.dk) KeyProduct(KeyOuter(task, grad, key), work.base.seen, panels[p], span, unsafe);
    }
  }
  if (!plain) return;
  const Span& span = spans[0].span[0];
  const auto all = [&](Outer<T> o, const GradPanel<T>* grads, T* GradPanel<T>::*rows) HWY_ATTR {
    o.from += span.begin * kPanel<T>;
    o.from_panel = num_panels > 1 ? static_cast<size_t>(grads[1].p - grads[0].p) : 0;
    o.rows_panel = num_panels > 1 ? static_cast<size_t>(grads[1].*rows - grads[0].*rows) : 0;
    OuterProduct(o, static_cast<size_t>(num_panels), kPanel<T>,
                 static_cast<size_t>(span.end - span.begin));
  };
  if (task.dv)
    all(ValueOuter(task, work.grads[0], block.begin + span.begin), work.grads, &GradPanel<T>::dout);
  if (task.dk)
    all(KeyOuter(task, work.grads[0], block.begin + span.begin), work.grads, &GradPanel<T>::q);
}

template <class T>
void Backward(const BackwardTask& task) {
  const AttentionTask& a = task.attention;
  BackwardWork<T> work;
  Panel<T> panels[kMaxPanels];
  const int num_panels = StartGradients(task, &work, panels);
  int64_t begin = a.kv_end, end = a.kv_begin;
  for (int p = 0; p < num_panels; p++) {
    begin = HWY_MIN(begin, panels[p].begin);
    end = HWY_MAX(end, panels[p].end);
  }
  KeyBlock<T> block;
  for (int64_t k0 = begin / kBlock * kBlock; k0 < end; k0 += kBlock) {
    LoadBlock(a, work.base, k0, Within(begin - k0), Within(end - k0), &block);
    BackwardBlock(task, work, panels, num_panels, block);
  }
  for (int p = 0; p < num_panels; p++) StoreGradients(task, work, panels[p], work.grads[p]);
}

template <class T>
void SumParts(const SumTask& task) {
  const Tag<T> d;
  constexpr int64_t kChunk = 64;
  HWY_ALIGN T chunk[kChunk];
  const Vec<T> factor = hn::Set(d, static_cast<T>(task.factor));
  const int64_t direct =
      task.out_dtype == kArithmetic<T> ? task.dim / kLanes<T> * kLanes<T> : int64_t{0};
  for (int64_t row = 0; row < task.n_rows; row++) {
    const T* from = static_cast<const T*>(task.parts) + row * task.row_stride;
    const auto sum = [&](int64_t x) HWY_ATTR {
      Vec<T> total = hn::Load(d, from + x);
      for (int64_t p = 1; p < task.n_parts; p++)
        total = hn::Add(total, hn::Load(d, from + p * task.part_stride + x));
      return hn::Mul(total, factor);
    };
    void* to = Advance(task.out, task.out_dtype, row * task.out_row_stride);
    for (int64_t x = 0; x < direct; x += kLanes<T>) hn::StoreU(sum(x), d, static_cast<T*>(to) + x);
    for (int64_t x = direct; x < task.dim; x += kChunk) {
      const int64_t n = HWY_MIN(task.dim - x, kChunk);
      for (int64_t c = 0; c < n; c += kLanes<T>) hn::Store(sum(x + c), d, chunk + c);  // padded
      StoreRow(chunk, task.out_dtype, n, Advance(to, task.out_dtype, x));
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::kernels
HWY_AFTER_NAMESPACE();

#endif  // toggle
