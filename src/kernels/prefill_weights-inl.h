// SPDX-License-Identifier: Apache-2.0
// Tier: kernel (compiled once per Highway target). The softmax weights of the rows of a task, and
// what is made of them: a second, tiled pass from the state that Prefill left, so that asking for
// weights changes no other result. Contract: AttentionTask and WeightForms in kernels.h.
#if defined(QKV_KERNELS_PREFILL_WEIGHTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_KERNELS_PREFILL_WEIGHTS_INL_H_
#undef QKV_KERNELS_PREFILL_WEIGHTS_INL_H_
#else
#define QKV_KERNELS_PREFILL_WEIGHTS_INL_H_
#endif

#include "kernels/prefill-inl.h"
#include "kernels/weight_forms-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::kernels {
namespace HWY_NAMESPACE {

// How the largest weights of a row are kept.
enum class TopKind { none, vectors, heap };

HWY_INLINE TopKind KindOfTop(const AttentionTask& task, const WeightForms& forms) {
  if (!forms.top_weights || forms.top_k == 0) return TopKind::none;
  const bool few = forms.top_k <= kTopVectors && task.kv_end <= 0x7FFFFFFF;  // lanes hold keys
  return few ? TopKind::vectors : TopKind::heap;
}

template <class T>
HWY_INLINE void StartWeights(const AttentionTask& task, const WeightForms& forms, TopKind kind,
                             const Panel<T>& panel) {
  const T* m = static_cast<const T*>(task.state_m) + (panel.first_row - task.row_begin);
  const T* l = static_cast<const T*>(task.state_l) + (panel.first_row - task.row_begin);
  for (int w = 0; w < kPanel<T>; w++) {
    panel.state.reference[w] = w < panel.n_rows ? m[w] : T{0};
    panel.state.sum[w] = w < panel.n_rows ? l[w] : T{0};
    panel.state.threshold[w] = T{-1};
    panel.entropy[w] = T{0};
  }
  if (kind == TopKind::vectors) {
    for (int64_t at = 0; at < forms.top_k * kPanel<T>; at++)
      panel.top[at] = T{-1}, panel.top_keys[at] = -1;
  } else if (kind == TopKind::heap) {
    for (int w = 0; w < panel.n_rows; w++) TopRow<T>(forms, panel.token[w], panel.head[w]).start();
  }
}

template <class T>
HWY_INLINE void FinishWeights(const WeightForms& forms, TopKind kind, const Panel<T>& panel) {
  for (int w = 0; w < panel.n_rows; w++) {
    if (forms.entropy) {
      static_cast<T*>(forms.entropy)[panel.token[w] * forms.entropy_token_stride +
                                     panel.head[w] * forms.entropy_head_stride] =
          panel.entropy[w] * static_cast<T>(kLn4);
    }
    if (kind == TopKind::none) continue;
    TopRow<T> row(forms, panel.token[w], panel.head[w]);
    if (kind == TopKind::heap) {
      row.sort();
    } else {
      for (int64_t n = 0; n < row.k; n++) {
        row.weights[n] = panel.top[n * kPanel<T> + w];
        row.keys[n] = panel.top_keys[n * kPanel<T> + w];
      }
    }
    row.finish();
  }
}

// Offers the weights of one vector and key to the heaps of their rows; returns the thresholds.
template <class T, class M>
HWY_NOINLINE Vec<T> OfferToHeaps(const WeightForms& forms, const Panel<T>& panel, int w,
                                 int64_t key, Vec<T> p, M passing) {
  const Tag<T> d;
  alignas(64) T room[kLanes<T>];
  hn::Store(p, d, room);
  T* threshold = panel.state.threshold + w;
  ForLanes<T>(passing, [&](int i) HWY_ATTR {
    TopRow<T> top(forms, panel.token[w + i], panel.head[w + i]);
    top.offer(room[i], key);
    threshold[i] = top.threshold();
  });
  return hn::Load(d, threshold);
}

// The same for sorted vectors: the n-th becomes the one above it, the new one, or stays. Keys come in
// rising order: an equal weight goes behind.
template <class T, class M>
HWY_NOINLINE Vec<T> OfferToVectors(const WeightForms& forms, const Panel<T>& panel, int w,
                                   int64_t key, Vec<T> p, M passing) {
  const Tag<T> d;
  const hn::RebindToSigned<Tag<T>> di;
  p = hn::IfThenElse(hn::Eq(p, p), p, hn::Inf(d));  // NaN is the largest
  p = hn::IfThenElse(passing, p, hn::Set(d, T{-1}));
  const auto new_key = hn::Set(di, static_cast<LaneInt<T>>(key));
  T* at = panel.top + (forms.top_k - 1) * kPanel<T> + w;
  LaneInt<T>* key_at = panel.top_keys + (forms.top_k - 1) * kPanel<T> + w;
  Vec<T> own = hn::Load(d, at);
  auto own_key = hn::Load(di, key_at);
  auto above_own = hn::Gt(p, own);
  for (int64_t n = forms.top_k - 1; n > 0; n--, at -= kPanel<T>, key_at -= kPanel<T>) {
    if (n % 8 == 0 && hn::AllFalse(d, above_own)) break;  // what is above stays, too
    const Vec<T> next = hn::Load(d, at - kPanel<T>);
    const auto next_key = hn::Load(di, key_at - kPanel<T>);
    const auto above_next = hn::Gt(p, next);
    hn::Store(hn::IfThenElse(above_next, next, hn::IfThenElse(above_own, p, own)), d, at);
    hn::Store(hn::IfThenElse(hn::RebindMask(di, above_next), next_key,
                             hn::IfThenElse(hn::RebindMask(di, above_own), new_key, own_key)),
              di, key_at);
    own = next, own_key = next_key, above_own = above_next;
  }
  hn::Store(hn::IfThenElse(above_own, p, own), d, at);
  hn::Store(hn::IfThenElse(hn::RebindMask(di, above_own), new_key, own_key), di, key_at);
  const Vec<T> threshold = hn::Load(d, panel.top + (forms.top_k - 1) * kPanel<T> + w);
  hn::Store(threshold, d, panel.state.threshold + w);
  return threshold;
}

// Offers the weights of one vector and the keys [begin, end) of the block at k0; -1 where hidden, which
// becomes 0 if the weights are needed further on. Four keys for a branch: few pass.
template <class T, TopKind kTop>
HWY_NOINLINE void ScanTop(const WeightForms& forms, const Panel<T>& panel, int w, int64_t k0,
                          int begin, int end, bool clean, T* HWY_RESTRICT s) {
  const Tag<T> d;
  Vec<T> threshold = hn::Load(d, panel.state.threshold + w);
  const auto passing = [&](int x) HWY_ATTR {  // NaN passes
    return hn::Not(hn::Le(hn::Load(d, s + x * kPanel<T>), threshold));
  };
  const auto offer = [&](int x) HWY_ATTR {
    const auto lanes = passing(x);
    if (hn::AllFalse(d, lanes)) return;
    const Vec<T> p = hn::Load(d, s + x * kPanel<T>);
    threshold = kTop == TopKind::heap ? OfferToHeaps<T>(forms, panel, w, k0 + x, p, lanes)
                                      : OfferToVectors<T>(forms, panel, w, k0 + x, p, lanes);
  };
  int x = begin;
  for (; x + 4 <= end; x += 4) {
    const auto any =
        hn::Or(hn::Or(passing(x), passing(x + 1)), hn::Or(passing(x + 2), passing(x + 3)));
    if (hn::AllFalse(d, any)) continue;
    for (int i = x; i < x + 4; i++) offer(i);
  }
  for (; x < end; x++) offer(x);
  for (x = begin; clean && x < end; x++) {
    const Vec<T> p = hn::Load(d, s + x * kPanel<T>);
    hn::Store(hn::IfThenZeroElse(hn::Eq(p, hn::Set(d, T{-1})), p), d, s + x * kPanel<T>);
  }
}

// The scores of the n keys of the block at k0 in work.s become weights; keys outside the spans get 0.
// On the way: entropy and the largest. clean: the weights are needed afterwards.
template <class T, bool kEntropy, TopKind kTop>
HWY_NOINLINE void BlockWeights(const WeightForms& forms, const PanelWork<T>& work,
                               const Panel<T>& panel, const SpanList& spans, int64_t k0, int n,
                               bool clean) {
  const Tag<T> d;
  for (int v = 0; v < kTileVectors; v++) {
    const int w = v * kLanes<T>;
    if (w >= panel.n_rows) break;
    const Vec<T> sum = hn::Load(d, panel.state.sum + w);
    const auto nothing = hn::Eq(sum, hn::Zero(d));  // rows that see nothing, lanes without a row
    const Vec<T> factor = hn::IfThenZeroElse(nothing, hn::Div(hn::Set(d, T{1}), sum));
    const Vec<T> reference = hn::Load(d, panel.state.reference + w);
    const Vec<T> log_sum = kEntropy ? LogOfSum<T>(sum, nothing) : hn::Zero(d);
    Vec<T> entropy = hn::Zero(d);
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
        // 0, even if the sum is NaN
        const auto hidden = hn::Or(nothing, hn::Eq(score, NegativeInfinity<T>()));
        const Vec<T> distance = hn::Sub(score, reference), p = Weight<T>(distance, factor, hidden);
        if constexpr (kEntropy) entropy = AddEntropy<T>(p, distance, log_sum, entropy);
        if constexpr (kTop == TopKind::none) {
          hn::Store(p, d, s);
        } else {
          hn::Store(hn::IfThenElse(hidden, hn::Set(d, T{-1}), p), d, s);
        }
      }
      if constexpr (kTop != TopKind::none)
        ScanTop<T, kTop>(forms, panel, w, k0, span.begin, span.end, clean, work.s + w);
    }
    zeros(static_cast<int>(RoundUp(n, kLanes<T>)));
    if constexpr (kEntropy)
      hn::Store(hn::Add(hn::Load(d, panel.entropy + w), entropy), d, panel.entropy + w);
  }
}

