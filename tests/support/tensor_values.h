// SPDX-License-Identifier: Apache-2.0
// Tier: test. The elements of a view as doubles, in C order, read one by one by their strides.
#pragma once
#include <stdexcept>
#include <vector>

#include "qkv/tensor.h"

namespace qkv::test {

inline double number_at(const ConstTensor& t, int64_t offset) {
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
      return static_cast<const bool*>(t.data)[offset] ? 1 : 0;
  }
  throw std::logic_error("number_at: unknown dtype");
}

inline std::vector<double> numbers(const ConstTensor& t) {
  std::vector<double> values;
  for (int64_t n = 0; n < t.num_elements(); ++n) {
    int64_t rest = n, offset = 0;
    for (int a = t.rank - 1; a >= 0; --a) {
      offset += rest % t.shape[a] * t.stride[a];
      rest /= t.shape[a];
    }
    values.push_back(number_at(t, offset));
  }
  return values;
}

}  // namespace qkv::test
