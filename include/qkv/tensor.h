// SPDX-License-Identifier: Apache-2.0
// Tier: call. Tensor and ConstTensor: views of the caller's memory. They own nothing and are cheap to copy.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <type_traits>

#include "qkv/dtype.h"
#include "qkv/error.h"

namespace qkv {

/// A view: data, dtype, rank, shape, stride. Strides count elements and may be 0 (broadcast) or negative.
/// A default-constructed view (rank 0 and no data) means "not given" wherever an argument is optional.
/// A scalar is a view of rank 0 with data.
template <class Pointer>  // void* or const void*
struct BasicTensor {
  static constexpr int kMaxRank = 4;
  static constexpr bool kConst = std::is_same_v<Pointer, const void*>;

  Pointer data = nullptr;
  DType dtype = DType::f32;
  int rank = 0;
  int64_t shape[kMaxRank] = {};
  int64_t stride[kMaxRank] = {};

  BasicTensor() = default;
  /// Contiguous (last axis fastest) unless strides are given.
  BasicTensor(Pointer p, DType t, std::span<const int64_t> dims,
              std::span<const int64_t> strides = {})
      : data(p), dtype(t), rank(static_cast<int>(dims.size())) {
    if (dims.size() > kMaxRank)
      throw Error("Tensor: at most 4 axes, got " + std::to_string(dims.size()));
    if (!strides.empty() && strides.size() != dims.size())
      throw Error("Tensor: as many strides as axes are needed");
    int64_t step = 1;
    for (int a = rank - 1; a >= 0; --a) {
      shape[a] = dims[static_cast<size_t>(a)];
      if (shape[a] < 0) throw Error("Tensor: an extent is negative: " + std::to_string(shape[a]));
      stride[a] = strides.empty() ? step : strides[static_cast<size_t>(a)];
      step *= shape[a];
    }
  }
  template <class T>
  requires(!std::is_void_v<T> && (kConst || !std::is_const_v<T>))
      BasicTensor(T* p, std::initializer_list<int64_t> dims,
                  std::initializer_list<int64_t> strides = {})
      : BasicTensor(p, dtype_of<std::remove_const_t<T>>(),
                    std::span<const int64_t>(dims.begin(), dims.size()),
                    std::span<const int64_t>(strides.begin(), strides.size())) {}
  /// Tensor -> ConstTensor.
  template <class Other>
  requires(kConst&& std::is_same_v<Other, void*>) BasicTensor(const BasicTensor<Other>& o)
      : data(o.data), dtype(o.dtype), rank(o.rank) {  // NOLINT: implicit on purpose
    for (int a = 0; a < kMaxRank; ++a) shape[a] = o.shape[a], stride[a] = o.stride[a];
  }

  /// True if the view was given (an extent may still be 0).
  explicit operator bool() const { return rank > 0 || data != nullptr; }
  int64_t num_elements() const {
    int64_t n = 1;
    for (int a = 0; a < rank; ++a) n *= shape[a];
    return n;
  }
  bool is_contiguous() const {
    int64_t step = 1;
    for (int a = rank - 1; a >= 0; --a) {
      if (shape[a] != 1 && stride[a] != step) return num_elements() == 0;
      step *= shape[a];
    }
    return true;
  }
};

using Tensor = BasicTensor<void*>;
using ConstTensor = BasicTensor<const void*>;

/// "[2, 8, 4, 64]" - the form of every error text.
QKV_EXPORT std::string shape_text(const ConstTensor& t);
QKV_EXPORT std::string shape_text(std::span<const int64_t> shape);

}  // namespace qkv
