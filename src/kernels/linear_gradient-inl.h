// SPDX-License-Identifier: Apache-2.0
// Tier: kernel (compiled once per Highway target). Gradients of the parameters of a projection:
// dw = dy^T x on the register tile, columns of x in the lanes, columns of dy broadcast.
//
// The rows are cut into chunks of equal length that depend on their number alone. Of each chunk, x
// is packed into panels of kLinearColumns columns and dy into strips of kLinearRows columns, so that
// both meet the tile in one piece; each chunk is summed from zero in the order of the rows, and the
// chunks are added in order.
#if defined(QKV_KERNELS_LINEAR_GRADIENT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_KERNELS_LINEAR_GRADIENT_INL_H_
#undef QKV_KERNELS_LINEAR_GRADIENT_INL_H_
#else
#define QKV_KERNELS_LINEAR_GRADIENT_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/kernels.h"
#include "kernels/linear_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::kernels {
namespace HWY_NAMESPACE {

// Longest chunk of rows: a panel of x (24 KB of AVX-512) stays in the L1 cache while the strips pass.
inline constexpr int64_t kGradientChunk = 192;
// Columns of dy of a task: their strips (576 KB) stay in the L2 cache while the panels pass, and x is
// read once. 1024 rows, 768 x 768 on Zen 5: 0.79 of the FMA peak with 256 and chunks of 256, 0.81 with
// 512, 0.88 with 768 and chunks of 192.
inline constexpr int64_t kGradientBlock = 768;
inline constexpr int64_t kPanelFloats = kGradientChunk * kLinearColumns;
// One cache line between strips: the pieces of one row of dy do not meet in one set.
inline constexpr int64_t kStripFloats = kGradientChunk * kLinearRows + 64 / sizeof(float);
inline constexpr int64_t kGradientStrips = (kGradientBlock + kLinearRows - 1) / kLinearRows;
inline constexpr int64_t kGradientScratchBytes =
    (kPanelFloats + kGradientStrips * kStripFloats) * 4;

/// Walks rows in order, over the groups.
struct GradientRows {
  const float* at;
  int64_t row_stride, group_jump, row, group_rows;

