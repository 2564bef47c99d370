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

// Keys that one round of products takes, in one block; they may lie in several segments.
struct KeyRun {
  const KvSegment* segment;  // of the first key
  int64_t begin;
  int n;  // 0: no more keys
};
// K (or V) of a run fills a third of L1, so that the next one fits beside it.
inline constexpr int64_t kRunBytes = 16 * 1024;
inline constexpr int kMinRun = 16;  // a multiple of the lanes

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
  T *k, *v;  // a converted run, where the target cannot convert in registers
  int64_t q_stride, out_stride;

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

// Walks over the keys of a task, run by run. Runs end at multiples of run_keys whatever the segments
// are, so bits do not depend on how a cache is laid out.
template <class Stored>
class RunWalk {
 public:
  RunWalk(const AttentionTask& task, const RowRange& keys) : next_{}, end_(keys.hi) {
    const int64_t row_bytes =
        HWY_MAX(task.head_dim_qk, task.head_dim_v) * static_cast<int64_t>(sizeof(Stored));
    run_keys_ = kBlock;
    while (run_keys_ > kMinRun && run_keys_ * row_bytes > kRunBytes) run_keys_ /= 2;
    int64_t low = 0, high = task.n_segments;  // the last segment that begins at or before the key
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (task.segments[middle].begin <= keys.lo ? low : high) = middle;
    }
    next_.segment = task.segments + low, next_.begin = keys.lo;
  }
  KeyRun next() {
    const int64_t stop = HWY_MIN((next_.begin / run_keys_ + 1) * run_keys_, end_);
    next_.n = static_cast<int>(HWY_MAX(stop - next_.begin, int64_t{0}));
    const KeyRun run = next_;
    if (run.n == 0) return run;
    next_.begin = stop;
    while (next_.begin < end_ && next_.segment->begin + next_.segment->count <= stop)
      next_.segment++;
    return run;
  }

 private:
  KeyRun next_;
  int64_t end_, run_keys_;
};

// Where the products read keys of a run: in place or converted, in one piece of memory.
template <class KV>
struct RunPiece {
  const KV *k, *v;
  int64_t k_stride, v_stride;
  int from, to;                    // keys, relative to the block
  const float *k_scale, *v_scale;  // of the first row; nullptr: none
};

// f(piece) for the segments that a run lies in.
template <class KV, class F>
HWY_INLINE void ForSegments(const AttentionTask& task, const KeyRun& run, F f) {
  const int first = static_cast<int>(run.begin % kBlock);
  const KvSegment* segment = run.segment;
  for (int x = 0; x < run.n; segment++) {
    const int64_t skip = run.begin + x - segment->begin;
    const int n = static_cast<int>(HWY_MIN(segment->count - skip, static_cast<int64_t>(run.n - x)));
    f(RunPiece<KV>{static_cast<const KV*>(segment->k) + skip * task.k_row_stride,
                   static_cast<const KV*>(segment->v) + skip * task.v_row_stride, task.k_row_stride,
                   task.v_row_stride, first + x, first + x + n,
                   segment->k_scale ? segment->k_scale + skip : nullptr,
                   segment->v_scale ? segment->v_scale + skip : nullptr});
    x += n;
  }
}

// A run in the arithmetic type, at its place in the buffers of a block.
template <class T, class Stored>
HWY_NOINLINE void ConvertRun(const AttentionTask& task, const KeyRun& run, DecodeWork<T>* work) {
  ForSegments<Stored>(task, run, [&](const RunPiece<Stored>& piece) HWY_ATTR {
    for (int x = piece.from; x < piece.to; x++) {
      const int64_t row = x - piece.from;
      LoadRow(piece.k + row * piece.k_stride, task.kv_dtype, task.head_dim_qk, T{1},
              work->k + x * work->q_stride);
      LoadRow(piece.v + row * piece.v_stride, task.kv_dtype, task.head_dim_v, T{1},
              work->v + x * work->out_stride);
    }
  });
}

template <class T, class KV, class Stored, class F>
HWY_INLINE void ForRunPieces(const AttentionTask& task, const KeyRun& run,
                             const DecodeWork<T>& work, F f) {
  if constexpr (sizeof(KV) == sizeof(Stored)) {
    ForSegments<KV>(task, run, f);
  } else {
    const int from = static_cast<int>(run.begin % kBlock);
    f(RunPiece<KV>{work.k + from * work.q_stride, work.v + from * work.out_stride, work.q_stride,
                   work.out_stride, from, from + run.n, nullptr, nullptr});
  }
}

