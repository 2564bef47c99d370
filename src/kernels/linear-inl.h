// SPDX-License-Identifier: Apache-2.0
// Tier: kernel (compiled once per Highway target). Projections: y = x w^T + bias on the register
// tile, output columns in the lanes, weights packed once, rows of x broadcast from where they are.
//
// Packed weights: panels of kLinearColumns columns, [panel][k][column]; the last panel is one
// vector wide if that is enough for what remains. The sum over k is cut into chunks of equal length
// that depend on k alone; each chunk is summed from zero in the order of k, and the chunks are
// added in order. So a row's bits depend neither on the rows beside it nor on how the work was
// divided, and the error is that of the short sums. Weights that are not packed become panels on the
// way, one chunk of one panel at a time: the same sums, the same bits.
#if defined(QKV_KERNELS_LINEAR_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_KERNELS_LINEAR_INL_H_
#undef QKV_KERNELS_LINEAR_INL_H_
#else
#define QKV_KERNELS_LINEAR_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <utility>

#include "hwy/highway.h"
#include "kernels/kernels.h"
#include "kernels/linear_rows-inl.h"
#include "kernels/transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::kernels {
namespace HWY_NAMESPACE {

// Longest chunk of k. 256 KB to 512 KB of x stay in the L2 cache while all panels pass (512 x 4096
// x 4096 on Zen 5: 256, 384, 512 and 1024 are within 1 %).
inline constexpr int64_t kLinearChunk = 512;
// Rows of x that a chunk of weights meets before the next one is read.
inline constexpr int64_t kLinearBlockRows = 128;
// Weights of more than this many bytes come from beyond the L2 cache: the next panel is asked for
// while this one is used (512 x 4096 x 4096 on Zen 5: 0.89 -> 0.95 of the FMA peak). Below, the
// extra instructions cost clang 1 %.
inline constexpr int64_t kLinearPrefetchBytes = 1 << 20;
// A single tile of rows reads every weight once: ask for them this many floats ahead. 8 x 4096 x
// 4096 on Zen 5: 0.68 of the read bandwidth without, 0.71 with 1 KB, 0.85 with 4 KB, 0.94 to 1.0
// with 8 to 16 KB.
inline constexpr int64_t kLinearStreamAhead = 2048;

// f(rows as a constant) for rows in [1, kLinearRows].
template <int kRows = kLinearRows, class F>
HWY_INLINE void WithRows(int64_t rows, F f) {
  if constexpr (kRows == 1) {
    f(std::integral_constant<int, 1>());
  } else {
    if (rows == kRows) {
      f(std::integral_constant<int, kRows>());
    } else {
      WithRows<kRows - 1>(rows, f);
    }
  }
}

/// The numbers of one call that every step needs.
struct LinearPlan {
  LinearTask task;
  int64_t chunk;         // steps of k per chunk
  int64_t panels;        // full panels
  int64_t edge_columns;  // columns of the last panel that is not full, or 0
  int64_t edge_width;    // lanes of that panel
};

HWY_INLINE LinearPlan MakeLinearPlan(const LinearTask& task) {
  LinearPlan plan;
  plan.task = task;
  const int64_t chunks = (task.k + kLinearChunk - 1) / kLinearChunk;
  plan.chunk = chunks > 1 ? ((task.k + chunks - 1) / chunks + 15) / 16 * 16 : task.k;
  plan.panels = task.n / kLinearColumns;
  plan.edge_columns = task.n - plan.panels * kLinearColumns;
  plan.edge_width = plan.edge_columns <= kLanes<float> ? kLanes<float> : kLinearColumns;
  return plan;
}

// Where column `column` of the task lies in a row of y.
HWY_INLINE int64_t LinearColumnAt(const LinearTask& t, int64_t column) {
  const int64_t c = t.y_column + column;
  return t.y_block == 0 ? c : c / t.y_block * t.y_block_stride + c % t.y_block;
}

// Rows from `row` on panel `panel` (and those to the right of it, `vectors` vectors in all) and the
// chunk of k from k0.
HWY_INLINE LinearStrip MakeLinearStrip(const LinearPlan& plan, const float* bias, int64_t row,
                                       int64_t panel, int vectors, int64_t k0) {
  const LinearTask& t = plan.task;
  LinearStrip s;
  s.x = t.x + row * t.x_stride + k0;
  s.x_stride = t.x_stride;
  s.w = t.w + panel * kLinearColumns * t.k + k0 * kLinearColumns;
  s.panel_floats = t.k * kLinearColumns;
  s.k = t.k - k0 < plan.chunk ? t.k - k0 : plan.chunk;
  s.y = t.y + row * t.y_stride;
  s.y_stride = t.y_stride;
  const bool adds = k0 > 0 || t.adds;
  s.add = adds ? s.y : bias;
  s.add_stride = adds ? t.y_stride : 0;
  for (int v = 0; v < vectors; ++v) {
    s.y_at[v] = LinearColumnAt(t, panel * kLinearColumns + v * kLanes<float>);
    s.add_at[v] = adds ? s.y_at[v] : v * kLanes<float>;
  }
  s.ahead[0] = s.ahead[1] = s.w;
  s.ahead_step = 0;
  return s;
}

// panel[u * width + j] = w[j * k + u] for `steps` steps of u and j < columns; 0 for the other j < width
// (whole vectors).
HWY_NOINLINE void PackPanel(const float* w, int64_t k, int64_t columns, int64_t width,
                            int64_t steps, float* HWY_RESTRICT panel) {
  constexpr int64_t kL = kLanes<float>;
  const Tag<float> d;
  const int64_t squares = steps / kL * kL;
  for (int64_t j = 0; j < width; j += kL) {
    const float* from = w + j * k;
    const bool is_whole = j + kL <= columns;
    for (int64_t u = 0; is_whole && u < squares; u += kL) {
      Transpose<float>([&](auto i) HWY_ATTR { return hn::LoadU(d, from + i * k + u); },
                       [&](auto i, Vec<float> column)
                           HWY_ATTR { hn::Store(column, d, panel + (u + i) * width + j); });
    }
    for (int64_t i = j; i < j + kL; ++i) {
      for (int64_t u = is_whole ? squares : 0; u < steps; ++u)
        panel[u * width + i] = i < columns ? w[i * k + u] : 0.0f;
    }
  }
}

// The chunk of panel `panel` from k0 where a tile can read it: packed now if the weights are not.
HWY_INLINE const float* LinearPanel(const LinearPlan& plan, int64_t panel, int64_t k0) {
  const LinearTask& t = plan.task;
  const bool is_edge = panel == plan.panels;
  const int64_t width = is_edge ? plan.edge_width : kLinearColumns;
  const float* w = t.w + panel * kLinearColumns * t.k;
  if (t.panel == nullptr) return w + k0 * width;
  PackPanel(w + k0, t.k, is_edge ? plan.edge_columns : kLinearColumns, width,
            t.k - k0 < plan.chunk ? t.k - k0 : plan.chunk, t.panel);
  return t.panel;
}

// The panel that is not full: through a tile of our own unless it is whole vectors, so that nothing
// is read or written past the columns that exist. w: its chunk from k0.
HWY_NOINLINE void LinearEdge(const LinearPlan& plan, const float* w, int64_t row, int64_t rows,
                             int64_t k0) {
  const LinearTask& t = plan.task;
  HWY_ALIGN float tile[kLinearRows * kLinearColumns];
  HWY_ALIGN float bias[kLinearColumns] = {};
  const int64_t width = plan.edge_width, columns = plan.edge_columns;
  const int64_t first = plan.panels * kLinearColumns;
  const int vectors = static_cast<int>(width / kLanes<float>);
  const bool is_partial = columns < width;
  if (t.bias != nullptr) {
    for (int64_t j = 0; j < columns; ++j) bias[j] = t.bias[first + j];
  }
  LinearStrip s = MakeLinearStrip(plan, bias, row, plan.panels, is_partial ? 0 : vectors, k0);
  s.w = w;
  float* y[kLinearColumns];
  if (is_partial) {
    for (int64_t j = 0; j < columns; ++j) y[j] = s.y + LinearColumnAt(t, first + j);
    if (k0 > 0 || t.adds) {
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < width; ++j) {
          tile[i * width + j] = j < columns ? y[j][i * t.y_stride] : 0.0f;
        }
      }
      s.add = tile;
      s.add_stride = width;
    }
    s.y = tile;
    s.y_stride = width;
    for (int v = 0; v < vectors; ++v) s.add_at[v] = s.y_at[v] = v * kLanes<float>;
  }
  WithRows(rows, [&](auto r) HWY_ATTR {
    if (vectors == kLinearVectors) {
      LinearRows<r, kLinearVectors>(s);
    } else {
      LinearRows<r, 1>(s);
    }
  });
  if (!is_partial) return;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) y[j][i * t.y_stride] = tile[i * width + j];
  }
}

