// SPDX-License-Identifier: Apache-2.0
// Tier: call. Walks a view of any strides in C order, one run of equally spaced elements at a time.
#pragma once
#include <cstddef>
#include <cstdint>

#include "qkv/tensor.h"

namespace qkv {

/// Calls row(const std::byte* first, int64_t count, int64_t step_bytes) for every run along the
/// last axis, in C order. A contiguous view is a single run.
template <class Row>
void for_each_row(const ConstTensor& t, Row row) {
  const auto* data = static_cast<const std::byte*>(t.data);
  const int64_t element_bytes = size_bytes(t.dtype);
  const int64_t n = t.num_elements();
  if (n == 0) return;
  if (t.is_contiguous()) {
    row(data, n, element_bytes);
    return;
  }
  int64_t shape[ConstTensor::kMaxRank] = {1, 1, 1, 1};
  int64_t step_bytes[ConstTensor::kMaxRank] = {};
  for (int a = 0; a < t.rank; ++a) {
    shape[ConstTensor::kMaxRank - t.rank + a] = t.shape[a];
    step_bytes[ConstTensor::kMaxRank - t.rank + a] = t.stride[a] * element_bytes;
  }
  for (int64_t i = 0; i < shape[0]; ++i) {
    for (int64_t j = 0; j < shape[1]; ++j) {
      for (int64_t k = 0; k < shape[2]; ++k) {
        row(data + i * step_bytes[0] + j * step_bytes[1] + k * step_bytes[2], shape[3],
            step_bytes[3]);
      }
    }
  }
}

}  // namespace qkv
