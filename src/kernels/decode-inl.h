// SPDX-License-Identifier: Apache-2.0
// Tier: kernel (compiled once per Highway target). Called through the kernel table by the schedule.
// Attention with the head dim in the SIMD lanes, for a few query rows: all of them share one pass over K and V, in blocks
// of kBlock keys at absolute multiples. Contract: AttentionTask in kernels.h.
//
//   s[row][key]  = q k^T                 decode_rows-inl.h
//   s[row][key]  = masks, bias ...       decode_scores-inl.h
//   p[row][key]  = 4^(s - reference)
//   out[row][d] += p v                   decode_rows-inl.h
#if defined(QKV_KERNELS_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_KERNELS_DECODE_INL_H_
#undef QKV_KERNELS_DECODE_INL_H_
#else
#define QKV_KERNELS_DECODE_INL_H_
#endif

#include "kernels/decode_rows-inl.h"
#include "kernels/decode_scores-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::kernels {
namespace HWY_NAMESPACE {

// Rows of a task: from here on a panel of queries in the lanes is faster.
inline constexpr int kDecodeRows = 13;
// Products are written four at a time.
inline constexpr int kScoreStride = kBlock + 16;

struct DecodePiece {
  const void* k;
  const void* v;
  int64_t k_stride, v_stride;
  int begin, end;  // keys, relative to the block
};

// The state of one task; arrays are carved from AttentionTask::scratch.
template <class T>
struct DecodeWork {
  int rows;
  DecodeRow<T> row[kDecodeRows];
  T* q;    // [row][head_dim_qk], scaled, padded with zeros
  T* s;    // [row][kScoreStride]
  T* out;  // [row][head_dim_v], unnormalised
  T* sum;  // [row][lane]
  T* bias;
  T *k, *v;  // a converted block, where the target cannot convert in registers
  int64_t q_stride, out_stride;
  int n_pieces;
  DecodePiece piece[kBlock];

