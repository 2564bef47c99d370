// SPDX-License-Identifier: Apache-2.0
// Tensors of tests: any element type, any memory layout, guarded memory, NaN wherever no element
// lies.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <span>
#include <vector>

#include "element.h"
#include "qkv/tensor.h"
#include "support/guarded.h"

namespace qkv::test {

/// Memory orders of a tensor [batch, heads, tokens, dim].
enum class Layout : uint8_t {
  contiguous,
  bshd,             // stored [batch, tokens, heads, dim]
  fused,            // the middle third of [batch, tokens, 3, heads, dim]
  padded,           // rows dim + 3 apart
  broadcast_heads,  // one head for all: stride 0
  broadcast_batch,  // one batch entry for all: stride 0
  reversed,         // tokens backwards: negative stride
};
inline constexpr std::array kLayouts = {Layout::contiguous,      Layout::bshd,
                                        Layout::fused,           Layout::padded,
                                        Layout::broadcast_heads, Layout::broadcast_batch,
                                        Layout::reversed};

inline void set_element(const Tensor& t, int64_t offset, double x) {
  switch (t.dtype) {
    case DType::f32:
      static_cast<float*>(t.data)[offset] = static_cast<float>(x);
      return;
    case DType::f64:
      static_cast<double*>(t.data)[offset] = x;
      return;
    case DType::bf16:
      static_cast<bf16_t*>(t.data)[offset] = to_bf16(static_cast<float>(x));
      return;
    case DType::f16:
      static_cast<f16_t*>(t.data)[offset] = to_f16(static_cast<float>(x));
      return;
    case DType::boolean:
      static_cast<uint8_t*>(t.data)[offset] = x != 0;
      return;
    case DType::u8:
      static_cast<uint8_t*>(t.data)[offset] = static_cast<uint8_t>(x);
      return;
    case DType::i32:
      static_cast<int32_t*>(t.data)[offset] = static_cast<int32_t>(x);
      return;
    case DType::i64:
      static_cast<int64_t*>(t.data)[offset] = static_cast<int64_t>(x);
      return;
    default:
      throw Error("set_element: no test writes " + std::string(name(t.dtype)));
  }
}

/// Calls f(offset) for every element in row-major order of the shape.
template <class F>
void for_each_offset(const ConstTensor& t, F f) {
  int64_t shape[4] = {1, 1, 1, 1}, stride[4] = {};
  for (int a = 0; a < t.rank; ++a)
    shape[4 - t.rank + a] = t.shape[a], stride[4 - t.rank + a] = t.stride[a];
  for (int64_t a = 0; a < shape[0]; ++a)
    for (int64_t b = 0; b < shape[1]; ++b)
      for (int64_t c = 0; c < shape[2]; ++c)
        for (int64_t d = 0; d < shape[3]; ++d)
          f(a * stride[0] + b * stride[1] + c * stride[2] + d * stride[3]);
}

/// All elements in double, row-major.
inline std::vector<double> values(const ConstTensor& t) {
  std::vector<double> all;
  if (t) for_each_offset(t, [&](int64_t at) { all.push_back(element(t, at)); });
  return all;
}

/// Owns guarded memory and a view of it. Starts as NaN.
class TestTensor {
 public:
  TestTensor() = default;
  TestTensor(DType dtype, std::vector<int64_t> shape, Layout layout = Layout::contiguous,
             Guard guard = Guard::behind) {
    const std::vector<int64_t> stride = strides(shape, layout);
    int64_t first = 0, last = 0;  // offsets of the lowest and highest element
    for (size_t a = 0; a < shape.size(); ++a)
      (stride[a] < 0 ? first : last) += std::max<int64_t>(shape[a] - 1, 0) * stride[a];
    const bool is_empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
    buffer_ = GuardedBuffer(
        is_empty ? 0 : static_cast<size_t>((last - first + 1) * size_bytes(dtype)), guard);
    view_ =
        Tensor(buffer_.data() - (is_empty ? 0 : first * size_bytes(dtype)), dtype, shape, stride);
  }
  /// Contiguous, with these values (row-major).
  TestTensor(DType dtype, std::vector<int64_t> shape, std::span<const double> values,
             Layout layout = Layout::contiguous, Guard guard = Guard::behind)
      : TestTensor(dtype, std::move(shape), layout, guard) {
    size_t next = 0;
    for_each_offset(view_, [&](int64_t at) { set_element(view_, at, values[next++]); });
  }

