// SPDX-License-Identifier: Apache-2.0
// Tier: kernel (compiled once per Highway target). Called by linear-inl.h: a few rows of x times
// one panel of packed weights, or several panels side by side, for one chunk of k.
#if defined(QKV_KERNELS_LINEAR_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_KERNELS_LINEAR_ROWS_INL_H_
#undef QKV_KERNELS_LINEAR_ROWS_INL_H_
#else
#define QKV_KERNELS_LINEAR_ROWS_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::kernels {
namespace HWY_NAMESPACE {

// Rows and vectors of a tile. Not those of attention on AVX2: widths are multiples of 16 far more
// often than of 24, and 6 x 2 runs at the same rate as 4 x 3.
#if HWY_TARGET <= HWY_AVX3
inline constexpr int kLinearRows = 8, kLinearVectors = 2;
#elif HWY_TARGET == HWY_SCALAR
inline constexpr int kLinearRows = 4, kLinearVectors = 4;
#elif HWY_ARCH_X86
inline constexpr int kLinearRows = 6, kLinearVectors = 2;
#else
inline constexpr int kLinearRows = 8, kLinearVectors = 2;
#endif
inline constexpr int64_t kLinearColumns = kLinearVectors * kLanes<float>;

// Most vectors of columns that a tile of rows has: the panels that few rows take side by side.
inline constexpr int kLinearMaxVectors = 4 * kLinearVectors;

/// A tile of rows on one panel (or some panels side by side) and one chunk of k.
struct LinearStrip {
  const float* x;
  int64_t x_stride;
  const float* w;
  int64_t panel_floats;  // from one panel to the next
  int64_t k;
  // What is added to the sums: the bias (stride 0), or what y holds of the earlier chunks.
  const float* add;
  int64_t add_stride;
  float* y;
  int64_t y_stride;
  int64_t add_at[kLinearMaxVectors];  // where each vector of columns lies in a row
  int64_t y_at[kLinearMaxVectors];
  // Two streams of cache lines to ask for, and how far they advance per step of k.
  const float* ahead[2];
  int64_t ahead_step;

  HWY_INLINE void next_rows(int64_t rows) {
    x += rows * x_stride;
    add += rows * add_stride;
    y += rows * y_stride;
  }
};

// Adds what was there before and stores: the epilogue of a tile of kVectors vectors.
template <int kVectors>
struct LinearStore {
  const float* add[kVectors];
  float* y[kVectors];
  int64_t add_stride, y_stride;

  HWY_INLINE explicit LinearStore(const LinearStrip& s)
      : add_stride(s.add_stride), y_stride(s.y_stride) {
    Each<kVectors>([&](auto j) HWY_ATTR {
      add[j] = s.add + s.add_at[j];
      y[j] = s.y + s.y_at[j];
    });
  }
  HWY_INLINE void operator()(int i, int j, Vec<float> sum) const {
    const Tag<float> d;
    hn::StoreU(hn::Add(sum, hn::LoadU(d, add[j] + i * add_stride)), d, y[j] + i * y_stride);
  }
};

template <int kRows, int kVectors>
HWY_NOINLINE void LinearRows(const LinearStrip& s) {
  const Tag<float> d;
  Tile<float, kRows, kVectors, true>(
      s.x, static_cast<size_t>(s.x_stride), s.w, kVectors * kLanes<float>, static_cast<size_t>(s.k),
      [&](auto, auto) HWY_ATTR { return hn::Zero(d); }, LinearStore<kVectors>(s));
}

// The same with cache lines asked for on the way.
template <int kRows>
HWY_NOINLINE void LinearRowsAhead(const LinearStrip& s) {
  const Tag<float> d;
  const int64_t step = s.ahead_step;
  const float* ahead0 = s.ahead[0];
  const float* ahead1 = s.ahead[1];
  const LinearStore<kLinearVectors> store(s);
  Each<kRows>([&](auto i) HWY_ATTR {
    hwy::Prefetch(store.y[0] + i * s.y_stride);
    hwy::Prefetch(store.y[kLinearVectors - 1] + i * s.y_stride);
  });
  Tile<float, kRows, kLinearVectors, true>(
      s.x, static_cast<size_t>(s.x_stride), s.w, static_cast<size_t>(kLinearColumns),
      static_cast<size_t>(s.k), [&](auto, auto) HWY_ATTR { return hn::Zero(d); }, store,
      [&]() HWY_ATTR {
        hwy::Prefetch(ahead0);
        hwy::Prefetch(ahead1);
        ahead0 += step;
        ahead1 += step;
      });
}

// Few rows need several panels side by side for enough independent sums (8 hide the latency of the
// FMA). The panel vectors are not pinned: one row uses each of them once, as an operand in memory.
template <int kRows, int kPanels>
HWY_NOINLINE void LinearWide(const LinearStrip& s) {
  const Tag<float> d;
  const float* HWY_RESTRICT x = s.x;
  const float* HWY_RESTRICT w = s.w;
  const int64_t x_stride = s.x_stride, panel_floats = s.panel_floats;
  Vec<float> acc[kRows][kPanels][kLinearVectors];
  Each<kRows>([&](auto i) HWY_ATTR {
    Each<kPanels>([&](auto p) HWY_ATTR {
      Each<kLinearVectors>([&](auto j) HWY_ATTR { acc[i][p][j] = hn::Zero(d); });
    });
  });
  for (int64_t u = 0; u < s.k; ++u) {
    Vec<float> broadcast[kRows];
    Each<kRows>([&](auto i) HWY_ATTR { broadcast[i] = hn::Set(d, x[i * x_stride + u]); });
    Each<kPanels>([&](auto p) HWY_ATTR {
      Each<kLinearVectors>([&](auto j) HWY_ATTR {
        const Vec<float> panel = hn::Load(d, w + p * panel_floats + j * kLanes<float>);
        Each<kRows>([&](auto i)
                        HWY_ATTR { acc[i][p][j] = hn::MulAdd(broadcast[i], panel, acc[i][p][j]); });
      });
    });
    w += kLinearColumns;
  }
  Each<kRows>([&](auto i) HWY_ATTR {
    Each<kPanels>([&](auto p) HWY_ATTR {
      Each<kLinearVectors>([&](auto j) HWY_ATTR {
        constexpr int kVector = p * kLinearVectors + j;
        const Vec<float> before = hn::LoadU(d, s.add + i * s.add_stride + s.add_at[kVector]);
        hn::StoreU(hn::Add(acc[i][p][j], before), d, s.y + i * s.y_stride + s.y_at[kVector]);
      });
    });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::kernels
HWY_AFTER_NAMESPACE();

#endif  // toggle