// Panels side by side for `rows` rows: enough sums to hide the latency, few enough for the
// registers.
HWY_INLINE constexpr int LinearPanels(int rows) {
  return rows == 1 ? 4 : rows == 2 ? 2 : rows == 3 && kLinearRows == 8 ? 2 : 1;
}

// One tile of rows: panel by panel, all of k at once, so that the weights are read in the order of
// their addresses.
template <int kRows>
HWY_INLINE void LinearOneTile(const LinearPlan& plan) {
  const LinearTask& t = plan.task;
  constexpr int kPanels = LinearPanels(kRows);
  HWY_ALIGN const float zeros[kPanels * kLinearColumns] = {};
  int64_t panel = 0;
  for (; panel + kPanels <= plan.panels; panel += kPanels) {
    const float* bias = t.bias == nullptr ? zeros : t.bias + panel * kLinearColumns;
    for (int64_t k0 = 0; k0 < t.k; k0 += plan.chunk) {
      LinearStrip s = MakeLinearStrip(plan, bias, 0, panel, kPanels * kLinearVectors, k0);
      if constexpr (kPanels > 1) {
        LinearWide<kRows, kPanels>(s);
      } else {
        s.ahead[0] = s.w + kLinearStreamAhead;
        s.ahead[1] = s.ahead[0] + kLinearColumns / 2;
        s.ahead_step = kLinearColumns;
        LinearRowsAhead<kRows>(s);
      }
    }
  }
  for (; panel < plan.panels; ++panel) {
    const float* bias = t.bias == nullptr ? zeros : t.bias + panel * kLinearColumns;
    for (int64_t k0 = 0; k0 < t.k; k0 += plan.chunk) {
      LinearRows<kRows, kLinearVectors>(MakeLinearStrip(plan, bias, 0, panel, kLinearVectors, k0));
    }
  }
  if (plan.edge_columns > 0) {
    for (int64_t k0 = 0; k0 < t.k; k0 += plan.chunk)
      LinearEdge(plan, LinearPanel(plan, plan.panels, k0), 0, kRows, k0);
  }
}