// Natural rows of the weights in work.s, kLanes at a time: f(lane of the panel, row).
template <class T, class F>
HWY_INLINE void NaturalRows(const PanelWork<T>& work, const T* from, int64_t stride, int n_rows,
                            int n, F f) {
  const Tag<T> d;
  T* natural[kLanes<T>];
  for (int i = 0; i < kLanes<T>; i++) natural[i] = work.rows + i * kBlock;
  for (int w = 0; w < kPanel<T>; w += kLanes<T>) hn::Store(hn::Set(d, T{1}), d, work.max + w);
  for (int w = 0; w < n_rows; w += kLanes<T>) {
    PanelToRows(from + w, stride, work.max, n, natural);
    f(w, natural);
  }
}

// Rows of weights to where they are wanted, or into their mean over the heads.
template <class T>
HWY_NOINLINE void StoreWeights(const AttentionTask& task, const WeightForms& forms,
                               const PanelWork<T>& work, const Panel<T>& panel, int64_t k0, int n) {
  NaturalRows(work, work.s, kPanel<T>, panel.n_rows, n, [&](int w, T* const* natural) HWY_ATTR {
    for (int i = 0; i < HWY_MIN(kLanes<T>, panel.n_rows - w); i++) {
      const int64_t token = panel.token[w + i];
      if (task.weights) {
        T* row = static_cast<T*>(task.weights) +
                 (token - task.weights_first_token) * task.weights_token_stride +
                 panel.head[w + i] * task.weights_head_stride;
        __builtin_memcpy(row + k0, natural[i], static_cast<size_t>(n) * sizeof(T));
      }
      if (forms.mean) {
        AddRow(natural[i], static_cast<T>(forms.mean_factor), n,
               static_cast<T*>(forms.mean) + token * forms.mean_token_stride + k0);
      }
    }
  });
}

