// SPDX-License-Identifier: Apache-2.0
// Tier: kernel (compiled once per Highway target). Dense masks and biases: a tile of every term,
// transposed to [key][lane], summed, in log2 units. A table of tiles (kernels.h) says which tiles
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

// n elements of a term, in log2 units.
template <class T>
HWY_INLINE void DenseRow(const DenseTerm& term, int64_t offset, int n, T* HWY_RESTRICT to) {
  const void* from = Advance(term.data, term.dtype, offset);
  const int64_t stride = term.key_stride;
  const T hidden = -static_cast<T>(__builtin_inff());
  const T factor = static_cast<T>(kLog2E);
  switch (term.dtype) {
    case DType::boolean:
      return DenseElements(static_cast<const uint8_t*>(from), stride, n, to,
                           [=](uint8_t x) HWY_ATTR { return x ? T{0} : hidden; });
    case DType::f64:
      return DenseElements(static_cast<const double*>(from), stride, n, to,
                           [=](double x) HWY_ATTR { return static_cast<T>(x * kLog2E); });
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

// tile[key][lane] = sum of the terms for the keys [begin, end) of the block at k0. rows: 4 rows of
// kBlock.
template <class T, class PanelT>
HWY_NOINLINE void LoadDense(const AttentionTask& task, const PanelT& panel, int64_t k0, int begin,
                            int end, T* HWY_RESTRICT rows, int64_t row_stride,
                            T* HWY_RESTRICT tile) {
  const T hidden = -static_cast<T>(__builtin_inff());
  const int n = end - begin;
  const T* natural[kLanes<T>];
  for (int w = 0; w < kPanel<T>; w += kLanes<T>) {
    for (int64_t i = 0; i < task.n_dense; i++) {
      const DenseTerm& term = task.dense[i];
      for (int r = 0; r < kLanes<T>; r++) {
        const int64_t offset = panel.token[w + r] * term.token_stride +
                               panel.head[w + r] * term.head_stride +
                               (k0 + begin) * term.key_stride;
        DenseRow(term, offset, n, rows + r * row_stride);
        natural[r] = rows + r * row_stride;
      }
      if (i == 0) {
        RowsToPanel(natural, n, T{1}, tile + begin * kPanel<T> + w, kPanel<T>);
        continue;
      }
      for (int x = 0; x < n; x++) {  // a key hidden by one term stays hidden
        for (int r = 0; r < kLanes<T>; r++) {
          T* sum = tile + (begin + x) * kPanel<T> + w + r;
          if (natural[r][x] == hidden) {
            *sum = hidden;
          } else if (*sum != hidden) {
            *sum += natural[r][x];
          }
        }
      }
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::kernels
HWY_AFTER_NAMESPACE();

#endif  // toggle
