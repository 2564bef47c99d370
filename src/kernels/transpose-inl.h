// SPDX-License-Identifier: Apache-2.0
// Tier: kernel (compiled once per Highway target). Square transposes in registers, between natural rows and panels.
#if defined(QKV_KERNELS_TRANSPOSE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_KERNELS_TRANSPOSE_INL_H_
#undef QKV_KERNELS_TRANSPOSE_INL_H_
#else
#define QKV_KERNELS_TRANSPOSE_INL_H_
#endif

#include "kernels/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::kernels {
namespace HWY_NAMESPACE {

// store(x, {row(0)[x], row(1)[x], ...}) for x < kLanes, where row(i) is a vector. Two steps: transposes inside the 128-bit
// blocks of kInBlock rows, then transposes of whole blocks. Full vectors in and out: storing single blocks is limited by
// one store per cycle.
template <class T, class Row, class Store>
HWY_INLINE void Transpose(Row row, Store store) {
  constexpr int kL = kLanes<T>;
  Vec<T> r[kL];
  Each<kL>([&](auto i) HWY_ATTR { r[i] = row(i); });
#if HWY_TARGET == HWY_SCALAR
  store(std::integral_constant<int, 0>(), r[0]);
#else
  const Tag<T> d;
  constexpr int kInBlock = 16 / static_cast<int>(sizeof(T)), kBlocks = kL / kInBlock;
  Each<kBlocks>([&](auto g) HWY_ATTR {
    constexpr int k = g * kInBlock;
    if constexpr (kInBlock == 4) {
      const Vec<T> a = hn::InterleaveLower(d, r[k], r[k + 2]),
                   b = hn::InterleaveUpper(d, r[k], r[k + 2]);
      const Vec<T> c = hn::InterleaveLower(d, r[k + 1], r[k + 3]),
                   e = hn::InterleaveUpper(d, r[k + 1], r[k + 3]);
      r[k] = hn::InterleaveLower(d, a, c), r[k + 1] = hn::InterleaveUpper(d, a, c);
      r[k + 2] = hn::InterleaveLower(d, b, e), r[k + 3] = hn::InterleaveUpper(d, b, e);
    } else {
      const Vec<T> a = hn::InterleaveLower(d, r[k], r[k + 1]);
      r[k + 1] = hn::InterleaveUpper(d, r[k], r[k + 1]);
      r[k] = a;
    }
  });
  Each<kInBlock>([&](auto i) HWY_ATTR {
    constexpr int k = i;
    if constexpr (kBlocks == 1) {
      store(i, r[k]);
    } else if constexpr (kBlocks == 2) {
      store(i, hn::ConcatLowerLower(d, r[k + kInBlock], r[k]));
      store(std::integral_constant<int, k + kInBlock>(),
            hn::ConcatUpperUpper(d, r[k + kInBlock], r[k]));
    } else {
      const auto quad = [&](auto first, Vec<T> ac, Vec<T> be) HWY_ATTR {
        store(first, hn::OddEvenBlocks(hn::SwapAdjacentBlocks(be), ac));
        store(std::integral_constant<int, first + kInBlock>(),
              hn::OddEvenBlocks(be, hn::SwapAdjacentBlocks(ac)));
      };
      const Vec<T> a = r[k], b = r[k + kInBlock], c = r[k + 2 * kInBlock], e = r[k + 3 * kInBlock];
      quad(i, hn::ConcatLowerLower(d, c, a), hn::ConcatLowerLower(d, e, b));
      quad(std::integral_constant<int, k + 2 * kInBlock>(), hn::ConcatUpperUpper(d, c, a),
           hn::ConcatUpperUpper(d, e, b));
    }
  });
#endif
}

// panel[x * stride + lane] = rows[lane][x] * factor for x < n rounded up to kLanes: rows are read, and the panel written,
// to whole vectors.
template <class T>
HWY_NOINLINE void RowsToPanel(const T* const* rows, int64_t n, T factor, T* HWY_RESTRICT panel,
                              int64_t stride) {
  const Tag<T> d;
  const Vec<T> f = hn::Set(d, factor);
  for (int64_t x = 0; x < n; x += kLanes<T>) {
    T* to = panel + x * stride;
    Transpose<T>([&](auto i) HWY_ATTR { return hn::Mul(hn::LoadU(d, rows[i] + x), f); },
                 [&](auto i, Vec<T> v) HWY_ATTR { hn::Store(v, d, to + i * stride); });
  }
}

// rows[lane][x] = panel[x * stride + lane] * factor[lane] for x < n rounded up to kLanes.
template <class T>
HWY_NOINLINE void PanelToRows(const T* HWY_RESTRICT panel, int64_t stride,
                              const T* HWY_RESTRICT factor, int64_t n, T* const* rows) {
  const Tag<T> d;
  const Vec<T> f = hn::Load(d, factor);
  for (int64_t x = 0; x < n; x += kLanes<T>) {
    const T* from = panel + x * stride;
    Transpose<T>([&](auto i) HWY_ATTR { return hn::Mul(hn::Load(d, from + i * stride), f); },
                 [&](auto i, Vec<T> v) HWY_ATTR { hn::StoreU(v, d, rows[i] + x); });
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::kernels
HWY_AFTER_NAMESPACE();

#endif  // toggle
