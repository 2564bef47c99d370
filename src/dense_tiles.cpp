// SPDX-License-Identifier: Apache-2.0
// Tier: plan. See dense_tiles.h.
#include "dense_tiles.h"

#include <algorithm>
#include <cstring>

#include "call.h"
#include "checked_sizes.h"
#include "kernels/kernels.h"
#include "mask_terms.h"

namespace qkv {
namespace {

using kernels::kDenseTileKeys;
using kernels::kDenseTileTokens;

// Below this the kernel looks at the elements itself: reading them is a small share of a small call.
constexpr int64_t kMinElements = 1 << 16;
// Elements that are worth a task of their own (about 100 us).
constexpr int64_t kElementsPerTask = 1 << 20;

// Elements by their bits, so that a row is two or-reductions, which every compiler turns into vectors.
template <class T, T kMinusInfinity>
struct FloatBits {
  using Bits = T;
  static Bits not_hidden(Bits x) { return x ^ kMinusInfinity; }       // 0 for -inf
  static Bits not_zero(Bits x) { return static_cast<Bits>(x << 1); }  // 0 for 0 and -0
};
struct BooleanBits {
  using Bits = uint8_t;
  static Bits not_hidden(Bits x) { return x; }
  static Bits not_zero(Bits x) { return x == 0 ? 1 : 0; }
};

template <class Element>
uint8_t bits_of(const void* data, int64_t offset, int64_t stride, int64_t n) {
  using Bits = typename Element::Bits;
  const char* row = static_cast<const char*>(data) + offset * static_cast<int64_t>(sizeof(Bits));
  const int64_t step = stride * static_cast<int64_t>(sizeof(Bits));
  Bits not_hidden = 0, not_zero = 0;
  for (int64_t j = 0; j < n; ++j) {
    Bits x;
    std::memcpy(&x, row + (stride == 1 ? j * static_cast<int64_t>(sizeof(Bits)) : j * step),
                sizeof(Bits));
    not_hidden |= Element::not_hidden(x);
    not_zero |= Element::not_zero(x);
  }
  return static_cast<uint8_t>((not_hidden ? DenseTiles::kSomeVisible : 0) |
                              (not_zero ? DenseTiles::kSomeNotZero : 0));
}

uint8_t bits_of(const ConstTensor& t, int64_t offset, int64_t stride, int64_t n) {
  switch (t.dtype) {
    case DType::f64:
      return bits_of<FloatBits<uint64_t, 0xFFF0000000000000>>(t.data, offset, stride, n);
    case DType::bf16:
      return bits_of<FloatBits<uint16_t, 0xFF80>>(t.data, offset, stride, n);
    case DType::f16:
      return bits_of<FloatBits<uint16_t, 0xFC00>>(t.data, offset, stride, n);
    case DType::boolean:
      return bits_of<BooleanBits>(t.data, offset, stride, n);
    default:
      return bits_of<FloatBits<uint32_t, 0xFF800000>>(t.data, offset, stride, n);
  }
}

// Extents of the array on the axes of the scores; 1 where it is repeated.
struct Extents {
  int64_t batch, heads, n_q, n_kv;
};
Extents extents_of(const ConstTensor& t) {
  const auto extent = [&](int axis, int64_t stride) { return stride == 0 ? 1 : t.shape[axis]; };
  const ScoreStrides s = score_strides(t);
  Extents e{1, 1, 1, 1};
  if (t.rank >= 1) e.n_kv = extent(t.rank - 1, s.key);
  if (t.rank >= 2) e.n_q = extent(t.rank - 2, s.query);
  if (t.rank == 3) e.batch = extent(0, s.batch);
  if (t.rank == 4) e.batch = extent(0, s.batch), e.heads = extent(1, s.head);
  return e;
}

}  // namespace

DenseTiles make_dense_tiles(const ConstTensor& dense, const AttentionOptions& options) {
  const Extents e = extents_of(dense);
  const ScoreStrides strides = score_strides(dense);
  DenseTiles result;
  const int64_t rows = divide_up(e.n_q, kDenseTileTokens),
                columns = divide_up(e.n_kv, kDenseTileKeys);
  result.key_stride = e.n_kv > 1 ? 1 : 0;
  result.token_stride = e.n_q > 1 ? columns : 0;
  result.head_stride = e.heads > 1 ? rows * columns : 0;
  result.batch_stride = e.batch > 1 ? e.heads * rows * columns : 0;
  result.bits.assign(static_cast<size_t>(e.batch * e.heads * rows * columns), 0);

  // A task is some rows of tiles, counted over all planes.
  struct Work {
    const ConstTensor& dense;
    const Extents e;
    const ScoreStrides strides;
    const int64_t rows, columns;
    int64_t rows_per_task;
    uint8_t* bits;
    static void run(void* self, int64_t task) {
      const Work& w = *static_cast<Work*>(self);
      const int64_t all = w.e.batch * w.e.heads * w.rows;
      for (int64_t r = task * w.rows_per_task; r < std::min(all, (task + 1) * w.rows_per_task);
           ++r) {
        const int64_t plane = r / w.rows, first = r % w.rows * kDenseTileTokens;
        for (int64_t i = first; i < std::min(first + kDenseTileTokens, w.e.n_q); ++i) {
          for (int64_t c = 0; c < w.columns; ++c) {
            const int64_t j = c * kDenseTileKeys;
            const int64_t offset = w.strides.offset(plane / w.e.heads, plane % w.e.heads, i, j);
            w.bits[r * w.columns + c] |= bits_of(w.dense, offset, w.strides.key,
                                                 std::min<int64_t>(kDenseTileKeys, w.e.n_kv - j));
          }
        }
      }
    }
  };
  const int64_t row_elements = std::max<int64_t>(kDenseTileTokens * e.n_kv, 1);
  Work work{dense,
            e,
            strides,
            rows,
            columns,
            std::max<int64_t>(1, kElementsPerTask / row_elements),
            result.bits.data()};
  const int64_t tasks = divide_up(e.batch * e.heads * rows, work.rows_per_task);
  const int threads = options.num_threads ? options.num_threads : default_num_threads();
  if (tasks <= 1 || (threads <= 1 && !options.executor)) {
    for (int64_t t = 0; t < tasks; ++t) Work::run(&work, t);
  } else {
    Executor& executor = options.executor ? *options.executor : default_executor();
    executor.run(tasks, threads, &Work::run, &work);
  }
  return result;
}

bool wants_dense_tiles(const ConstTensor& dense, const MaskShape& shape) {
  const Extents e = extents_of(dense);
  if (shape.n_q < kDenseTileTokens || e.n_q * e.n_kv < kMinElements) return false;
  // A floating-point array that no two heads share costs as much to read here as in the kernel.
  return dense.dtype == DType::boolean || e.batch * e.heads * 2 <= shape.batch * shape.num_heads;
}

Mask Mask::prepared() const {
  if (!has_dense()) return *this;
  std::vector<Term> terms(this->terms().begin(), this->terms().end());
  for (Term& term : terms) {
    if (term.kind == Term::Kind::dense && !term.tiles)
      term.tiles = std::make_shared<const DenseTiles>(make_dense_tiles(term.dense, {}));
  }
  Mask mask;
  mask.terms_ = std::make_shared<const std::vector<Term>>(std::move(terms));
  return mask;
}

}  // namespace qkv