  template <class Take>
  static void layout(int64_t head_dim_qk, int64_t head_dim_v, DecodeWork* work, Take take) {
    work->q_stride = RoundUp(head_dim_qk, kLanes<T>);
    work->out_stride = RoundUp(head_dim_v, kLanes<T>);
    work->s = take(kDecodeRows * kScoreStride);
    work->sum = take(kDecodeRows * kLanes<T>);
    work->bias = take(kScoreStride);
    work->q = take(kDecodeRows * work->q_stride);
    work->out = take(kDecodeRows * work->out_stride);
    if constexpr (!QKV_HAS_F16 && sizeof(T) == 4) {
      work->k = take(kBlock * work->q_stride);
      work->v = take(kBlock * work->out_stride);
    }
  }
};

template <class T>
int64_t DecodeScratchBytes(int64_t head_dim_qk, int64_t head_dim_v) {
  DecodeWork<T> work;
  int64_t total = 0;
  DecodeWork<T>::layout(head_dim_qk, head_dim_v, &work, [&](int64_t n) HWY_ATTR {
    total += RoundUp(n * static_cast<int64_t>(sizeof(T)), kAlignment);
    return static_cast<T*>(nullptr);
  });
  return total;
}

// Carves the scratch, scales the queries and sets the states; returns the keys that some row needs.
template <class T>
HWY_INLINE RowRange StartDecode(const AttentionTask& task, DecodeWork<T>* work) {
  const Tag<T> d;
  char* at = static_cast<char*>(task.scratch);
  DecodeWork<T>::layout(task.head_dim_qk, task.head_dim_v, work, [&](int64_t n) HWY_ATTR {
    T* p = reinterpret_cast<T*>(at);
    at += RoundUp(n * static_cast<int64_t>(sizeof(T)), kAlignment);
    return p;
  });
  work->rows = static_cast<int>(task.n_rows);
  const T factor = static_cast<T>(task.scale * (task.softcap > 0 ? 1.0 / task.softcap : kLog4E));
  const int64_t base = task.group_size == 1 ? task.row_begin : task.row_begin / task.group_size;
  int64_t token = base, head = task.row_begin - base * task.group_size;
  RowRange needed = {task.kv_end, task.kv_begin};
  for (int r = 0; r < work->rows; r++) {
    DecodeRow<T>* row = &work->row[r];
    row->token = token, row->head = head;
    row->lo = task.kv_begin, row->hi = task.kv_end;
    if (task.ranges) {
      row->lo = HWY_MAX(row->lo, task.ranges[token - base].lo);
      row->hi = HWY_MIN(row->hi, task.ranges[token - base].hi);
    }
    if (row->lo < row->hi) needed = {HWY_MIN(needed.lo, row->lo), HWY_MAX(needed.hi, row->hi)};
    row->reference = 0;
    row->limit = -static_cast<T>(__builtin_inff());

    T* q = work->q + r * work->q_stride;
    T* out = work->out + r * work->out_stride;
    if (work->q_stride != task.head_dim_qk)
      hn::Store(hn::Zero(d), d, q + work->q_stride - kLanes<T>);
    const int64_t offset = token * task.q_token_stride + head * task.q_head_stride;
    LoadRow(Advance(task.q, task.q_dtype, offset), task.q_dtype, task.head_dim_qk, factor, q);
    for (int64_t x = 0; x < work->out_stride; x += kLanes<T>) hn::Store(hn::Zero(d), d, out + x);
    T* sum = work->sum + r * kLanes<T>;
    hn::Store(hn::Zero(d), d, sum);
    if (task.sinks) {  // a sink is an initial state: its logit is in the sum before the first key
      const T logit = static_cast<T>(task.sinks[head] * kLog4E);
      if (logit != -static_cast<T>(__builtin_inff())) {
        row->reference = logit;
        row->limit = logit + static_cast<T>(kRaiseAbove);
        sum[0] = T{1};
      }
    }
    if (++head == task.group_size) head = 0, token++;
  }
  return needed;
}

// The stored rows of the keys [from, to) of the block at k0.
template <class T>
HWY_INLINE void FindPieces(const AttentionTask& task, int64_t k0, int from, int to,
                           DecodeWork<T>* work) {
  int64_t low = 0,
          high = task.n_segments;  // the last segment that begins at or before the first key
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (task.segments[middle].begin <= k0 + from ? low : high) = middle;
  }
  work->n_pieces = 0;
  for (int key = from; key < to; low++) {
    const KvSegment& segment = task.segments[low];
    const int64_t skip = k0 + key - segment.begin;
    const int end =
        static_cast<int>(HWY_MIN(segment.count - skip, static_cast<int64_t>(to - key))) + key;
    DecodePiece* piece = &work->piece[work->n_pieces++];
    *piece = {Advance(segment.k, task.kv_dtype, skip * task.k_row_stride),
              Advance(segment.v, task.kv_dtype, skip * task.v_row_stride),
              task.k_row_stride,
              task.v_row_stride,
              key,
              end};
    key = end;
  }
}

// Converts the pieces into the arithmetic type.
template <class T>
HWY_NOINLINE void ConvertPieces(const AttentionTask& task, DecodeWork<T>* work) {
  for (int i = 0; i < work->n_pieces; i++) {
    DecodePiece* piece = &work->piece[i];
    T* k = work->k + piece->begin * work->q_stride;
    T* v = work->v + piece->begin * work->out_stride;
    for (int64_t x = 0; x < piece->end - piece->begin; x++) {
      LoadRow(Advance(piece->k, task.kv_dtype, x * piece->k_stride), task.kv_dtype,
              task.head_dim_qk, T{1}, k + x * work->q_stride);
      LoadRow(Advance(piece->v, task.kv_dtype, x * piece->v_stride), task.kv_dtype, task.head_dim_v,
              T{1}, v + x * work->out_stride);
    }
    piece->k = k, piece->v = v;
    piece->k_stride = work->q_stride, piece->v_stride = work->out_stride;
  }
}

// Scores of all rows in one block. Returns true if some row must not see some of these keys.
template <class T, class KV, bool kConvert>
HWY_INLINE bool DecodeScores(const AttentionTask& task, const KeySpan<T>& span, bool dense,
                             DecodeWork<T>* work) {
  FindPieces(task, span.k0, span.from, span.to, work);
  if constexpr (kConvert) ConvertPieces(task, work);
  for (int i = 0; i < work->n_pieces; i++) {
    const DecodePiece& piece = work->piece[i];
    Dot(static_cast<const KV*>(piece.k), piece.k_stride, task.head_dim_qk, work->q, work->q_stride,
        work->rows, work->s + piece.begin, kScoreStride, piece.end - piece.begin);
  }
  bool masked = dense || task.q_ids;
  for (int r = 0; r < work->rows; r++) {
    const DecodeRow<T>& row = work->row[r];
    FinishRow(task, row, span, dense, work->bias, work->s + r * kScoreStride);
    masked |= row.lo > span.k0 + span.from || row.hi < span.k0 + span.to;
  }
  return masked;
}

