// SPDX-License-Identifier: Apache-2.0
// Tier: plan. Rows of any floating-point type to and from an arithmetic type, in plain loops.
#pragma once
#include <cstdint>

#include "half.h"
#include "qkv/dtype.h"

namespace qkv {

/// to[0, n) = from[0, n) as T (float or double).
template <class T>
void load_row(const void* from, DType dtype, int64_t n, T* to) {
  const auto loop = [&](auto* x, auto convert) {
    for (int64_t d = 0; d < n; ++d) to[d] = static_cast<T>(convert(x[d]));
  };
  switch (dtype) {
    case DType::f64:
      return loop(static_cast<const double*>(from), [](double x) { return x; });
    case DType::bf16:
      return loop(static_cast<const bf16_t*>(from),
                  [](bf16_t x) { return half::from_bf16(x.bits); });
    case DType::f16:
      return loop(static_cast<const f16_t*>(from), [](f16_t x) { return half::from_f16(x.bits); });
    default:
      return loop(static_cast<const float*>(from), [](float x) { return x; });
  }
}

/// to[0, n) = from[0, n), rounded to the type of `to`.
template <class T>
void store_row(const T* from, int64_t n, void* to, DType dtype) {
  const auto loop = [&](auto* x, auto convert) {
    for (int64_t d = 0; d < n; ++d) x[d] = convert(from[d]);
  };
  switch (dtype) {
    case DType::f64:
      return loop(static_cast<double*>(to), [](T x) { return static_cast<double>(x); });
    case DType::bf16:
      return loop(static_cast<bf16_t*>(to),
                  [](T x) { return bf16_t{half::to_bf16(static_cast<float>(x))}; });
    case DType::f16:
      return loop(static_cast<f16_t*>(to),
                  [](T x) { return f16_t{half::to_f16(static_cast<float>(x))}; });
    default:
      return loop(static_cast<float*>(to), [](T x) { return static_cast<float>(x); });
  }
}

}  // namespace qkv