  HWY_INLINE GradientRows(const float* data, int64_t group_stride, int64_t stride,
                          int64_t per_group, int64_t first)
      : at(data + first / per_group * group_stride + first % per_group * stride),
        row_stride(stride),
        group_jump(group_stride - per_group * stride),
        row(first % per_group),
        group_rows(per_group) {}
  HWY_INLINE void next() {
    at += row_stride;
    if (++row == group_rows) row = 0, at += group_jump;
  }
};

HWY_INLINE GradientRows DyRows(const LinearGradientTask& t, int64_t first) {
  return GradientRows(t.dy, t.dy_group_stride, t.dy_row_stride, t.group_rows, first);
}
HWY_INLINE GradientRows XRows(const LinearGradientTask& t, int64_t first) {
  return GradientRows(t.x, t.x_group_stride, t.x_row_stride, t.group_rows, first);
}

// The first n numbers at p, zeros behind.
HWY_INLINE Vec<float> LoadSome(const float* p, int64_t n) {
  HWY_ALIGN float lanes[kLanes<float>];
  for (int64_t i = 0; i < kLanes<float>; ++i) lanes[i] = i < n ? p[i] : 0.0f;
  return hn::Load(Tag<float>(), lanes);
}

// Columns of dy, kLinearRows to a strip, zeros behind the last.
HWY_NOINLINE void PackStrips(const LinearGradientTask& t, int64_t first, int64_t rows,
                             float* HWY_RESTRICT strips) {
  const int64_t columns = t.n_end - t.n_begin, full = columns / kLinearRows;
  GradientRows from = DyRows(t, first);
  for (int64_t r = 0; r < rows; ++r, from.next()) {
    const float* HWY_RESTRICT row = from.at + t.n_begin;
    float* HWY_RESTRICT to = strips + r * kLinearRows;
    for (int64_t s = 0; s < full; ++s)
      __builtin_memcpy(to + s * kStripFloats, row + s * kLinearRows, kLinearRows * sizeof(float));
    if (full * kLinearRows < columns) {
      for (int64_t j = 0; j < kLinearRows; ++j) {
        const int64_t column = full * kLinearRows + j;
        to[full * kStripFloats + j] = column < columns ? row[column] : 0.0f;
      }
    }
  }
}

// The panel of x from column u on, zeros behind the last column. False if one is NaN or Inf.
HWY_NOINLINE bool PackPanel(const LinearGradientTask& t, int64_t first, int64_t rows, int64_t u,
                            float* HWY_RESTRICT panel) {
  const Tag<float> d;
  const int64_t columns = HWY_MIN(kLinearColumns, t.k_end - u);
  const Vec<float> zero = hn::Zero(d);
  Vec<float> not_finite = zero;  // x * 0 is not 0 for NaN and Inf
  GradientRows from = XRows(t, first);
  if (columns == kLinearColumns) {
    for (int64_t r = 0; r < rows; ++r, from.next(), panel += kLinearColumns) {
      Each<kLinearVectors>([&](auto j) HWY_ATTR {
        const Vec<float> v = hn::LoadU(d, from.at + u + j * kLanes<float>);
        not_finite = hn::MulAdd(v, zero, not_finite);
        hn::Store(v, d, panel + j * kLanes<float>);
      });
    }
  } else {
    for (int64_t r = 0; r < rows; ++r, from.next(), panel += kLinearColumns) {
      for (int64_t c = 0; c < kLinearColumns; ++c) panel[c] = c < columns ? from.at[u + c] : 0.0f;
      for (int64_t c = 0; c < kLinearColumns; c += kLanes<float>)
        not_finite = hn::MulAdd(hn::Load(d, panel + c), zero, not_finite);
    }
  }
  return hn::AllTrue(d, hn::Eq(not_finite, zero));
}

// Rows of a panel that are not finite, and whose row of dy is all zero, become zeros.
HWY_NOINLINE void HideRows(const LinearGradientTask& t, int64_t first, int64_t rows, float* panel) {
  GradientRows dy = DyRows(t, first);
  for (int64_t r = 0; r < rows; ++r, dy.next(), panel += kLinearColumns) {
    bool is_finite = true, is_hidden = true;
    for (int64_t c = 0; c < kLinearColumns; ++c) is_finite = is_finite && panel[c] * 0.0f == 0.0f;
    if (is_finite) continue;
    for (int64_t j = 0; j < t.n; ++j) is_hidden = is_hidden && dy.at[j] == 0.0f;
    if (!is_hidden) continue;
    for (int64_t c = 0; c < kLinearColumns; ++c) panel[c] = 0.0f;
  }
}

/// One tile of dw.
struct GradientTile {
  const float* strip;
  const float* panel;
  int64_t rows;
  float* dw;
  int64_t dw_stride;
  bool adds;
};

HWY_NOINLINE void GradientRun(const GradientTile& g) {
  const Tag<float> d;
  float* HWY_RESTRICT dw = g.dw;
  const int64_t stride = g.dw_stride;
  if (g.adds) {
    Each<kLinearRows>([&](auto i) HWY_ATTR {
      hwy::Prefetch(dw + i * stride);
      hwy::Prefetch(dw + i * stride + kLinearColumns - 1);
    });
  }
  const auto before = g.adds ? hn::FirstN(d, static_cast<size_t>(kLanes<float>)) : hn::FirstN(d, 0);
  Tile<float, kLinearRows, kLinearVectors, false>(
      g.strip, kLinearRows, g.panel, static_cast<size_t>(kLinearColumns),
      static_cast<size_t>(g.rows), [&](auto, auto) HWY_ATTR { return hn::Zero(d); },
      [&](auto i, auto j, Vec<float> sum) HWY_ATTR {
        float* to = dw + i * stride + j * kLanes<float>;
        hn::StoreU(hn::Add(sum, hn::IfThenElseZero(before, hn::LoadU(d, to))), d, to);
      });
}

// A tile at an edge, through memory of our own.
HWY_NOINLINE void GradientEdge(const GradientTile& g, int64_t tile_rows, int64_t tile_columns) {
  HWY_ALIGN float tile[kLinearRows * kLinearColumns];
  GradientTile own = g;
  own.dw = tile, own.dw_stride = kLinearColumns;
  for (int64_t i = 0; i < kLinearRows; ++i) {
    for (int64_t u = 0; u < kLinearColumns; ++u) {
      const bool is_there = g.adds && i < tile_rows && u < tile_columns;
      tile[i * kLinearColumns + u] = is_there ? g.dw[i * g.dw_stride + u] : 0.0f;
    }
  }
  GradientRun(own);
  for (int64_t i = 0; i < tile_rows; ++i) {
    for (int64_t u = 0; u < tile_columns; ++u)
      g.dw[i * g.dw_stride + u] = tile[i * kLinearColumns + u];
  }
}

// Sums of 4 vectors of columns of dy from column j, or of the `left` columns that exist.
HWY_INLINE void ColumnSums(const LinearGradientTask& t, int64_t first, int64_t rows, int64_t j,
                           int64_t left, bool adds) {
  constexpr int kVectors = 4;
  constexpr int64_t kColumns = kVectors * kLanes<float>;
  const Tag<float> d;
  HWY_ALIGN float sums[kColumns];
  GradientRows from = DyRows(t, first);
  if (left >= kColumns) {
    Vec<float> sum[kVectors];
    Each<kVectors>([&](auto v) HWY_ATTR { sum[v] = hn::Zero(d); });
    for (int64_t r = 0; r < rows; ++r, from.next()) {
      const float* row = from.at + j;
      Each<kVectors>([&](auto v) HWY_ATTR {
        sum[v] = hn::Add(sum[v], hn::LoadU(d, row + v * kLanes<float>));
      });
    }
    Each<kVectors>([&](auto v) HWY_ATTR { hn::Store(sum[v], d, sums + v * kLanes<float>); });
    left = kColumns;
  } else {
    for (float& sum : sums) sum = 0;
    for (int64_t r = 0; r < rows; ++r, from.next()) {
      for (int64_t c = 0; c < left; ++c) sums[c] += from.at[j + c];
    }
  }
  for (int64_t c = 0; c < left; ++c) t.dbias[j + c] = sums[c] + (adds ? t.dbias[j + c] : 0.0f);
}

HWY_NOINLINE void AddBias(const LinearGradientTask& t, int64_t first, int64_t rows, bool adds) {
  for (int64_t j = t.n_begin; j < t.n_end; j += 4 * kLanes<float>)
    ColumnSums(t, first, rows, j, t.n_end - j, adds);
}

HWY_INLINE void GradientChunk(const LinearGradientTask& t, int64_t first, int64_t rows, bool adds) {
  float* panel = static_cast<float*>(t.scratch);
  float* strips = panel + kPanelFloats;
  PackStrips(t, first, rows, strips);
  GradientTile g;
  g.panel = panel, g.rows = rows, g.dw_stride = t.dw_stride, g.adds = adds;
  for (int64_t u = t.k_begin; u < t.k_end; u += kLinearColumns) {
    if (!PackPanel(t, first, rows, u, panel)) HideRows(t, first, rows, panel);
    for (int64_t j = t.n_begin, s = 0; j < t.n_end; j += kLinearRows, ++s) {
      g.strip = strips + s * kStripFloats;
      g.dw = t.dw + j * t.dw_stride + u;
      if (j + kLinearRows <= t.n_end && u + kLinearColumns <= t.k_end) {
        GradientRun(g);
      } else {
        GradientEdge(g, HWY_MIN(int64_t{kLinearRows}, t.n_end - j),
                     HWY_MIN(kLinearColumns, t.k_end - u));
      }
    }
  }
}

// No rows: sums of nothing.
HWY_INLINE void NoRows(const LinearGradientTask& t) {
  if (t.dw != nullptr && !t.adds) {
    for (int64_t j = t.n_begin; j < t.n_end; ++j) {
      for (int64_t u = t.k_begin; u < t.k_end; ++u) t.dw[j * t.dw_stride + u] = 0.0f;
    }
  }
  if (t.dbias != nullptr && !t.adds) {
    for (int64_t j = t.n_begin; j < t.n_end; ++j) t.dbias[j] = 0.0f;
  }
}

void LinearGradient(const LinearGradientTask& t) {
  const int64_t rows = t.groups * t.group_rows;
  if (rows == 0) return NoRows(t);
  const int64_t chunks = (rows + kGradientChunk - 1) / kGradientChunk;
  const int64_t chunk = ((rows + chunks - 1) / chunks + 15) / 16 * 16;
  for (int64_t first = 0; first < rows; first += chunk) {
    const int64_t count = HWY_MIN(chunk, rows - first);
    if (t.dw != nullptr) GradientChunk(t, first, count, first > 0 || t.adds);
    if (t.dbias != nullptr) AddBias(t, first, count, first > 0 || t.adds);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::kernels
HWY_AFTER_NAMESPACE();

#endif  // toggle