template <class T, class KV>
HWY_INLINE bool RowIsFinite(const KV* v, int64_t dim) {  // x * 0 is not 0 for NaN and Inf
  const Tag<T> d;
  const Vec<T> zero = hn::Zero(d);
  Vec<T> sum = zero;
  int64_t x = 0;
  for (; x + kLanes<T> <= dim; x += kLanes<T>) sum = hn::MulAdd(LoadKv(v + x), zero, sum);
  if (x < dim) sum = hn::MulAdd(LoadKvTail<T>(v + x, static_cast<int>(dim - x)), zero, sum);
  return hn::AllTrue(d, hn::Eq(sum, zero));
}

// The second product where some rows must not see some keys: runs of keys that cannot do harm go to all rows together; a
// value row with NaN or Inf goes, one by one, to the rows that see it.
template <class T, class KV>
HWY_NOINLINE void AddMasked(const AttentionTask& task, const DecodeWork<T>& work,
                            const DecodePiece& piece) {
  const KV* v = static_cast<const KV*>(piece.v);
  const auto hidden = [&](int r, int x)
                          HWY_ATTR { return __builtin_signbit(work.s[r * kScoreStride + x]) != 0; };
  const auto add = [&](int first_row, int rows, int begin, int end) HWY_ATTR {
    Add(v + (begin - piece.begin) * piece.v_stride, piece.v_stride, task.head_dim_v,
        work.s + first_row * kScoreStride + begin, kScoreStride, rows,
        work.out + first_row * work.out_stride, work.out_stride, end - begin);
  };
  int begin = piece.begin;
  for (int x = piece.begin; x < piece.end; x++) {
    bool any = false;
    for (int r = 0; r < work.rows; r++) any |= hidden(r, x);
    if (!any || RowIsFinite<T>(v + (x - piece.begin) * piece.v_stride, task.head_dim_v)) continue;
    if (begin < x) add(0, work.rows, begin, x);
    for (int r = 0; r < work.rows; r++) {
      if (!hidden(r, x)) add(r, 1, x, x + 1);
    }
    begin = x + 1;
  }
  if (begin < piece.end) add(0, work.rows, begin, piece.end);
}

template <class T, class KV, bool kConvert>
HWY_INLINE void DecodeBlock(const AttentionTask& task, const KeySpan<T>& span,
                            DecodeWork<T>* work) {
  const DenseUse use =
      UseOfDense(task, work->row[0].token, work->row[work->rows - 1].token, span.k0 / kBlock);
  if (use == DenseUse::hidden) return;
  const bool masked = DecodeScores<T, KV, kConvert>(task, span, use == DenseUse::some, work);
  for (int r = 0; r < work->rows; r++) {
    DecodeRow<T>* row = &work->row[r];
    T* s = work->s + r * kScoreStride;
    T* sum = work->sum + r * kLanes<T>;
    const T mx = MaxOfRow(span, s);
    if (HWY_UNLIKELY(mx > row->limit)) {
      RaiseRow(mx, row, sum, work->out + r * work->out_stride, task.head_dim_v);
    }
    if (masked) {
      ExpRow<T, true>(span, row->reference, s, sum);
    } else {
      ExpRow<T, false>(span, row->reference, s, sum);
    }
    if (task.dropout > 0) DropRow(task, *row, span, s);
  }
  for (int i = 0; i < work->n_pieces; i++) {
    const DecodePiece& piece = work->piece[i];
    if (HWY_UNLIKELY(masked)) {
      AddMasked<T, KV>(task, *work, piece);
    } else {
      Add(static_cast<const KV*>(piece.v), piece.v_stride, task.head_dim_v, work->s + piece.begin,
          kScoreStride, work->rows, work->out, work->out_stride, piece.end - piece.begin);
    }
  }
}

