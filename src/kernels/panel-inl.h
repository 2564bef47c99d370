// SPDX-License-Identifier: Apache-2.0
// Tier: kernel (compiled once per Highway target). The operands of prefill: panels of query rows
// (transposed, scaled, with their running state), blocks of keys (in place, or converted once for
// all panels of the task), and the way out.
#if defined(QKV_KERNELS_PANEL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_KERNELS_PANEL_INL_H_
#undef QKV_KERNELS_PANEL_INL_H_
#else
#define QKV_KERNELS_PANEL_INL_H_
#endif

#include "kernels/convert-inl.h"
#include "kernels/dense-inl.h"
#include "kernels/softmax-inl.h"
#include "kernels/spans-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::kernels {
namespace HWY_NAMESPACE {

// Panels of a task: a block of K and V stays in L2 for all of them.
inline constexpr int kMaxPanels = 4;

// The largest weights of a row are kept in vectors up to this number, one vector for the n-th of every
// lane. n_kv 2048, of the forward: 8 in vectors 0.3, in a heap for each lane 0.9; 64 in heaps 7.
inline constexpr int64_t kTopVectors = 64;

// A key relative to a block, moved into it.
HWY_INLINE int Within(int64_t key) {
  return static_cast<int>(key < 0 ? 0 : key > kBlock ? kBlock : key);
}

template <class T>
struct KeyPiece {
  const T* k;
  const T* v;
  int64_t k_stride, v_stride;
  int begin, end;  // keys, relative to the block
};

template <class T>
struct KeyBlock {
  int64_t begin;
  int n_pieces;
  KeyPiece<T> piece[kBlock];
};

// f(piece, first key, number of keys) for the runs of keys [begin, end) that lie in one piece.
template <class T, class F>
HWY_INLINE void ForPieces(const KeyBlock<T>& block, int begin, int end, F f) {
  for (int i = 0; i < block.n_pieces; i++) {
    const KeyPiece<T>& piece = block.piece[i];
    const int from = HWY_MAX(begin, piece.begin), to = HWY_MIN(end, piece.end);
    if (from < to) f(piece, from, to - from);
  }
}

template <class T>
struct Panel {
  static constexpr int kW = kPanel<T>;
  T* qt;  // [head_dim_qk][lane], times scale and log4(e)
  PanelState<T> state;
  T* entropy;  // weights only, as the next two: lane vector
  T* top;      // [kTopVectors][lane], falling
  LaneInt<T>* top_keys;
  int64_t first_row;  // of the (batch, KV head)
  int n_rows = 0;
  bool has_out;        // state.out holds the sums of the keys so far
  int64_t begin, end;  // keys that some row needs
  VectorKeys keys[kTileVectors];
  int64_t lo[kW], hi[kW];

  // Token and head of each lane; lanes without a row repeat the last row.
  int64_t token[kW];
  int64_t head[kW];

  void clear_out(int64_t head_dim_v) {
    const Tag<T> d;
    for (int64_t at = 0; at < head_dim_v * kW; at += kLanes<T>)
      hn::Store(hn::Zero(d), d, state.out + at);
    has_out = true;
  }
  void find_spans(const AttentionTask& task, int64_t k0, int from, int to, SpanList* spans) const {
    const DenseUse use = UseOfDense(task, token[0], token[n_rows - 1], k0 / kBlock);
    spans->n = 0;
    spans->dense = use == DenseUse::some;
    if (use != DenseUse::hidden) FindSpans(keys, k0, from, to, spans);
  }
  // Visible keys of each lane relative to the block, as lane vectors.
  void relative_ranges(int64_t k0, T* HWY_RESTRICT lo_out, T* HWY_RESTRICT hi_out) const {
    for (int w = 0; w < kW; w++) {
      lo_out[w] = static_cast<T>(Within(lo[w] - k0));
      hi_out[w] = static_cast<T>(Within(hi[w] - k0));
    }
  }
};

// The scratch of one task, carved from AttentionTask::scratch.
template <class T>
struct PanelWork {
  static constexpr int kW = kPanel<T>;
  T *s, *dense, *seen;                           // [kBlock][lane]
  T *max, *unused, *lo, *hi, *slope, *position;  // lane vectors
  LaneInt<T>* q_ids;
  T* rows;   // kLanes rows of max(head_dim_qk, head_dim_v, kBlock)
  T *k, *v;  // converted block
  int64_t k_stride, v_stride;
  T* capped_slope = nullptr;  // see ScoreSteps

