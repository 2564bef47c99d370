// SPDX-License-Identifier: Apache-2.0
// Tier: kernel (compiled once per Highway target). Query rows on their way into panels and sums on
// their way out.
#if defined(QKV_KERNELS_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_KERNELS_ROWS_INL_H_
#undef QKV_KERNELS_ROWS_INL_H_
#else
#define QKV_KERNELS_ROWS_INL_H_
#endif

#include "kernels/panel-inl.h"
#include "kernels/transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::kernels {
namespace HWY_NAMESPACE {

template <class T>
inline constexpr DType kArithmetic = sizeof(T) == 4 ? DType::f32 : DType::f64;

template <class T>
HWY_INLINE void PrefetchQuery(const AttentionTask& task, const Panel<T>& panel, int lane) {
  if (task.q_dtype != kArithmetic<T> || lane >= panel.n_rows) return;
  PrefetchRow(static_cast<const T*>(task.q) + panel.token[lane] * task.q_token_stride +
                  panel.head[lane] * task.q_head_stride,
              task.head_dim_qk);
}
// The rows that a panel will write.
template <class T>
HWY_INLINE void PrefetchOut(const AttentionTask& task, const Panel<T>& panel) {
  if (!task.out || task.unnormalised || task.out_dtype != kArithmetic<T>) return;
  for (int w = 0; w < panel.n_rows; w++) {
    PrefetchRow(static_cast<const T*>(task.out) + panel.token[w] * task.out_token_stride +
                    panel.head[w] * task.out_head_stride,
                task.head_dim_v);
  }
}
// The first keys of a task.
template <class T>
HWY_INLINE void PrefetchKeys(const AttentionTask& task) {
  if (task.kv_dtype != kArithmetic<T> || task.n_segments == 0) return;
  const KvSegment& segment = task.segments[0];
  for (int64_t j = 0; j < HWY_MIN(segment.count, int64_t{2 * kTileRows}); j++) {
    PrefetchRow(static_cast<const T*>(segment.k) + j * task.k_row_stride, task.head_dim_qk);
  }
}

// Q^T of a panel, times scale and log4(e). Whole vectors of rows in the arithmetic type are read in place; other types, the
// end of a row and lanes without a row go through work.rows.
template <class T>
HWY_INLINE void PackQueries(const AttentionTask& task, const PanelWork<T>& work,
                            const Panel<T>* next, Panel<T>* panel) {
  const double to_log4 = task.softcap > 0 ? 1.0 / task.softcap : kLog4E;
  const T factor = static_cast<T>(task.scale * to_log4);
  const int64_t stride = work.k_stride, dim = task.head_dim_qk;
  for (int w = 0; w < panel->n_rows; w += kLanes<T>) {  // vectors without any row are never read
    const T* rows[kLanes<T>];
    int64_t done = 0;
    if (task.q_dtype == kArithmetic<T> && w + kLanes<T> <= panel->n_rows) {
      for (int i = 0; i < kLanes<T>; i++) {
        if (next) PrefetchQuery(task, *next, w + i);
        rows[i] = static_cast<const T*>(task.q) + panel->token[w + i] * task.q_token_stride +
                  panel->head[w + i] * task.q_head_stride;
      }
      done = dim / kLanes<T> * kLanes<T>;
      RowsToPanel(rows, done, factor, panel->qt + w, kPanel<T>);
      if (done == dim) continue;
    }
    const int64_t rest = dim - done;
    for (int i = 0; i < kLanes<T>; i++) {
      T* row = work.rows + i * stride;
      rows[i] = row;
      for (int64_t x = w + i < panel->n_rows ? rest : 0; x < RoundUp(rest, kLanes<T>); x++)
        row[x] = T{0};
      if (w + i >= panel->n_rows) continue;  // lanes without a row compute with zeros
      const int64_t offset = panel->token[w + i] * task.q_token_stride +
                             panel->head[w + i] * task.q_head_stride + done;
      LoadRow(Advance(task.q, task.q_dtype, offset), task.q_dtype, rest, T{1}, row);
    }
    RowsToPanel(rows, rest, factor, panel->qt + done * kPanel<T> + w, kPanel<T>);
  }
}

// Carves the scratch and prepares the panels; returns their number.
template <class T>
HWY_INLINE int StartPanels(const AttentionTask& task, PanelWork<T>* work, Panel<T>* panels) {
  char* at = static_cast<char*>(task.scratch);
  PanelWork<T>::layout(task.head_dim_qk, task.head_dim_v, work, panels, [&](int64_t n) HWY_ATTR {
    T* p = reinterpret_cast<T*>(at);
    at += RoundUp(n * static_cast<int64_t>(sizeof(T)), kAlignment);
    return p;
  });
  int n = 0;
  for (int64_t row = 0; row < task.n_rows; row += kPanel<T>, n++) {
    panels[n].first_row = task.row_begin + row;
    panels[n].n_rows =
        static_cast<int>(HWY_MIN(task.n_rows - row, static_cast<int64_t>(kPanel<T>)));
    FindLanes(task, &panels[n]);
  }
  for (int w = 0; w < kPanel<T>; w++) PrefetchQuery(task, panels[0], w);
  for (int p = 0; p < n; p++) {
    FindKeys(task, &panels[p]);
    PackQueries(task, *work, p + 1 < n ? &panels[p + 1] : nullptr, &panels[p]);
    StartState(task, &panels[p]);
  }
  return n;
}

// Rows of a panel from [dim][lane], lane vectors times factor: element x of lane's row at place(lane) + x elements of this
// type. Whole vectors go straight to their rows; the rest through natural, kLanes rows of `stride`.
template <class T, class Place>
HWY_INLINE void StoreRows(const T* from, const T* factor, int64_t dim, int n_rows, DType dtype,
                          T* natural, int64_t stride, Place place) {
  for (int w = 0; w < n_rows; w += kLanes<T>) {
    const int n = HWY_MIN(kLanes<T>, n_rows - w);
    T* rows[kLanes<T>];
    T* own[kLanes<T>];
    for (int i = 0; i < kLanes<T>; i++) {
      own[i] = natural + i * stride;
      rows[i] = static_cast<T*>(place(HWY_MIN(w + i, n_rows - 1)));
    }
    int64_t done = 0;
    if (n == kLanes<T> && dtype == kArithmetic<T>) {
      done = dim / kLanes<T> * kLanes<T>;
      PanelToRows(from + w, kPanel<T>, factor + w, done, rows);
      if (done == dim) continue;
    }
    PanelToRows(from + done * kPanel<T> + w, kPanel<T>, factor + w, dim - done, own);
    for (int i = 0; i < n; i++)
      StoreRow(own[i], dtype, dim - done, Advance(static_cast<void*>(rows[i]), dtype, done));
  }
}

// Writes the rows of a panel, and its state.
template <class T>
HWY_INLINE void StoreOut(const AttentionTask& task, const PanelWork<T>& work,
                         const Panel<T>& panel) {
  const Tag<T> d;
  const PanelState<T>& state = panel.state;
  const int64_t first = panel.first_row - task.row_begin, dim = task.head_dim_v;
  if (task.state_m) {
    T* m = static_cast<T*>(task.state_m) + first;
    T* l = static_cast<T*>(task.state_l) + first;
    for (int w = 0; w < panel.n_rows; w++) m[w] = state.reference[w], l[w] = state.sum[w];
  }
  if (!task.out) return;
  T* factor = work.max;
  for (int w = 0; w < kPanel<T>; w += kLanes<T>) {
    const Vec<T> one = hn::Set(d, T{1}), sum = hn::Load(d, state.sum + w);
    const Vec<T> inverse = hn::IfThenZeroElse(hn::Eq(sum, hn::Zero(d)), hn::Div(one, sum));
    hn::Store(task.unnormalised ? one : inverse, d, factor + w);
  }
  const DType dtype = task.unnormalised ? kArithmetic<T> : task.out_dtype;
  StoreRows(state.out, factor, dim, panel.n_rows, dtype, work.rows, work.v_stride,
            [&](int lane) HWY_ATTR {
              const int64_t offset = task.unnormalised
                                         ? (first + lane) * dim
                                         : panel.token[lane] * task.out_token_stride +
                                               panel.head[lane] * task.out_head_stride;
              return Advance(task.out, dtype, offset);
            });
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::kernels
HWY_AFTER_NAMESPACE();

#endif  // toggle
