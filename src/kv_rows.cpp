// SPDX-License-Identifier: Apache-2.0
// Tier: plan. See kv_rows.h.
#include "kv_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "convert_row.h"

namespace qkv {
namespace {

constexpr float kLargest = 127;  // of i8; -128 is not used, so that x and -x are alike

// The nearest integer, ties to even, for |x| < 2^22: what nearbyint gives, without a call.
float nearest(float x) {
  constexpr float kMagic = 12582912;  // 1.5 * 2^23
  return (x + kMagic) - kMagic;
}

void quantise(const float* x, int64_t dim, int8_t* to, float* scale, QuantSums* sums) {
  float largest = 0;
  bool finite = true;
  for (int64_t d = 0; d < dim; ++d) {
    finite &= std::isfinite(x[d]);
    largest = std::max(largest, std::abs(x[d]));
  }
  if (!finite) {  // i8 has neither NaN nor Inf: the whole row is NaN
    std::memset(to, 0, static_cast<size_t>(dim));
    *scale = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  float step = largest / kLargest;
  const float inverse = step > 0 ? 1 / step : 0;
  if (!std::isfinite(inverse)) step = 0;  // denormal: nothing that a score could show
  *scale = step;
  double worst = 0, squares = 0;
  for (int64_t d = 0; d < dim; ++d) {
    const float q = step > 0 ? std::clamp(nearest(x[d] * inverse), -kLargest, kLargest) : 0.0f;
    to[d] = static_cast<int8_t>(q);
    const double error = static_cast<double>(x[d]) - static_cast<double>(step * q);
    worst = std::max(worst, std::abs(error));
    squares += error * error;
  }
  sums->squares += squares;
  sums->elements += dim;
  sums->max_abs = std::max(sums->max_abs, worst);
  if (largest > 0)
    sums->max_relative = std::max(sums->max_relative, worst / static_cast<double>(largest));
}

template <class T>
void write(const RowsJob& j, const RowSteps& steps, QuantSums* sums) {
  T* row = static_cast<T*>(j.row);
  const char* from = static_cast<const char*>(j.from);
  char* to = static_cast<char*>(j.to);
  const int64_t from_bytes = j.from_stride * size_bytes(j.from_dtype);
  const int64_t to_bytes = j.to_stride * size_bytes(j.to_dtype);
  for (int64_t i = 0; i < j.n; ++i) {
    load_row(from + (j.first + i) * from_bytes, j.from_dtype, j.dim, row);
    steps.apply(j.first + i, j.dim, row);
    if constexpr (sizeof(T) == 4) {
      if (j.to_dtype == DType::i8) {
        quantise(row, j.dim, reinterpret_cast<int8_t*>(to + i * to_bytes), j.scale + i, sums);
        continue;
      }
    }
    store_row(row, j.dim, to + i * to_bytes, j.to_dtype);
  }
}

}  // namespace

template <class T>
void RowSteps::apply(int64_t token, int64_t dim, T* x) const {
  if (norm && !norm->empty()) {
    double squares = 0;
    for (int64_t d = 0; d < dim; ++d)
      squares += static_cast<double>(x[d]) * static_cast<double>(x[d]);
    const double mean = dim > 0 ? squares / static_cast<double>(dim) : 0;
    const T factor = static_cast<T>(1 / std::sqrt(mean + norm_eps));
    for (int64_t d = 0; d < dim; ++d)
      x[d] = x[d] * factor * static_cast<T>((*norm)[static_cast<size_t>(d)]);
  }
  if (rope) rope->turn(token, x);
}
template void RowSteps::apply<float>(int64_t, int64_t, float*) const;
template void RowSteps::apply<double>(int64_t, int64_t, double*) const;

void write_rows(const RowsJob& j, const RowSteps& steps, QuantSums* sums) {
  if (j.from_dtype == j.to_dtype && steps.is_none()) {
    const int64_t element = size_bytes(j.to_dtype);
    const char* from = static_cast<const char*>(j.from) + j.first * j.from_stride * element;
    char* to = static_cast<char*>(j.to);
    if (j.dim == 0) return;
    if (j.from_stride == j.dim && j.to_stride == j.dim) {
      std::memcpy(to, from, static_cast<size_t>(j.n * j.dim * element));
      return;
    }
    for (int64_t i = 0; i < j.n; ++i)
      std::memcpy(to + i * j.to_stride * element, from + i * j.from_stride * element,
                  static_cast<size_t>(j.dim * element));
    return;
  }
  // A step in f32, unless the tokens are or become f64.
  const bool is_wide = j.to_dtype == DType::f64;
  is_wide ? write<double>(j, steps, sums) : write<float>(j, steps, sums);
}

}  // namespace qkv