// K of a run, segment by segment: each piece of the run before fetches one.
template <class Stored>
class KeysAhead {
 public:
  KeysAhead(const AttentionTask& task, const KeyRun& run)
      : task_(task), segment_(run.segment), begin_(run.begin), left_(run.n) {}
  Ahead next() {
    if (left_ == 0) return Ahead();
    const int64_t skip = begin_ - segment_->begin, n = HWY_MIN(segment_->count - skip, left_);
    const auto* k = static_cast<const Stored*>(segment_->k) + skip * task_.k_row_stride;
    begin_ += n, left_ -= n, segment_++;
    return AheadOf(k, task_.k_row_stride, task_.head_dim_qk, n);
  }

 private:
  const AttentionTask& task_;
  const KvSegment* segment_;
  int64_t begin_, left_;
};

// s[0, n) *= scale[0, n). A hidden weight, which is -0, stays whatever its scale is.
template <class T>
HWY_NOINLINE void ScaleKeys(const float* HWY_RESTRICT scale, int n, T* HWY_RESTRICT s) {
  if constexpr (sizeof(T) == 4) {
    const Tag<T> d;
    const hn::RebindToUnsigned<Tag<T>> d32;
    int x = 0;
    for (; x + kLanes<T> <= n; x += kLanes<T>) {
      const Vec<T> value = hn::LoadU(d, s + x);
      const auto hidden = hn::Eq(hn::BitCast(d32, value), hn::Set(d32, 0x80000000u));
      const Vec<T> product = hn::Mul(value, hn::LoadU(d, scale + x));
      hn::StoreU(hn::IfThenElse(hn::RebindMask(d, hidden), value, product), d, s + x);
    }
    for (; x < n; x++) {
      if (s[x] != 0 || !__builtin_signbit(s[x])) s[x] *= scale[x];
    }
  }
}

// Scores of all rows against one run; its values may be fetched meanwhile. Returns true if some row must
// not see some of these keys.
template <class T, class KV, class Stored>
HWY_INLINE bool RunScores(const AttentionTask& task, const KeyRun& run, const KeySpan<T>& span,
                          bool dense, bool fetch_values, DecodeWork<T>* work) {
  if constexpr (sizeof(KV) != sizeof(Stored)) ConvertRun<T, Stored>(task, run, work);
  ForRunPieces<T, KV, Stored>(task, run, *work, [&](const RunPiece<KV>& piece) HWY_ATTR {
    const int n = piece.to - piece.from;
    const Ahead values = AheadOf(piece.v, piece.v_stride, task.head_dim_v, fetch_values ? n : 0);
    Dot(piece.k, piece.k_stride, task.head_dim_qk, work->q, work->q_stride, work->rows,
        work->s + piece.from, kScoreStride, n, values);
    for (int r = 0; piece.k_scale && r < work->rows; r++)
      ScaleKeys(piece.k_scale, n, work->s + r * kScoreStride + piece.from);
  });
  bool masked = dense || task.q_ids;
  for (int r = 0; r < work->rows; r++) {
    const DecodeRow<T>& row = work->row[r];
    FinishRow(task, row, span, dense, work->bias, work->s + r * kScoreStride);
    masked |= row.lo > span.k0 + span.from || row.hi < span.k0 + span.to;
  }
  return masked;
}

// s becomes weights; sums and references of all rows.
template <class T>
HWY_INLINE void RunSoftmax(const AttentionTask& task, const KeySpan<T>& span, bool masked,
                           DecodeWork<T>* work) {
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
}

template <class T, class KV>
HWY_INLINE bool RowIsFinite(const KV* v, int64_t dim) {  // x * 0 is not 0 for NaN and Inf
  if constexpr (sizeof(KV) == 1) return true;
  const Tag<T> d;
  const Vec<T> zero = hn::Zero(d);
  Vec<T> sum = zero;
  int64_t x = 0;
  for (; x + kLanes<T> <= dim; x += kLanes<T>) sum = hn::MulAdd(LoadKv(v + x), zero, sum);
  if (x < dim) sum = hn::MulAdd(LoadKvTail<T>(v + x, static_cast<int>(dim - x)), zero, sum);
  return hn::AllTrue(d, hn::Eq(sum, zero));
}