  // One formula for size and layout: take(n) hands out n elements.
  template <class Take>
  static void layout(int64_t head_dim_qk, int64_t head_dim_v, PanelWork* work, Panel<T>* panels,
                     Take take) {
    const int64_t dim_qk = RoundUp(head_dim_qk, kLanes<T>);
    const int64_t dim_v = RoundUp(head_dim_v, kLanes<T>);
    work->s = take(kBlock * kW), work->dense = take((kBlock + kLanes<T>)*kW),
    work->seen = take(kBlock * kW);
    work->max = take(kW), work->unused = take(kW), work->lo = take(kW), work->hi = take(kW);
    work->slope = take(kW), work->position = take(kW);
    work->q_ids = reinterpret_cast<LaneInt<T>*>(take(kW));
    work->rows = take(kLanes<T> * HWY_MAX(HWY_MAX(dim_qk, dim_v), kBlock));
    work->k_stride = dim_qk, work->v_stride = dim_v;
    work->k = take(kBlock * dim_qk), work->v = take(kBlock * dim_v);
    for (int p = 0; p < kMaxPanels; p++) {
      panels[p].qt = take(dim_qk * kW), panels[p].state.out = take(dim_v * kW);
      panels[p].state.reference = take(kW), panels[p].state.sum = take(kW),
      panels[p].state.threshold = take(kW);
      panels[p].entropy = take(kW), panels[p].top = take(kTopVectors * kW);
      panels[p].top_keys = reinterpret_cast<LaneInt<T>*>(take(kTopVectors * kW));
    }
  }
};

template <class T>
int64_t PanelScratchBytes(int64_t head_dim_qk, int64_t head_dim_v) {
  PanelWork<T> work;
  Panel<T> panels[kMaxPanels];
  int64_t total = 0;
  PanelWork<T>::layout(head_dim_qk, head_dim_v, &work, panels, [&](int64_t n) HWY_ATTR {
    total += RoundUp(n * static_cast<int64_t>(sizeof(T)), kAlignment);
    return static_cast<T*>(nullptr);
  });
  return total;
}

// Token and head of each lane, without a division per lane.
template <class T>
HWY_INLINE void FindLanes(const AttentionTask& task, Panel<T>* panel) {
  int64_t token = panel->first_row / task.group_size, head = panel->first_row % task.group_size;
  for (int w = 0; w < kPanel<T>; w++) {
    panel->token[w] = token, panel->head[w] = head;
    if (w + 1 >= panel->n_rows) continue;
    if (++head == task.group_size) head = 0, token++;
  }
}

// Visible keys of the lanes and vectors of a panel.
template <class T>
HWY_INLINE void FindKeys(const AttentionTask& task, Panel<T>* panel) {
  const int64_t base = task.row_begin / task.group_size;
  if (!task.ranges) {  // every row sees every key
    panel->begin = task.kv_begin, panel->end = task.kv_end;
    for (int v = 0; v < kTileVectors; v++) {
      const int64_t end = v * kLanes<T> < panel->n_rows ? task.kv_end : task.kv_begin;
      panel->keys[v] = {task.kv_begin, end, task.kv_begin, end};
    }
    return;
  }
  panel->begin = task.kv_end;
  panel->end = task.kv_begin;
  for (int v = 0; v < kTileVectors; v++) {
    VectorKeys keys = {task.kv_end, task.kv_begin, task.kv_begin, task.kv_end};
    bool any_empty = false;
    for (int w = v * kLanes<T>; w < (v + 1) * kLanes<T>; w++) {
      const RowRange range = task.ranges[panel->token[w] - base];
      const int64_t lo = HWY_MAX(task.kv_begin, range.lo), hi = HWY_MIN(task.kv_end, range.hi);
      panel->lo[w] = lo, panel->hi[w] = hi;
      if (lo < hi) {
        keys.begin = HWY_MIN(keys.begin, lo), keys.end = HWY_MAX(keys.end, hi);
        keys.full_begin = HWY_MAX(keys.full_begin, lo), keys.full_end = HWY_MIN(keys.full_end, hi);
      } else {
        any_empty = true;
      }
    }
    if (v * kLanes<T> >= panel->n_rows || keys.begin >= keys.end) {
      keys = {task.kv_begin, task.kv_begin, task.kv_end, task.kv_begin};
    } else {
      // Needed keys begin, and masked keys begin and end, at whole tiles; behind the last needed key
      // nothing is read, it may be a slot that was never written.
      keys.begin = HWY_MAX(keys.begin / kTileRows * kTileRows, task.kv_begin);
      if (keys.full_begin > task.kv_begin)
        keys.full_begin = HWY_MIN(RoundUp(keys.full_begin, kTileRows), task.kv_end);
      if (keys.full_end < task.kv_end)
        keys.full_end = HWY_MAX(keys.full_end / kTileRows * kTileRows, task.kv_begin);
      if (any_empty) keys.full_begin = task.kv_end, keys.full_end = task.kv_begin;
      panel->begin = HWY_MIN(panel->begin, keys.begin), panel->end = HWY_MAX(panel->end, keys.end);
    }
    panel->keys[v] = keys;
  }
}

// A sink is an initial state: its logit is in the sum before the first key.
template <class T>
HWY_INLINE void StartState(const AttentionTask& task, Panel<T>* panel) {
  const Tag<T> d;
  const PanelState<T>& state = panel->state;
  for (int w = 0; w < kPanel<T>; w += kLanes<T>) {
    hn::Store(hn::Zero(d), d, state.reference + w);
    hn::Store(hn::Zero(d), d, state.sum + w);
    hn::Store(NegativeInfinity<T>(), d, state.threshold + w);
  }
  panel->has_out = false;
  if (!task.sinks) return;
  for (int w = 0; w < kPanel<T>; w++)
    state.sum[w] = static_cast<T>(task.sinks[panel->head[w]] * kLog4E);
  for (int w = 0; w < kPanel<T>; w += kLanes<T>) {
    const Vec<T> logit = hn::Load(d, state.sum + w);
    const auto present = hn::Not(hn::Eq(logit, NegativeInfinity<T>()));
    const Vec<T> reference = hn::IfThenElseZero(present, logit);
    hn::Store(reference, d, state.reference + w);
    hn::Store(hn::IfThenElseZero(present, hn::Set(d, T{1})), d, state.sum + w);
    hn::Store(hn::IfThenElse(present, hn::Add(reference, hn::Set(d, static_cast<T>(kRaiseAbove))),
                             NegativeInfinity<T>()),
              d, state.threshold + w);
  }
}

// Steps of the scores of a panel at the block k0.
template <class T>
HWY_INLINE void FillSteps(const AttentionTask& task, const PanelWork<T>& work,
                          const Panel<T>& panel, int64_t k0, ScoreSteps<T>* steps) {
  if (task.softcap > 0) {
    steps->softcap = static_cast<T>(task.softcap * kLog4E);
    steps->capped_slope = work.capped_slope;
  }
  if (task.alibi_slopes) {
    for (int w = 0; w < kPanel<T>; w++) {
      work.slope[w] = static_cast<T>(task.alibi_slopes[panel.head[w]] * kLog4E);
      work.position[w] = static_cast<T>(task.first_position + panel.token[w] - k0);
    }
    steps->slope = work.slope;
    steps->position = work.position;
  }
  if (task.q_ids) {
    for (int w = 0; w < kPanel<T>; w++) work.q_ids[w] = task.q_ids[panel.token[w]];
    steps->q_ids = work.q_ids;
    steps->kv_ids = task.kv_ids + k0;
  }
}

// Keys [first, last) of the block at k0: in place if they are stored in the arithmetic type, else
// converted.
template <class T>
HWY_INLINE void LoadBlock(const AttentionTask& task, const PanelWork<T>& work, int64_t k0,
                          int first, int last, KeyBlock<T>* block) {
  block->begin = k0;
  block->n_pieces = 0;
  const bool in_place = task.kv_dtype == (sizeof(T) == 4 ? DType::f32 : DType::f64);
  int64_t low = 0,
          high = task.n_segments;  // the last segment that begins at or before the first key
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (task.segments[middle].begin <= k0 + first ? low : high) = middle;
  }
  for (int key = first; key < last; low++) {
    const KvSegment& segment = task.segments[low];
    const int64_t skip = k0 + key - segment.begin;
    const int n = static_cast<int>(HWY_MIN(segment.count - skip, static_cast<int64_t>(last - key)));
    const void* k = Advance(segment.k, task.kv_dtype, skip * task.k_row_stride);
    const void* v = Advance(segment.v, task.kv_dtype, skip * task.v_row_stride);
    if (in_place) {
      block->piece[block->n_pieces++] = {static_cast<const T*>(k),
                                         static_cast<const T*>(v),
                                         task.k_row_stride,
                                         task.v_row_stride,
                                         key,
                                         key + n};
    } else {
      for (int i = 0; i < n; i++) {
        LoadRow(Advance(k, task.kv_dtype, i * task.k_row_stride), task.kv_dtype, task.head_dim_qk,
                segment.k_scale ? static_cast<T>(segment.k_scale[skip + i]) : T{1},
                work.k + (key + i) * work.k_stride);
        LoadRow(Advance(v, task.kv_dtype, i * task.v_row_stride), task.kv_dtype, task.head_dim_v,
                segment.v_scale ? static_cast<T>(segment.v_scale[skip + i]) : T{1},
                work.v + (key + i) * work.v_stride);
      }
    }
    key += n;
  }
  if (!in_place) {
    block->piece[0] = {work.k, work.v, work.k_stride, work.v_stride, first, last};
    block->piece[0].k += first * work.k_stride;
    block->piece[0].v += first * work.v_stride;
    block->n_pieces = 1;
  }
}

// False if one of n elements, a multiple of kPanel, is NaN or Inf: x * 0 is not 0 for those.
template <class T>
HWY_NOINLINE bool AllFinite(const T* HWY_RESTRICT x, int64_t n) {
  const Tag<T> d;
  const Vec<T> zero = hn::Zero(d);
  Vec<T> sum[2 * kTileVectors];
  Each<2 * kTileVectors>([&](auto v) HWY_ATTR { sum[v] = zero; });
  int64_t at = 0;
  for (; at + 2 * kPanel<T> <= n; at += 2 * kPanel<T>) {
    Each<2 * kTileVectors>([&](auto v) HWY_ATTR {
      sum[v] = hn::MulAdd(hn::Load(d, x + at + v * kLanes<T>), zero, sum[v]);
    });
  }
  for (; at < n; at += kLanes<T>) sum[0] = hn::MulAdd(hn::Load(d, x + at), zero, sum[0]);
  Each<2 * kTileVectors - 1>([&](auto v) HWY_ATTR { sum[0] = hn::Add(sum[0], sum[v + 1]); });
  return hn::AllTrue(d, hn::Eq(sum[0], zero));
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::kernels
HWY_AFTER_NAMESPACE();

#endif  // toggle