// Rows [begin, end): chunk by chunk of k, so that x stays in the L2 cache while the panels pass.
// Tiles of nearly equal height: 20 rows are 7 + 7 + 6, not 8 + 8 + 4 (0.975 of the peak instead of
// 0.94).
HWY_INLINE void LinearBlock(const LinearPlan& plan, int64_t begin, int64_t end) {
  const LinearTask& t = plan.task;
  HWY_ALIGN const float zeros[kLinearColumns] = {};
  const int64_t tiles = (end - begin + kLinearRows - 1) / kLinearRows;
  const int64_t height = (end - begin) / tiles, taller = (end - begin) % tiles;
  const bool ahead = t.panel == nullptr && t.n * t.k * 4 > kLinearPrefetchBytes;
  // Each tile asks for its share of the next panel: two streams, each half of the share.
  const int64_t step = (kLinearColumns / 2 + tiles - 1) / tiles;
  for (int64_t k0 = 0; k0 < t.k; k0 += plan.chunk) {
    for (int64_t panel = 0; panel < plan.panels; ++panel) {
      const float* bias = t.bias == nullptr ? zeros : t.bias + panel * kLinearColumns;
      LinearStrip s = MakeLinearStrip(plan, bias, begin, panel, kLinearVectors, k0);
      const float* next = panel + 1 < plan.panels ? s.w + s.panel_floats
                          : k0 + s.k < t.k        ? t.w + (k0 + s.k) * kLinearColumns
                                                  : s.w;
      s.w = LinearPanel(plan, panel, k0);
      const int64_t share = 2 * step * s.k;
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t rows = height + (tile < taller ? 1 : 0);
        if (ahead) {
          const bool is_all_asked = share * tile >= s.k * kLinearColumns;
          s.ahead[0] = is_all_asked ? next : next + share * tile;
          s.ahead[1] = s.ahead[0] + step * s.k;
          s.ahead_step = is_all_asked ? 0 : step;
          WithRows(rows, [&](auto r) HWY_ATTR { LinearRowsAhead<r>(s); });
        } else {
          WithRows(rows, [&](auto r) HWY_ATTR { LinearRows<r, kLinearVectors>(s); });
        }
        s.next_rows(rows);
      }
    }
    if (plan.edge_columns > 0) {
      const float* w = LinearPanel(plan, plan.panels, k0);
      int64_t row = begin;
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t rows = height + (tile < taller ? 1 : 0);
        LinearEdge(plan, w, row, rows, k0);
        row += rows;
      }
    }
  }
}

