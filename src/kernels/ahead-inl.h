// SPDX-License-Identifier: Apache-2.0
// Tier: kernel (compiled once per Highway target). Cache lines that the products ask for before they are needed.
#if defined(QKV_KERNELS_AHEAD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_KERNELS_AHEAD_INL_H_
#undef QKV_KERNELS_AHEAD_INL_H_
#else
#define QKV_KERNELS_AHEAD_INL_H_
#endif

#include <cstdint>

#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::kernels {
namespace HWY_NAMESPACE {

// Rows that are needed next: fetched into L1 a line or a few at a time, at every step of the products, so
// that memory works while the cores do. In bursts (32 lines each 32 steps) they wait for each other: Zen 3
// reads 8.7 instead of 10.7 GB/s beside the work of one query row.
class Ahead {
 public:
  Ahead() = default;
  Ahead(const char* rows, int64_t stride_bytes, int64_t row_bytes, int64_t n)
      : at_(rows), gap_(stride_bytes - row_bytes), row_bytes_(row_bytes) {
    if (gap_ == 0) row_bytes_ *= n;  // one long row
    row_end_ = rows + row_bytes_;
    lines_ = (gap_ == 0 ? 1 : n) * ((row_bytes_ + 63) / 64);
  }
  // Spreads the lines over so many steps.
  void spread(int64_t steps) { per_step_ = (lines_ + steps - 1) / HWY_MAX(steps, int64_t{1}); }
  HWY_INLINE void step() {
    for (int64_t i = HWY_MIN(per_step_, lines_); i > 0; i--) {
      hwy::Prefetch(at_);
      at_ += 64, lines_--;
      if (at_ >= row_end_) at_ = row_end_ + gap_, row_end_ = at_ + row_bytes_;
    }
  }

 private:
  const char *at_ = nullptr, *row_end_ = nullptr;
  int64_t gap_ = 0, row_bytes_ = 0, lines_ = 0, per_step_ = 0;
};

// n rows of dim elements.
template <class Stored>
HWY_INLINE Ahead AheadOf(const Stored* rows, int64_t stride, int64_t dim, int64_t n) {
  const auto bytes = static_cast<int64_t>(sizeof(Stored));
  return {reinterpret_cast<const char*>(rows), stride * bytes, dim * bytes, n};
}

// Elements of a cache line.
template <class T>
inline constexpr size_t kLine = 64 / sizeof(T);

// K and V that the scores of a tile of keys fetch while they go through its columns, a line at a time: values of the same
// keys, and the keys of the next tile.
template <class T>
struct NextRows {
  const T *k, *v;  // of the first key; nullptr: nothing is fetched
  int64_t k_stride, v_stride, k_dim, v_dim;

  // Steps between two fetches; all of them if nothing is fetched.
  HWY_INLINE size_t steps(size_t n) const { return k ? kLine<T> : n; }
  HWY_INLINE void fetch(size_t first, size_t n, size_t column) const {
    if (!k) return;
    const auto row = static_cast<int64_t>(first), rows = static_cast<int64_t>(n);
    const auto at = static_cast<int64_t>(column), line = static_cast<int64_t>(kLine<T>);
    const int64_t v_end = at + line < k_dim ? HWY_MIN(at + line, v_dim) : v_dim;
    for (int64_t i = 0; i < rows; i++) {
      hwy::Prefetch(k + (row + rows + i) * k_stride + at);
      for (int64_t x = at; x < v_end; x += line) hwy::Prefetch(v + (row + i) * v_stride + x);
    }
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace qkv::kernels
HWY_AFTER_NAMESPACE();

#endif  // toggle
