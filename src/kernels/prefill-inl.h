// SPDX-License-Identifier: Apache-2.0
// Tier: kernel (compiled once per Highway target). Called through the kernel table by the schedule.
// Attention with the queries in the SIMD lanes, for more than a few query rows: panels of kPanel
// rows, blocks of kBlock keys, online softmax. K and V are read in place, element by element as
// broadcasts, and never packed. Tiling: Dao et al., arXiv:2205.14135. Contract: AttentionTask in
// kernels.h.
//
//   s^T[key][lane]  = K q^T                       QkRows, over tile-inl.h
//   s^T             = masks, bias, softcap ...    softmax-inl.h, only where needed
//   p^T             = 4^(s^T - reference)         ExpRows
//   out^T[d][lane] += V^T p^T                     PvColumns, over tile-inl.h
#if defined(QKV_KERNELS_PREFILL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_KERNELS_PREFILL_INL_H_
#undef QKV_KERNELS_PREFILL_INL_H_
#else
#define QKV_KERNELS_PREFILL_INL_H_
#endif

#include "kernels/ahead-inl.h"
#include "kernels/dropout-inl.h"
#include "kernels/panel-inl.h"
#include "kernels/rows-inl.h"
#include "kernels/softmax-inl.h"
#include "kernels/spans-inl.h"
#include "kernels/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::kernels {
namespace HWY_NAMESPACE {

// Scores of n keys (a multiple of kRows) for kVectors vectors of the panel.
template <class T, int kVectors, int kRows>
HWY_NOINLINE void QkRows(const T* HWY_RESTRICT k, size_t k_stride, size_t head_dim,
                         const T* HWY_RESTRICT qt, T* HWY_RESTRICT s, T* HWY_RESTRICT max, size_t n,
                         const NextRows<T>& next) {
  const Tag<T> d;
  Vec<T> mx[kVectors];
  Each<kVectors>([&](auto v) HWY_ATTR { mx[v] = hn::Load(d, max + v * kLanes<T>); });
  for (size_t x = 0; x < n; x += kRows) {
    T* HWY_RESTRICT to = s + x * kPanel<T>;
    Vec<T> acc[kRows][kVectors];
    Each<kRows>([&](auto i) HWY_ATTR {
      Each<kVectors>([&](auto v) HWY_ATTR { acc[i][v] = hn::Zero(d); });
    });
    const size_t steps = next.steps(head_dim);
    for (size_t u = 0; u < head_dim; u += steps) {
      next.fetch(x, kRows, u);
      TileSteps<T, kRows, kVectors, true>(k + x * k_stride + u, k_stride, qt + u * kPanel<T>,
                                          kPanel<T>, HWY_MIN(steps, head_dim - u), acc);
    }
    Each<kRows>([&](auto i) HWY_ATTR {
      Each<kVectors>([&](auto v) HWY_ATTR {
        hn::Store(acc[i][v], d, to + i * kPanel<T> + v * kLanes<T>);
        mx[v] = hn::Max(mx[v], acc[i][v]);
      });
    });
  }
  Each<kVectors>([&](auto v) HWY_ATTR { hn::Store(mx[v], d, max + v * kLanes<T>); });
}

template <class T, int kVectors>
HWY_INLINE void Qk(const T* k, int64_t k_stride, int64_t head_dim, const T* qt, T* s, T* max, int n,
                   const NextRows<T>& next) {
  const size_t ld = static_cast<size_t>(k_stride), dim = static_cast<size_t>(head_dim);
  ForTiles<kRowsOf<kVectors>>(
      static_cast<size_t>(n), [&](size_t x, size_t keys, auto rows) HWY_ATTR {
        QkRows<T, kVectors, rows>(k + x * ld, ld, dim, qt, s + x * kPanel<T>, max, keys,
                                  x ? NextRows<T>{} : next);
      });
}

// out^T += V^T p^T for `columns` (a multiple of kColumns) columns of V and n keys; without `keep`,
// out^T = V^T p^T.
template <class T, int kVectors, int kColumns>
HWY_NOINLINE void PvColumns(const T* HWY_RESTRICT v, size_t v_stride, size_t columns,
                            const T* HWY_RESTRICT p, T* HWY_RESTRICT out, size_t n, bool keep) {
  const Tag<T> d;
  const auto kept = hn::FirstN(d, keep ? hn::Lanes(d) : 0);
  for (size_t x = 0; x < columns; x += kColumns) {
    T* HWY_RESTRICT to = out + x * kPanel<T>;
    Tile<T, kColumns, kVectors, false>(
        v + x, v_stride, p, kPanel<T>, n,
        [&](auto i, auto u)
            HWY_ATTR { return hn::MaskedLoad(kept, d, to + i * kPanel<T> + u * kLanes<T>); },
        [&](auto i, auto u, Vec<T> sum)
            HWY_ATTR { hn::Store(sum, d, to + i * kPanel<T> + u * kLanes<T>); });
  }
}

template <class T, int kVectors>
HWY_INLINE void Pv(const T* v, int64_t v_stride, int64_t head_dim, const T* p, T* out, int n,
                   bool keep = true) {
  const size_t ld = static_cast<size_t>(v_stride), keys = static_cast<size_t>(n);
  ForTiles<kRowsOf<kVectors>>(
      static_cast<size_t>(head_dim), [&](size_t x, size_t columns, auto tile) HWY_ATTR {
        PvColumns<T, kVectors, tile>(v + x, ld, columns, p, out + x * kPanel<T>, keys, keep);
      });
}

// The same where a hidden value row holds NaN or Inf, which 0 * v would carry into the sum.
// seen[key][lane] != 0: visible.
template <class T>
HWY_NOINLINE void PvSelect(const T* v, int64_t v_stride, int64_t head_dim, const T* p,
                           const T* seen, T* out, int n, int v0, int nv) {
  const Tag<T> d;
  for (int x = 0; x < n; x++) {
    for (int w = v0 * kLanes<T>; w < (v0 + nv) * kLanes<T>; w += kLanes<T>) {
      const Vec<T> weight = hn::Load(d, p + x * kPanel<T> + w);
      const auto visible = hn::Ne(hn::Load(d, seen + x * kPanel<T> + w), hn::Zero(d));
      for (int64_t c = 0; c < head_dim; c++) {
        T* at = out + c * kPanel<T> + w;
        const Vec<T> sum = hn::Load(d, at);
        const Vec<T> value = hn::Set(d, v[x * v_stride + c]);
        hn::Store(hn::IfThenElse(visible, hn::MulAdd(weight, value, sum), sum), d, at);
      }
    }
  }
}

// Calls f with the number of vectors as a constant.
template <class F, int kVectors = kTileVectors>
HWY_INLINE void WithVectors(int nv, F f) {
  if constexpr (kVectors > 1) {
    if (nv != kVectors) return WithVectors<F, kVectors - 1>(nv, f);
  }
  f(std::integral_constant<int, kVectors>());
}

// Which lanes see which keys, from scores that are -inf where hidden (a NaN score is visible).
template <class T>
HWY_NOINLINE void RecordSeen(const PanelWork<T>& work, const Span& span) {
  const Tag<T> d;
  for (int x = span.begin; x < span.end; x++) {
    for (int v = span.v0; v < span.v0 + span.nv; v++) {
      const int64_t at = x * kPanel<T> + v * kLanes<T>;
      const auto hidden = hn::Eq(hn::Load(d, work.s + at), NegativeInfinity<T>());
      hn::Store(hn::IfThenZeroElse(hidden, hn::Set(d, T{1})), d, work.seen + at);
    }
  }
}

// Scores of one panel in one key block: products, then the steps where they are needed.
template <class T>
HWY_INLINE void BlockScores(const AttentionTask& task, const PanelWork<T>& work,
                            const Panel<T>& panel, const KeyBlock<T>& block, const SpanList& spans,
                            bool fetch) {
  const Tag<T> d;
  for (int w = 0; w < kPanel<T>; w += kLanes<T>) hn::Store(NegativeInfinity<T>(), d, work.max + w);
  ScoreSteps<T> common = {};
  FillSteps(task, work, panel, block.begin, &common);
  if (spans.dense) {
    const int64_t row_stride = HWY_MAX(HWY_MAX(work.k_stride, work.v_stride), kBlock);
    LoadDense(task, panel, block.begin, spans.span[0].begin, spans.span[spans.n - 1].end, work.rows,
              row_stride, work.dense);
    common.dense = work.dense;
  }
  const bool everywhere = common.softcap > 0 || common.slope || common.dense || common.q_ids;
  const bool only_dense = common.dense && common.softcap == 0 && !common.slope && !common.q_ids;
  bool has_ranges = false;
  for (int i = 0; i < spans.n; i++) {
    const Span span = spans.span[i];
    const int w = span.v0 * kLanes<T>;
    const bool finish = span.masked || everywhere;
    T* max = (finish ? work.unused : work.max) + w;
    ForPieces(
        block, span.begin, span.end, [&](const KeyPiece<T>& piece, int begin, int n) HWY_ATTR {
          const T* k = piece.k + (begin - piece.begin) * piece.k_stride;
          T* s = work.s + begin * kPanel<T> + w;
          const T* v = piece.v + (begin - piece.begin) * piece.v_stride;
          // The first panel of a task fetches, the others find both in the cache. Without it cold K and V
          // cost a third of the time on short and chunked problems.
          const NextRows<T> next = {fetch ? k : nullptr, v,
                                    piece.k_stride,      piece.v_stride,
                                    task.head_dim_qk,    task.head_dim_v};
          WithVectors(span.nv, [&](auto vectors) HWY_ATTR {
            Qk<T, vectors>(k, piece.k_stride, task.head_dim_qk, panel.qt + w, s, max, n, next);
          });
        });
    if (!finish) continue;
    if (span.masked && !has_ranges) {
      panel.relative_ranges(block.begin, work.lo, work.hi);
      has_ranges = true;
    }
    if (!everywhere) {
      HideOutside(work.lo, work.hi, work.s, work.max, span.begin, span.end, span.v0, span.nv);
      continue;
    }
    if (only_dense && !span.masked) {
      AddDense(work.dense, work.s, work.max, span.begin, span.end, span.v0, span.nv);
      continue;
    }
    ScoreSteps<T> steps = common;
    if (span.masked) steps.lo = work.lo, steps.hi = work.hi;
    FinishScores(steps, work.s, work.max, span.begin, span.end, span.v0, span.nv);
  }
}

// One panel against one key block. kCareful: hidden value rows may hold NaN or Inf.
template <class T, bool kCareful>
HWY_INLINE void AttendBlock(const AttentionTask& task, const PanelWork<T>& work, Panel<T>& panel,
                            const KeyBlock<T>& block, int begin, int end, bool fetch) {
  const Tag<T> d;
  SpanList spans;
  panel.find_spans(task, block.begin, begin, end, &spans);
  if (spans.n == 0) return;
  BlockScores(task, work, panel, block, spans, fetch);
  auto above = hn::Gt(hn::Load(d, work.max), hn::Load(d, panel.state.threshold));
  for (int w = kLanes<T>; w < kPanel<T>; w += kLanes<T>) {
    above =
        hn::Or(above, hn::Gt(hn::Load(d, work.max + w), hn::Load(d, panel.state.threshold + w)));
  }
  if (HWY_UNLIKELY(!hn::AllFalse(d, above)))
    Raise(panel.state, work.max, panel.has_out ? task.head_dim_v : 0);
  for (int i = 0; i < spans.n;) {  // neighbours with the same vectors are one run from here on
    if (kCareful) RecordSeen(work, spans.span[i]);
    Span run = spans.span[i++];
    for (; i < spans.n && spans.span[i].v0 == run.v0 && spans.span[i].nv == run.nv; i++) {
      if (kCareful) RecordSeen(work, spans.span[i]);
      run.end = spans.span[i].end;
    }
    const int w = run.v0 * kLanes<T>, n = run.end - run.begin;
    T* s = work.s + run.begin * kPanel<T> + w;
    WithVectors(run.nv, [&](auto vectors) HWY_ATTR {
      ExpRows<T, vectors>(s, panel.state.reference + w, panel.state.sum + w, n);
    });
    if (HWY_UNLIKELY(task.dropout > 0)) DropWeights(task, panel, block.begin, run, work.s);
    // The first product writes the sums of all vectors, the others add to them.
    if (!panel.has_out && (kCareful || run.nv != kTileVectors)) panel.clear_out(task.head_dim_v);
    ForPieces(block, run.begin, run.end, [&](const KeyPiece<T>& piece, int at, int m) HWY_ATTR {
      const T* v = piece.v + (at - piece.begin) * piece.v_stride;
      const T* p = work.s + at * kPanel<T>;
      if (kCareful) {
        return PvSelect(v, piece.v_stride, task.head_dim_v, p, work.seen + at * kPanel<T>,
                        panel.state.out, m, run.v0, run.nv);
      }
      WithVectors(run.nv, [&](auto vectors) HWY_ATTR {
        Pv<T, vectors>(v, piece.v_stride, task.head_dim_v, p + w, panel.state.out + w, m,
                       panel.has_out);
      });
      panel.has_out = true;
    });
  }
}

// All blocks of keys for all panels. False if a sum is NaN or Inf although some key was hidden.
template <class T, bool kCareful>
HWY_INLINE bool AttendBlocks(const AttentionTask& task, const PanelWork<T>& work, Panel<T>* panels,
                             int num_panels) {
  int64_t begin = task.kv_end, end = task.kv_begin;
  for (int p = 0; p < num_panels; p++) {
    begin = HWY_MIN(begin, panels[p].begin);
    end = HWY_MAX(end, panels[p].end);
  }
  KeyBlock<T> block;
  // Blocks lie at multiples of kBlock whatever the rows see, so a row's bits do not depend on its
  // neighbours.
  for (int64_t k0 = begin / kBlock * kBlock; k0 < end; k0 += kBlock) {
    LoadBlock(task, work, k0, Within(begin - k0), Within(end - k0), &block);
    bool fetch = true;
    for (int p = 0; p < num_panels; p++) {
      const int from = Within(panels[p].begin - k0), to = Within(panels[p].end - k0);
      if (from < to) {
        if (panels[p].end <= k0 + kBlock) PrefetchOut(task, panels[p]);
        AttendBlock<T, kCareful>(task, work, panels[p], block, from, to, fetch);
        fetch = false;
      }
    }
  }
  for (int p = 0; p < num_panels; p++)
    if (!panels[p].has_out) panels[p].clear_out(task.head_dim_v);
  if (kCareful || (!task.ranges && !task.n_dense && !task.q_ids)) return true;
  bool finite = true;
  for (int p = 0; p < num_panels; p++) {
    finite &= AllFinite(panels[p].state.out, task.head_dim_v * kPanel<T>);
  }
  return finite;
}

template <class T>
void Prefill(const AttentionTask& task) {
  PanelWork<T> work;
  Panel<T> panels[kMaxPanels];
  PrefetchKeys<T>(task);
  int num_panels = StartPanels(task, &work, panels);
  // NaN and Inf in hidden keys are selected away with the scores. In hidden values they would turn
  // a sum into NaN: that shows at the end, and the task is done again by selection. Same bits.
  const bool done = AttendBlocks<T, false>(task, work, panels, num_panels);
  if (HWY_UNLIKELY(!done)) {
    num_panels = StartPanels(task, &work, panels);
    AttendBlocks<T, true>(task, work, panels, num_panels);
  }
  for (int p = 0; p < num_panels; p++) StoreOut(task, work, panels[p]);
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::kernels
HWY_AFTER_NAMESPACE();

#endif  // toggle
