// SPDX-License-Identifier: Apache-2.0
// Tier: kernel (compiled once per Highway target). Dense masks and biases: a tile of every term,
// transposed to [key][lane], summed, in log4 units. A table of tiles (kernels.h) says which tiles
// need no look at all.
#if defined(QKV_KERNELS_DENSE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_KERNELS_DENSE_INL_H_
#undef QKV_KERNELS_DENSE_INL_H_
#else
#define QKV_KERNELS_DENSE_INL_H_
#endif

#include "kernels/convert-inl.h"
#include "kernels/softmax-inl.h"
#include "kernels/spans-inl.h"
#include "kernels/transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::kernels {
namespace HWY_NAMESPACE {

static_assert(kBlock == kDenseTileKeys, "a tile of the table is one key block");

enum class DenseUse { none, some, hidden };

// Bits of one term for the tokens [first, last] (any head of the group) and a key block.
HWY_INLINE int TermBits(const DenseTerm& term, int64_t group_size, int64_t first, int64_t last,
                        int64_t block) {
  if (!term.tiles) return 3;
  int bits = 0;
  const int64_t heads = term.tiles_head_stride ? group_size : 1;
  for (int64_t t = first / kDenseTileTokens; t <= last / kDenseTileTokens; t++) {
    for (int64_t h = 0; h < heads; h++) {
      bits |= term.tiles[t * term.tiles_token_stride + h * term.tiles_head_stride +
                         block * term.tiles_key_stride];
    }
  }
  return bits;
}

HWY_INLINE DenseUse UseOfDense(const AttentionTask& task, int64_t first, int64_t last,
                               int64_t block) {
  DenseUse use = DenseUse::none;
  for (int64_t i = 0; i < task.n_dense; i++) {
    const int bits = TermBits(task.dense[i], task.group_size, first, last, block);
    if ((bits & 1) == 0) return DenseUse::hidden;
    if (bits & 2) use = DenseUse::some;
  }
  return use;
}

template <class T, class Element, class Value>
HWY_INLINE void DenseElements(const Element* HWY_RESTRICT from, int64_t stride, int n,
                              T* HWY_RESTRICT to, Value value) {
  if (stride == 1) {
    for (int x = 0; x < n; x++) to[x] = value(from[x]);
  } else {
    for (int x = 0; x < n; x++) to[x] = value(from[x * stride]);
  }
}

// n elements of a term, in log4 units.
template <class T>
HWY_INLINE void DenseRow(const DenseTerm& term, int64_t offset, int n, T* HWY_RESTRICT to) {
  const void* from = Advance(term.data, term.dtype, offset);
  const int64_t stride = term.key_stride;
  const T hidden = -static_cast<T>(__builtin_inff());
  const T factor = static_cast<T>(kLog4E);
  switch (term.dtype) {
    case DType::boolean:
      return DenseElements(static_cast<const uint8_t*>(from), stride, n, to,
                           [=](uint8_t x) HWY_ATTR { return x ? T{0} : hidden; });
    case DType::f64:
      return DenseElements(static_cast<const double*>(from), stride, n, to,
                           [=](double x) HWY_ATTR { return static_cast<T>(x * kLog4E); });
    case DType::bf16:
      return DenseElements(static_cast<const bf16_t*>(from), stride, n, to, [=](bf16_t x) HWY_ATTR {
        return static_cast<T>(FloatFromBits(static_cast<uint32_t>(x.bits) << 16)) * factor;
      });
    case DType::f16:
      return DenseElements(static_cast<const f16_t*>(from), stride, n, to,
                           [=](f16_t x) HWY_ATTR { return static_cast<T>(to_float(x)) * factor; });
    default:
      return DenseElements(static_cast<const float*>(from), stride, n, to,
                           [=](float x) HWY_ATTR { return static_cast<T>(x) * factor; });
  }
}

// Sum of all terms for one row: a key hidden by one term stays hidden.
template <class T>
HWY_INLINE void DenseRowOfTask(const AttentionTask& task, int64_t token, int64_t head, int64_t key,
                               int n, T* HWY_RESTRICT row) {
  const T hidden = -static_cast<T>(__builtin_inff());
  for (int64_t i = 0; i < task.n_dense; i++) {
    const DenseTerm& term = task.dense[i];
    const int64_t offset =
        token * term.token_stride + head * term.head_stride + key * term.key_stride;
    if (i == 0) {
      DenseRow(term, offset, n, row);
      continue;
    }
    T more[kBlock];
    DenseRow(term, offset, n, more);
    for (int x = 0; x < n; x++) {
      row[x] = row[x] == hidden || more[x] == hidden ? hidden : row[x] + more[x];
    }
  }
}

// tile[key][lane] = sum of the terms for the keys [begin, end) of the block at k0. rows: kLanes rows
// of row_stride. A single term in the arithmetic type is transposed from where it lies, and its part
// for the next block is fetched: rows of an array are far apart, and the prefetcher does not see them.
template <class T, class PanelT>
HWY_NOINLINE void LoadDense(const AttentionTask& task, const PanelT& panel, int64_t k0, int begin,
                            int end, T* HWY_RESTRICT rows, int64_t row_stride,
                            T* HWY_RESTRICT tile) {
  const DenseTerm& first = task.dense[0];
  const bool in_place = task.n_dense == 1 && first.key_stride == 1 &&
                        first.dtype == (sizeof(T) == 4 ? DType::f32 : DType::f64);
  const int whole = in_place ? (end - begin) / kLanes<T> * kLanes<T> : 0;
  const bool has_next = in_place && k0 + 2 * kBlock <= task.kv_end;
  const T* natural[kLanes<T>];
  for (int w = 0; w < RoundUp(panel.n_rows, kLanes<T>); w += kLanes<T>) {
    if (in_place) {
      for (int r = 0; r < kLanes<T>; r++) {
        natural[r] = static_cast<const T*>(first.data) + panel.token[w + r] * first.token_stride +
                     panel.head[w + r] * first.head_stride + k0 + begin;
        if (has_next) PrefetchRow(natural[r] - begin + kBlock, kBlock);
      }
      RowsToPanel(natural, whole, static_cast<T>(kLog4E), tile + begin * kPanel<T> + w, kPanel<T>);
    }
    const int rest = end - begin - whole;
    if (rest == 0) continue;
    for (int r = 0; r < kLanes<T>; r++) {
      T* row = rows + r * row_stride;
      DenseRowOfTask(task, panel.token[w + r], panel.head[w + r], k0 + begin + whole, rest, row);
      natural[r] = row;
    }
    RowsToPanel(natural, rest, T{1}, tile + (begin + whole) * kPanel<T> + w, kPanel<T>);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::kernels
HWY_AFTER_NAMESPACE();

#endif  // toggle