// k = 0: the bias alone.
HWY_INLINE void LinearEmpty(const LinearTask& t) {
  if (t.adds) return;
  for (int64_t i = 0; i < t.m; ++i) {
    for (int64_t j = 0; j < t.n; ++j) {
      t.y[i * t.y_stride + LinearColumnAt(t, j)] = t.bias == nullptr ? 0.0f : t.bias[j];
    }
  }
}

void Linear(const LinearTask& task) {
  if (task.k == 0) return LinearEmpty(task);
  const LinearPlan plan = MakeLinearPlan(task);
  if (task.m <= 0) return;
  if (task.m <= kLinearRows && task.panel == nullptr) {
    WithRows(task.m, [&](auto rows) HWY_ATTR { LinearOneTile<rows>(plan); });
    return;
  }
  for (int64_t row = 0; row < task.m; row += kLinearBlockRows) {
    const int64_t left = task.m - row;
    LinearBlock(plan, row, row + (left < kLinearBlockRows ? left : kLinearBlockRows));
  }
}

int64_t PackedFloats(int64_t n, int64_t k) {
  constexpr int64_t kWide = kLinearColumns, kNarrow = kLanes<float>;
  const int64_t rest = n % kWide;
  return k * (n - rest + (rest == 0 ? 0 : rest <= kNarrow ? kNarrow : kWide));
}

void Pack(const float* w, int64_t n, int64_t k, float* packed) {
  for (int64_t n0 = 0; n0 < n; n0 += kLinearColumns) {
    const int64_t columns = n - n0 < kLinearColumns ? n - n0 : kLinearColumns;
    const int64_t width = columns <= kLanes<float> ? kLanes<float> : kLinearColumns;
    PackPanel(w + n0 * k, k, columns, width, k, packed + n0 * k);
  }
}

// Panel by panel of w^T, square by square: both sides of a square are one piece of memory.
void PackTransposed(const float* packed, int64_t n, int64_t k, float* transposed) {
  const auto width_at = [](int64_t begin, int64_t end) {
    return end - begin <= kLanes<float> ? int64_t{kLanes<float>} : kLinearColumns;
  };
  for (int64_t u0 = 0; u0 < k; u0 += kLinearColumns) {
    const int64_t width = width_at(u0, k), columns = HWY_MIN(kLinearColumns, k - u0);
    for (int64_t j0 = 0; j0 < n; j0 += kLinearColumns) {
      const int64_t from_width = width_at(j0, n), rows = HWY_MIN(kLinearColumns, n - j0);
      const float* HWY_RESTRICT from = packed + j0 * k + u0 * from_width;
      float* HWY_RESTRICT to = transposed + u0 * n + j0 * width;
      for (int64_t j = 0; j < rows; ++j) {
        for (int64_t u = 0; u < width; ++u)
          to[j * width + u] = u < columns ? from[u * from_width + j] : 0.0f;
      }
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::kernels
HWY_AFTER_NAMESPACE();

#endif  // toggle