  const Tensor& view() const { return view_; }
  operator ConstTensor() const { return view_; }  // NOLINT: an argument of every call under test
  explicit operator bool() const { return static_cast<bool>(view_); }

  int64_t offset(int64_t a, int64_t b, int64_t c = 0, int64_t d = 0) const {
    return a * view_.stride[0] + b * view_.stride[1] + c * view_.stride[2] + d * view_.stride[3];
  }
  void set(int64_t b, int64_t h, int64_t i, int64_t d, double x) {
    set_element(view_, offset(b, h, i, d), x);
  }
  double get(int64_t b, int64_t h, int64_t i, int64_t d) const {
    return element(view_, offset(b, h, i, d));
  }
  std::vector<double> values() const { return test::values(view_); }
  /// The bytes of all elements, row-major: equal only if every bit is.
  std::vector<std::byte> bits() const {
    std::vector<std::byte> all;
    const int64_t bytes = size_bytes(view_.dtype);
    for_each_offset(view_, [&](int64_t at) {
      const std::byte* from = static_cast<const std::byte*>(view_.data) + at * bytes;
      all.insert(all.end(), from, from + bytes);
    });
    return all;
  }
  /// True if no byte between the elements was written.
  bool is_padding_untouched() const {
    const int64_t bytes = size_bytes(view_.dtype);
    std::vector<bool> is_element(num_bytes_);
    if (num_bytes_ > 0)
      for_each_offset(view_, [&](int64_t at) {
        const std::byte* from = static_cast<const std::byte*>(view_.data) + at * bytes;
        std::fill_n(is_element.begin() + (from - buffer_.data()), bytes, true);
      });
    for (size_t e = 0; e < num_bytes_; ++e)
      if (!is_element[e] && buffer_.data()[e] != std::byte{0xFF}) return false;
    return true;
  }

  TestTensor& fill(double x) {
    for_each_offset(view_, [&](int64_t at) { set_element(view_, at, x); });
    return *this;
  }
  /// Normal with this standard deviation, rounded to the element type.
  TestTensor& fill_random(std::mt19937_64& random, double deviation = 1) {
    std::normal_distribution<double> normal(0, deviation);
    for_each_offset(view_, [&](int64_t at) { set_element(view_, at, normal(random)); });
    return *this;
  }

 private:
  static std::vector<int64_t> strides(const std::vector<int64_t>& shape, Layout layout) {
    if (shape.size() != 4) layout = Layout::contiguous;
    std::vector<int64_t> stride(shape.size());
    int64_t step = 1;
    for (size_t a = shape.size(); a-- > 0; step *= shape[a]) stride[a] = step;
    if (layout == Layout::contiguous) return stride;
    const int64_t heads = shape[1], tokens = shape[2], dim = shape[3];
    switch (layout) {
      case Layout::contiguous:
        break;
      case Layout::bshd:
        return {tokens * heads * dim, dim, heads * dim, 1};
      case Layout::fused:
        return {tokens * 3 * heads * dim, dim, 3 * heads * dim, 1};
      case Layout::padded:
        return {heads * tokens * (dim + 3), tokens * (dim + 3), dim + 3, 1};
      case Layout::broadcast_heads:
        return {tokens * dim, 0, dim, 1};
      case Layout::broadcast_batch:
        return {0, tokens * dim, dim, 1};
      case Layout::reversed:
        return {stride[0], stride[1], -dim, 1};
    }
    return stride;
  }

  size_t num_bytes_ = 0;
  GuardedBuffer buffer_;
  Tensor view_;
};

}  // namespace qkv::test
