// SPDX-License-Identifier: Apache-2.0
// Tier: plan. Sines and cosines of some positions, and the turn of a row by them.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "qkv/rope.h"

namespace qkv {

class RopeTable {
 public:
  /// Throws Error, naming caller, for options that do not fit the dim.
  RopeTable(const RopeOptions& options, int64_t dim, const char* caller);
  /// Row r of the table is position positions[r].
  void fill(std::span<const int64_t> positions);
  /// Room for n rows of no position.
  void resize(int64_t n);
  /// Makes row r that of a position, unless it is already. Different rows may be set by different
  /// threads; nothing is allocated.
  void set(int64_t r, int64_t position);
  /// Turns the first rot_dim elements of x by row r; T is float or double.
  template <class T>
  void turn(int64_t r, T* x) const {
    const double* c = cos_.data() + r * half_;
    const double* s = sin_.data() + r * half_;
    const bool is_split = style_ == RopeStyle::half_split;
    const int64_t step = is_split ? 1 : 2, partner = is_split ? half_ : 1;
    for (int64_t i = 0; i < half_; ++i) {
      T* a = x + i * step;
      const T cosine = static_cast<T>(c[i]), sine = static_cast<T>(s[i]);
      const T first = a[0], second = a[partner];
      a[0] = first * cosine - second * sine;
      a[partner] = second * cosine + first * sine;
    }
  }

 private:
  RopeStyle style_;
  int64_t half_;
  std::vector<double> frequency_;   // [half]
  std::vector<int64_t> positions_;  // of the rows
  std::vector<double> cos_, sin_;   // [rows, half]
};

}  // namespace qkv
