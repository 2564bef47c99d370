// SPDX-License-Identifier: Apache-2.0
// Tier: kernel (compiled once per Highway target). The operands of the backward: what a panel of
// query rows needs beside the forward's, the buffers of a task, and the way out of dq.
#if defined(QKV_KERNELS_BACKWARD_PANEL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_KERNELS_BACKWARD_PANEL_INL_H_
#undef QKV_KERNELS_BACKWARD_PANEL_INL_H_
#else
#define QKV_KERNELS_BACKWARD_PANEL_INL_H_
#endif

#include "kernels/convert-inl.h"
#include "kernels/panel-inl.h"
#include "kernels/rows-inl.h"
#include "kernels/tile-inl.h"
#include "kernels/transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::kernels {
namespace HWY_NAMESPACE {

// Natural rows are padded with zeros to whole vectors: the products with the head dim in the lanes
// have no tails.
template <class T>
int64_t RowElements(int64_t dim) {
  return RoundUp(dim, kLanes<T> < 4 ? 4 : kLanes<T>);
}

template <class T>
struct GradPanel {
  T* q;         // [row][RowElements(head_dim_qk)], not scaled
  T* dout;      // [row][RowElements(head_dim_v)]
  T* dout_t;    // [head_dim_v][lane]
  T* dq_t;      // [head_dim_qk][lane], without the factor scale
  T* lse;       // lane vector, log4 units
  T* dlogsum;   // lane vector: dlse - dout . out
  T* dslope;    // lane vector
  T* p;         // [kBlock][lane]: weights after dropout
  T* ds;        // [kBlock][lane]: gradients of the scores
  bool finite;  // q and dout
};

template <class T>
struct BackwardWork {
  PanelWork<T> base;
  GradPanel<T> grads[kMaxPanels];
  T* undropped;     // [kBlock][lane]: weights before dropout
  T* capped_slope;  // [kBlock][lane]: 1 - tanh^2
  T *zeros, *ones;  // lane vectors
  T* row;           // one row of the forward's out

