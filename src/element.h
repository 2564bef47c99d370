// SPDX-License-Identifier: Apache-2.0
// Tier: call. Reads one element of a view as double, whatever its type. Slow and plain: for the
// reference, for masks and for checks, never for an inner loop.
#pragma once
#include <cstdint>

#include "qkv/tensor.h"

namespace qkv {

/// The element `offset` elements behind t.data. A boolean is 0 or 1.
inline double element(const ConstTensor& t, int64_t offset) {
  switch (t.dtype) {
    case DType::f32:
      return static_cast<const float*>(t.data)[offset];
    case DType::f64:
      return static_cast<const double*>(t.data)[offset];
    case DType::bf16:
      return to_float(static_cast<const bf16_t*>(t.data)[offset]);
    case DType::f16:
      return to_float(static_cast<const f16_t*>(t.data)[offset]);
    case DType::i8:
      return static_cast<const int8_t*>(t.data)[offset];
    case DType::u8:
      return static_cast<const uint8_t*>(t.data)[offset];
    case DType::i16:
      return static_cast<const int16_t*>(t.data)[offset];
    case DType::u16:
      return static_cast<const uint16_t*>(t.data)[offset];
    case DType::i32:
      return static_cast<const int32_t*>(t.data)[offset];
    case DType::u32:
      return static_cast<const uint32_t*>(t.data)[offset];
    case DType::i64:
      return static_cast<double>(static_cast<const int64_t*>(t.data)[offset]);
    case DType::u64:
      return static_cast<double>(static_cast<const uint64_t*>(t.data)[offset]);
    case DType::boolean:
      return static_cast<const uint8_t*>(t.data)[offset] != 0 ? 1.0 : 0.0;
  }
  return 0;
}

/// Rounds x into a floating-point element.
inline void store_element(const Tensor& t, int64_t offset, double x) {
  switch (t.dtype) {
    case DType::f64:
      static_cast<double*>(t.data)[offset] = x;
      break;
    case DType::bf16:
      static_cast<bf16_t*>(t.data)[offset] = to_bf16(static_cast<float>(x));
      break;
    case DType::f16:
      static_cast<f16_t*>(t.data)[offset] = to_f16(static_cast<float>(x));
      break;
    default:
      static_cast<float*>(t.data)[offset] = static_cast<float>(x);
  }
}

}  // namespace qkv