// The second product where some rows must not see some keys: keys that cannot do harm go to all
// rows together; a value row with NaN or Inf goes, one by one, to the rows that see it.
template <class T, class KV>
HWY_NOINLINE void AddMasked(const AttentionTask& task, const RunPiece<KV>& piece,
                            const DecodeWork<T>& work) {
  const auto hidden = [&](int r, int x)
                          HWY_ATTR { return __builtin_signbit(work.s[r * kScoreStride + x]) != 0; };
  const auto value = [&](int x) HWY_ATTR { return piece.v + (x - piece.from) * piece.v_stride; };
  const auto add = [&](int first_row, int n_rows, int begin, int end) HWY_ATTR {
    Add(value(begin), piece.v_stride, task.head_dim_v, work.s + first_row * kScoreStride + begin,
        kScoreStride, n_rows, work.out + first_row * work.out_stride, work.out_stride, end - begin,
        Ahead());
  };
  int begin = piece.from;
  for (int x = piece.from; x < piece.to; x++) {
    bool any = false;
    for (int r = 0; r < work.rows; r++) any |= hidden(r, x);
    if (!any || RowIsFinite<T>(value(x), task.head_dim_v)) continue;
    if (begin < x) add(0, work.rows, begin, x);
    for (int r = 0; r < work.rows; r++) {
      if (!hidden(r, x)) add(r, 1, x, x + 1);
    }
    begin = x + 1;
  }
  if (begin < piece.to) add(0, work.rows, begin, piece.to);
}

template <class T>
HWY_INLINE KeySpan<T> SpanOf(const KeyRun& run) {
  const int from = static_cast<int>(run.begin % kBlock);
  return {run.begin - from, from, from + run.n};
}

template <class T>
HWY_INLINE DenseUse DenseOf(const AttentionTask& task, const DecodeWork<T>& work,
                            const KeySpan<T>& span) {
  return UseOfDense(task, work.row[0].token, work.row[work.rows - 1].token, span.k0 / kBlock);
}

// V of a run is fetched during its first product, K of the next run during its second.
template <class T, class KV, class Stored>
HWY_INLINE void AttendRun(const AttentionTask& task, const KeyRun& run, const KeyRun& next,
                          DecodeWork<T>* work) {
  const KeySpan<T> span = SpanOf<T>(run);
  const DenseUse use = DenseOf(task, *work, span);
  if (use == DenseUse::hidden) return;
  const bool masked = RunScores<T, KV, Stored>(task, run, span, use == DenseUse::some, true, work);
  RunSoftmax(task, span, masked, work);
  KeysAhead<Stored> keys(task, next);
  ForRunPieces<T, KV, Stored>(task, run, *work, [&](const RunPiece<KV>& piece) HWY_ATTR {
    for (int r = 0; piece.v_scale && r < work->rows; r++)
      ScaleKeys(piece.v_scale, piece.to - piece.from, work->s + r * kScoreStride + piece.from);
    if (HWY_UNLIKELY(masked)) return AddMasked(task, piece, *work);
    Add(piece.v, piece.v_stride, task.head_dim_v, work->s + piece.from, kScoreStride, work->rows,
        work->out, work->out_stride, piece.to - piece.from, keys.next());
  });
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

// Calls f(type of K and V in the products, type of K and V in memory).
template <class T, class F>
HWY_INLINE void WithKv(DType dtype, F f) {
  if constexpr (sizeof(T) == 8) {
    f(T{}, T{});
  } else {
    if (dtype == DType::f32) return f(float{}, float{});
    if (dtype == DType::bf16) return f(bf16_t{}, bf16_t{});
    if (dtype == DType::i8) return f(int8_t{}, int8_t{});
#if QKV_HAS_F16
    f(f16_t{}, f16_t{});
#else
    f(float{}, f16_t{});
#endif
  }
}

template <class T>
void Decode(const AttentionTask& task) {
  DecodeWork<T> work;
  const RowRange needed = StartDecode(task, &work);
  WithKv<T>(task.kv_dtype, [&](auto kv, auto stored) HWY_ATTR {
    using Stored = decltype(stored);
    RunWalk<Stored> walk(task, needed);
    for (KeyRun run = walk.next(); run.n;) {
      const KeyRun next = walk.next();
      AttendRun<T, decltype(kv), Stored>(task, run, next, &work);
      run = next;
    }
  });
  StoreDecode(task, work);
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::kernels
HWY_AFTER_NAMESPACE();

#endif  // toggle