// Sums of columns. Where a vector holds whole groups of heads, the vectors of all panels are added
// first and transposed once; else each vector for itself.
template <class T>
struct ColumnSums {
  const WeightForms& forms;
  int64_t group_size;
  bool periodic;     // lane w has the same head in every vector
  bool any = false;  // sums hold something

  // work.seen: [key][kLanes], sums of the vectors of a block.
  HWY_NOINLINE void add(const PanelWork<T>& work, const Panel<T>& panel, int64_t k0, int n) {
    const Tag<T> d;
    if (!periodic) {
      NaturalRows(work, work.s, kPanel<T>, panel.n_rows, n,
                  [&](int w, T* const* natural) HWY_ATTR { flush(panel, w, k0, n, natural); });
      return;
    }
    for (int x = 0; x < static_cast<int>(RoundUp(n, kLanes<T>)); x++) {
      T* to = work.seen + x * kLanes<T>;
      Vec<T> sum = any ? hn::Load(d, to) : hn::Zero(d);
      for (int w = 0; w < panel.n_rows; w += kLanes<T>)
        sum = hn::Add(sum, hn::Load(d, work.s + x * kPanel<T> + w));
      hn::Store(sum, d, to);
    }
    any = true;
  }
  HWY_NOINLINE void finish_block(const PanelWork<T>& work, const Panel<T>& panel, int64_t k0,
                                 int n) {
    if (!any) return;
    any = false;
    NaturalRows(work, work.seen, kLanes<T>, HWY_MIN(panel.n_rows, kLanes<T>), n,
                [&](int w, T* const* natural) HWY_ATTR { flush(panel, w, k0, n, natural); });
  }