// Writes the rows of a task, and their state.
template <class T>
HWY_INLINE void StoreDecode(const AttentionTask& task, const DecodeWork<T>& work) {
  const Tag<T> d;
  for (int r = 0; r < work.rows; r++) {
    const DecodeRow<T>& row = work.row[r];
    T* out = work.out + r * work.out_stride;
    const T l = SumOfLanes(hn::Load(d, work.sum + r * kLanes<T>));
    if (task.state_m)
      static_cast<T*>(task.state_m)[r] = row.reference, static_cast<T*>(task.state_l)[r] = l;
    if (!task.out) continue;
    if (task.unnormalised) {
      LoadRow(out, sizeof(T) == 4 ? DType::f32 : DType::f64, task.head_dim_v, T{1},
              static_cast<T*>(task.out) + r * task.head_dim_v);
      continue;
    }
    const T factor = l == 0 ? T{0} : 1 / l;
    void* to = Advance(task.out, task.out_dtype,
                       row.token * task.out_token_stride + row.head * task.out_head_stride);
    if (task.out_dtype == (sizeof(T) == 4 ? DType::f32 : DType::f64)) {
      ScaleRow(out, task.head_dim_v, factor, static_cast<T*>(to));
    } else {
      for (int64_t x = 0; x < work.out_stride; x += kLanes<T>) {
        hn::Store(hn::Mul(hn::Load(d, out + x), hn::Set(d, factor)), d, out + x);
      }
      StoreRow(out, task.out_dtype, task.head_dim_v, to);
    }
  }
}

// Calls f(element type of K and V in registers, whether blocks are converted first).
template <class T, class F>
HWY_INLINE void WithKv(DType dtype, F f) {
  if constexpr (sizeof(T) == 8) {
    f(T{}, std::false_type());
  } else {
    if (dtype == DType::f32) return f(float{}, std::false_type());
    if (dtype == DType::bf16) return f(bf16_t{}, std::false_type());
#if QKV_HAS_F16
    f(f16_t{}, std::false_type());
#else
    f(float{}, std::true_type());
#endif
  }
}

template <class T>
void Decode(const AttentionTask& task) {
  DecodeWork<T> work;
  const RowRange needed = StartDecode(task, &work);
  WithKv<T>(task.kv_dtype, [&](auto kv, auto convert) HWY_ATTR {
    for (int64_t k0 = needed.lo / kBlock * kBlock; k0 < needed.hi; k0 += kBlock) {
      const KeySpan<T> span = {k0, Within(needed.lo - k0), Within(needed.hi - k0)};
      DecodeBlock<T, decltype(kv), convert>(task, span, &work);
    }
  });
  StoreDecode(task, work);
}

// The softmax weights of the rows of a task, from the state that Decode left.
template <class T>
void DecodeWeights(const AttentionTask& task) {
  const Tag<T> d;
  DecodeWork<T> work;
  const RowRange needed = StartDecode(task, &work);
  const T* m = static_cast<const T*>(task.state_m);
  const T* l = static_cast<const T*>(task.state_l);
  const auto at = [&](int r) HWY_ATTR {
    return static_cast<T*>(task.weights) + work.row[r].token * task.weights_token_stride +
           work.row[r].head * task.weights_head_stride;
  };
  WithKv<T>(task.kv_dtype, [&](auto kv, auto convert) HWY_ATTR {
    for (int64_t k0 = 0; k0 < task.n_weights; k0 += kBlock) {
      const int n = Within(task.n_weights - k0);
      KeySpan<T> span = {k0, Within(needed.lo - k0), Within(needed.hi - k0)};
      const DenseUse use =
          UseOfDense(task, work.row[0].token, work.row[work.rows - 1].token, k0 / kBlock);
      if (span.from >= span.to || use == DenseUse::hidden) {
        span.from = span.to = 0;
      } else {
        DecodeScores<T, decltype(kv), convert>(task, span, use == DenseUse::some, &work);
      }
      for (int r = 0; r < work.rows; r++) {
        T* s = work.s + r * kScoreStride;
        const Vec<T> factor = hn::Set(d, l[r] == 0 ? T{0} : 1 / l[r]), reference = hn::Set(d, m[r]);
        EachVector(span, s, [&](Vec<T> score, int) HWY_ATTR {  // hidden: 0, even if the sum is NaN
          const auto hidden = hn::Eq(score, NegativeInfinity<T>());
          return hn::IfThenZeroElse(hidden, hn::Mul(Exp4(hn::Sub(score, reference)), factor));
        });
        T* row = at(r) + k0;
        for (int x = 0; x < span.from; x++) row[x] = 0;
        for (int x = span.from; x < span.to; x++) row[x] = s[x];
        for (int x = span.to; x < n; x++) row[x] = 0;
      }
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::kernels
HWY_AFTER_NAMESPACE();

#endif  // toggle