  template <class Take>
  static void layout(int64_t head_dim_qk, int64_t head_dim_v, BackwardWork* work, Panel<T>* panels,
                     Take take) {
    constexpr int64_t kW = kPanel<T>;
    PanelWork<T>::layout(head_dim_qk, head_dim_v, &work->base, panels, take);
    const int64_t dim_qk = RowElements<T>(head_dim_qk), dim_v = RowElements<T>(head_dim_v);
    work->undropped = take(kBlock * kW), work->capped_slope = take(kBlock * kW),
    work->zeros = take(kW), work->ones = take(kW), work->row = take(dim_v);
    for (GradPanel<T>& g : work->grads) {
      g.q = take(kW * dim_qk), g.dout = take(kW * dim_v);
      g.dout_t = take(dim_v * kW), g.dq_t = take(dim_qk * kW);
      g.lse = take(kW), g.dlogsum = take(kW), g.dslope = take(kW);
      g.p = take(kBlock * kW), g.ds = take((kBlock + kLanes<T>)*kW);
    }
  }
};

template <class T>
int64_t BackwardScratchBytes(int64_t head_dim_qk, int64_t head_dim_v) {
  BackwardWork<T> work;
  Panel<T> panels[kMaxPanels];
  int64_t total = 0;
  BackwardWork<T>::layout(head_dim_qk, head_dim_v, &work, panels, [&](int64_t n) HWY_ATTR {
    total += RoundUp(n * static_cast<int64_t>(sizeof(T)), kAlignment);
    return static_cast<T*>(nullptr);
  });
  return total;
}

// False if n rows hold a NaN or Inf: x * 0 is not 0 for those.
template <class T>
HWY_NOINLINE bool FiniteRows(const T* rows, int64_t stride, int64_t dim, int n) {
  const Tag<T> d;
  const Vec<T> zero = hn::Zero(d);
  Vec<T> sum0 = zero, sum1 = zero;
  T tail = 0;
  for (int i = 0; i < n; i++, rows += stride) {
    int64_t x = 0;
    for (; x + 2 * kLanes<T> <= dim; x += 2 * kLanes<T>) {
      sum0 = hn::MulAdd(hn::LoadU(d, rows + x), zero, sum0);
      sum1 = hn::MulAdd(hn::LoadU(d, rows + x + kLanes<T>), zero, sum1);
    }
    for (; x < dim; x++) tail += rows[x] * T{0};
  }
  return hn::AllTrue(d, hn::Eq(hn::Add(sum0, sum1), zero)) && tail == 0;
}

// A row as whole vectors in the arithmetic type: in place, or converted and padded with zeros in
// `own`.
template <class T>
HWY_INLINE const T* WholeRow(const void* from, DType dtype, int64_t offset, int64_t dim, T* own) {
  const void* row = Advance(from, dtype, offset);
  if (dtype == kArithmetic<T> && dim == RowElements<T>(dim)) return static_cast<const T*>(row);
  LoadRow(row, dtype, dim, T{1}, own);
  for (int64_t x = dim; x < RowElements<T>(dim); x++) own[x] = T{0};
  return own;
}

// to = from for n elements, whole vectors; finite += 0 * from.
template <class T>
HWY_INLINE void CopyRow(const T* from, int64_t n, T* to, Vec<T>& finite) {
  const Tag<T> d;
  for (int64_t x = 0; x < n; x += kLanes<T>) {
    const Vec<T> v = hn::LoadU(d, from + x);
    hn::Store(v, d, to + x);
    finite = hn::MulAdd(v, hn::Zero(d), finite);
  }
}

// The same, and sum_x out[x] * from[x]. An out of exactly 0 takes no part: it is that of a row that
// sees nothing, and a NaN in its dout stays there.
template <class T>
HWY_INLINE T CopyRowDot(const T* from, const T* out, int64_t n, T* to, Vec<T>& finite) {
  const Tag<T> d;
  Vec<T> sum = hn::Zero(d);
  for (int64_t x = 0; x < n; x += kLanes<T>) {
    const Vec<T> v = hn::LoadU(d, from + x), o = hn::LoadU(d, out + x);
    hn::Store(v, d, to + x);
    finite = hn::MulAdd(v, hn::Zero(d), finite);
    sum = hn::Add(sum, hn::IfThenZeroElse(hn::Eq(o, hn::Zero(d)), hn::Mul(o, v)));
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// Asks for what PackGradients reads of a lane.
template <class T>
HWY_INLINE void PrefetchGradients(const BackwardTask& task, const Panel<T>& panel, int lane) {
  const AttentionTask& a = task.attention;
  if (a.q_dtype != kArithmetic<T> || lane >= panel.n_rows) return;
  const int64_t token = panel.token[lane], head = panel.head[lane];
  PrefetchRow(static_cast<const T*>(a.q) + token * a.q_token_stride + head * a.q_head_stride,
              a.head_dim_qk);
  PrefetchRow(static_cast<const T*>(task.dout) + token * task.dout_token_stride +
                  head * task.dout_head_stride,
              a.head_dim_v);
  PrefetchRow(
      static_cast<const T*>(task.out) + token * task.out_token_stride + head * task.out_head_stride,
      a.head_dim_v);
}

// Rows of q and dout, their transposes, lse and dlogsum of a panel. A row that sees nothing is all
// zeros, whatever it holds.
template <class T>
HWY_INLINE void PackGradients(const BackwardTask& task, const BackwardWork<T>& work,
                              const Panel<T>* next, Panel<T>* panel, GradPanel<T>* grad) {
  const Tag<T> d;
  const AttentionTask& a = task.attention;
  const int64_t dim_qk = RowElements<T>(a.head_dim_qk), dim_v = RowElements<T>(a.head_dim_v);
  Vec<T> finite = hn::Zero(d);
  for (int w = 0; w < kPanel<T>; w++) {
    if (next) PrefetchGradients(task, *next, w);
    grad->lse[w] = T{0}, grad->dlogsum[w] = T{0}, grad->dslope[w] = T{0};
    T* q = grad->q + w * dim_qk;
    T* dout = grad->dout + w * dim_v;
    const int64_t token = panel->token[w], head = panel->head[w];
    bool sees = w < panel->n_rows && (!a.ranges || panel->lo[w] < panel->hi[w]);
    T lse = T{0}, dlse = T{0};
    if (w < panel->n_rows) {
      lse = static_cast<const T*>(
          task.lse)[token * task.lse_token_stride + head * task.lse_head_stride];
      if (task.dlse)
        dlse = static_cast<const T*>(
            task.dlse)[token * task.dlse_token_stride + head * task.dlse_head_stride];
      sees = sees && lse != -static_cast<T>(__builtin_inff());
    }
    if (!sees) {
      for (int64_t x = 0; x < dim_qk; x++) q[x] = T{0};
      for (int64_t x = 0; x < dim_v; x++) dout[x] = T{0};
      grad->dlogsum[w] = dlse;
      continue;
    }
    CopyRow(WholeRow(a.q, a.q_dtype, token * a.q_token_stride + head * a.q_head_stride,
                     a.head_dim_qk, q),
            dim_qk, q, finite);
    const T* from =
        WholeRow(task.dout, a.q_dtype,
                 token * task.dout_token_stride + head * task.dout_head_stride, a.head_dim_v, dout);
    const T* out =
        WholeRow(task.out, a.q_dtype, token * task.out_token_stride + head * task.out_head_stride,
                 a.head_dim_v, work.row);
    grad->dlogsum[w] = dlse - CopyRowDot(from, out, dim_v, dout, finite);
    grad->lse[w] = static_cast<T>(static_cast<double>(lse) * kLog4E);
  }
  const T factor = static_cast<T>(a.scale * (a.softcap > 0 ? 1.0 / a.softcap : kLog4E));
  for (int w = 0; w < kPanel<T>; w += kLanes<T>) {
    const T *q[kLanes<T>], *dout[kLanes<T>];
    for (int i = 0; i < kLanes<T>; i++) {
      q[i] = grad->q + (w + i) * dim_qk;
      dout[i] = grad->dout + (w + i) * dim_v;
    }
    RowsToPanel(q, dim_qk, factor, panel->qt + w, kPanel<T>);
    RowsToPanel(dout, dim_v, T{1}, grad->dout_t + w, kPanel<T>);
  }
  for (int64_t x = 0; x < dim_qk * kPanel<T>; x += kLanes<T>)
    hn::Store(hn::Zero(d), d, grad->dq_t + x);
  grad->finite = hn::AllTrue(d, hn::Eq(finite, hn::Zero(d)));
}

// Carves the scratch and prepares the panels; returns their number.
template <class T>
HWY_INLINE int StartGradients(const BackwardTask& task, BackwardWork<T>* work, Panel<T>* panels) {
  const AttentionTask& a = task.attention;
  char* at = static_cast<char*>(a.scratch);
  BackwardWork<T>::layout(a.head_dim_qk, a.head_dim_v, work, panels, [&](int64_t n) HWY_ATTR {
    T* p = reinterpret_cast<T*>(at);
    at += RoundUp(n * static_cast<int64_t>(sizeof(T)), kAlignment);
    return p;
  });
  if (a.softcap > 0) work->base.capped_slope = work->capped_slope;
  for (int w = 0; w < kPanel<T>; w++) work->zeros[w] = T{0}, work->ones[w] = T{1};
  int n = 0;
  for (int64_t row = 0; row < a.n_rows; row += kPanel<T>, n++) {
    panels[n].first_row = a.row_begin + row;
    panels[n].n_rows = static_cast<int>(HWY_MIN(a.n_rows - row, static_cast<int64_t>(kPanel<T>)));
    FindLanes(a, &panels[n]);
  }
  for (int p = 0; p < n; p++) {
    FindKeys(a, &panels[p]);
    PackGradients(task, *work, p + 1 < n ? &panels[p + 1] : nullptr, &panels[p], &work->grads[p]);
  }
  return n;
}

// dq of a panel and what its rows leave for sinks, slopes and the scale.
template <class T>
HWY_INLINE void StoreGradients(const BackwardTask& task, const BackwardWork<T>& work,
                               const Panel<T>& panel, const GradPanel<T>& grad) {
  const AttentionTask& a = task.attention;
  const int64_t first = panel.first_row - a.row_begin, dim = a.head_dim_qk;
  const int64_t stride = RowElements<T>(dim);
  for (int w = 0; w < panel.n_rows; w++) {
    if (task.dlogsum) task.dlogsum[first + w] = grad.dlogsum[w];
    if (task.dslope) task.dslope[first + w] = grad.dslope[w];
  }
  if (task.dscale) {
    for (int w = 0; w < panel.n_rows; w += kLanes<T>) {
      T* rows[kLanes<T>];
      for (int i = 0; i < kLanes<T>; i++) rows[i] = work.base.rows + i * stride;
      PanelToRows(grad.dq_t + w, kPanel<T>, work.ones, dim, rows);
      for (int i = 0; i < HWY_MIN(kLanes<T>, panel.n_rows - w); i++) {
        T sum = T{0};
        for (int64_t x = 0; x < dim; x++) sum += rows[i][x] * grad.q[(w + i) * stride + x];
        task.dscale[first + w + i] = sum;
      }
    }
  }
  if (!task.dq) return;
  T* factor = work.base.max;
  for (int w = 0; w < kPanel<T>; w++) factor[w] = static_cast<T>(a.scale);
  StoreRows(grad.dq_t, factor, dim, panel.n_rows, a.q_dtype, work.base.rows, stride,
            [&](int lane) HWY_ATTR {
              return Advance(task.dq, a.q_dtype,
                             panel.token[lane] * task.dq_token_stride +
                                 panel.head[lane] * task.dq_head_stride);
            });
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::kernels
HWY_AFTER_NAMESPACE();

#endif  // toggle