 private:
  // Lanes from w on: those of one head together, then into the result.
  HWY_INLINE void flush(const Panel<T>& panel, int w, int64_t k0, int n, T* const* natural) {
    const int heads = static_cast<int>(HWY_MIN(group_size, int64_t{kLanes<T>}));
    const int lanes = HWY_MIN(kLanes<T>, panel.n_rows - w);
    for (int i = heads; i < lanes; i++) AddRow(natural[i], T{1}, n, natural[i % heads]);
    for (int i = 0; i < HWY_MIN(heads, lanes); i++) {
      AddRow(natural[i], T{1}, n,
             static_cast<T*>(forms.column_sums) +
                 panel.head[w + i] * forms.column_sums_head_stride + k0);
    }
  }
};

template <class T>
void PrefillWeights(const AttentionTask& with_values, const WeightForms& forms) {
  AttentionTask task = with_values;
  task.head_dim_v = 0;  // values are not looked at
  PanelWork<T> work;
  Panel<T> panels[kMaxPanels];
  const int num_panels = StartPanels(task, &work, panels);
  const TopKind kind = KindOfTop(task, forms);
  int64_t begin = task.kv_end, end = task.kv_begin;
  for (int p = 0; p < num_panels; p++) {
    StartWeights(task, forms, kind, panels[p]);
    begin = HWY_MIN(begin, panels[p].begin);
    end = HWY_MAX(end, panels[p].end);
  }
  const int64_t first = task.weights ? task.kv_begin : begin / kBlock * kBlock;
  const int64_t last = task.weights ? task.kv_end : end;
  ColumnSums<T> columns = {forms, task.group_size, kLanes<T> % task.group_size == 0};
  KeyBlock<T> block;
  for (int64_t k0 = first; k0 < last; k0 += kBlock) {
    const int n = Within(task.kv_end - k0);
    if (Within(begin - k0) < Within(end - k0))
      LoadBlock(task, work, k0, Within(begin - k0), Within(end - k0), &block);
    for (int p = 0; p < num_panels; p++) {
      const Panel<T>& panel = panels[p];
      const int from = Within(panel.begin - k0), to = Within(panel.end - k0);
      SpanList spans;
      if (from < to) panel.find_spans(task, k0, from, to, &spans);
      if (spans.n == 0 && !task.weights) continue;
      if (spans.n) BlockScores(task, work, panel, block, spans, false);
      const bool further = task.weights || forms.mean || forms.column_sums;
      if (kind == TopKind::vectors) {
        BlockWeights<T, true, TopKind::vectors>(forms, work, panel, spans, k0, n, further);
      } else if (kind == TopKind::heap) {
        BlockWeights<T, true, TopKind::heap>(forms, work, panel, spans, k0, n, further);
      } else if (forms.entropy) {
        BlockWeights<T, true, TopKind::none>(forms, work, panel, spans, k0, n, further);
      } else {
        BlockWeights<T, false, TopKind::none>(forms, work, panel, spans, k0, n, further);
      }
      if (task.weights || forms.mean) StoreWeights(task, forms, work, panel, k0, n);
      if (forms.column_sums) columns.add(work, panel, k0, n);
    }
    if (forms.column_sums) columns.finish_block(work, panels[0], k0, n);
  }
  for (int p = 0; p < num_panels; p++) FinishWeights(forms, kind, panels[p]);
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::kernels
HWY_AFTER_NAMESPACE();

#endif  // toggle
