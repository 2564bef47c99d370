// SPDX-License-Identifier: Apache-2.0
// Tier: call. The text form of shapes, as every error shows them.
#include "qkv/tensor.h"

namespace qkv {

std::string shape_text(std::span<const int64_t> shape) {
  std::string text = "[";
  for (size_t a = 0; a < shape.size(); ++a) {
    if (a > 0) text += ", ";
    text += std::to_string(shape[a]);
  }
  return text + "]";
}

std::string shape_text(const ConstTensor& t) {
  return shape_text(std::span<const int64_t>(t.shape, static_cast<size_t>(t.rank)));
}

}  // namespace qkv
