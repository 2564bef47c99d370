// SPDX-License-Identifier: Apache-2.0
// Tier: kernel (compiled once per Highway target). The softmax weights of the rows of a task: a
// second, tiled pass from the state that Prefill left, so that asking for weights changes no other
// result.
#if defined(QKV_KERNELS_PREFILL_WEIGHTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_KERNELS_PREFILL_WEIGHTS_INL_H_
#undef QKV_KERNELS_PREFILL_WEIGHTS_INL_H_
#else
#define QKV_KERNELS_PREFILL_WEIGHTS_INL_H_
#endif

#include "kernels/prefill-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::kernels {
namespace HWY_NAMESPACE {

template <class T>
HWY_INLINE void LoadState(const AttentionTask& task, const Panel<T>& panel) {
  const T* m = static_cast<const T*>(task.state_m) + (panel.first_row - task.row_begin);
  const T* l = static_cast<const T*>(task.state_l) + (panel.first_row - task.row_begin);
  for (int w = 0; w < kPanel<T>; w++) {
    panel.state.reference[w] = w < panel.n_rows ? m[w] : T{0};
    panel.state.sum[w] = w < panel.n_rows ? l[w] : T{0};
  }
}

// Weights of the n keys of the block at k0, from the scores in work.s; keys outside the spans get
// 0.
template <class T>
HWY_NOINLINE void StoreWeights(const AttentionTask& task, const PanelWork<T>& work,
                               const Panel<T>& panel, const SpanList& spans, int64_t k0, int n) {
  const Tag<T> d;
  for (int v = 0; v < kTileVectors; v++) {
    const int w = v * kLanes<T>;
    if (w >= panel.n_rows) break;
    const Vec<T> sum = hn::Load(d, panel.state.sum + w);
    const Vec<T> factor =
        hn::IfThenZeroElse(hn::Eq(sum, hn::Zero(d)), hn::Div(hn::Set(d, T{1}), sum));
    const Vec<T> reference = hn::Load(d, panel.state.reference + w);
    int at = 0;
    const auto zeros = [&](int end) HWY_ATTR {
      for (; at < end; at++) hn::Store(hn::Zero(d), d, work.s + at * kPanel<T> + w);
    };
    for (int i = 0; i < spans.n; i++) {
      const Span& span = spans.span[i];
      if (v < span.v0 || v >= span.v0 + span.nv) continue;
      zeros(span.begin);
      for (; at < span.end; at++) {
        T* s = work.s + at * kPanel<T> + w;
        const Vec<T> score = hn::Load(d, s);
        const auto hidden = hn::Eq(score, NegativeInfinity<T>());  // 0, even if the sum is NaN
        hn::Store(hn::IfThenZeroElse(hidden, hn::Mul(Exp4(hn::Sub(score, reference)), factor)), d,
                  s);
      }
    }
    zeros(static_cast<int>(RoundUp(n, kLanes<T>)));
  }
  T* natural[kLanes<T>];
  for (int i = 0; i < kLanes<T>; i++) natural[i] = work.rows + i * kBlock;
  for (int w = 0; w < kPanel<T>; w += kLanes<T>) hn::Store(hn::Set(d, T{1}), d, work.max + w);
  for (int w = 0; w < panel.n_rows; w += kLanes<T>) {
    PanelToRows(work.s + w, kPanel<T>, work.max, n, natural);
    for (int i = 0; i < HWY_MIN(kLanes<T>, panel.n_rows - w); i++) {
      T* row = static_cast<T*>(task.weights) + panel.token[w + i] * task.weights_token_stride +
               panel.head[w + i] * task.weights_head_stride;
      __builtin_memcpy(row + k0, natural[i], static_cast<size_t>(n) * sizeof(T));
    }
  }
}

template <class T>
void PrefillWeights(const AttentionTask& task) {
  PanelWork<T> work;
  Panel<T> panels[kMaxPanels];
  const int num_panels = StartPanels(task, &work, panels);
  int64_t begin = task.kv_end, end = task.kv_begin;
  for (int p = 0; p < num_panels; p++) {
    LoadState(task, panels[p]);
    begin = HWY_MIN(begin, panels[p].begin);
    end = HWY_MAX(end, panels[p].end);
  }
  KeyBlock<T> block;
  for (int64_t k0 = 0; k0 < task.n_weights; k0 += kBlock) {
    const int n = Within(task.n_weights - k0);
    if (Within(begin - k0) < Within(end - k0))
      LoadBlock(task, work, k0, Within(begin - k0), Within(end - k0), &block);
    for (int p = 0; p < num_panels; p++) {
      const int from = Within(panels[p].begin - k0), to = Within(panels[p].end - k0);
      SpanList spans;
      if (from < to) panels[p].find_spans(task, k0, from, to, &spans);
      if (spans.n) BlockScores(task, work, panels[p], block, spans, false);
      StoreWeights(task, work, panels[p], spans, k0, n);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::kernels
HWY_AFTER_NAMESPACE();

#endif  // toggle
