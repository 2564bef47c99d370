// SPDX-License-Identifier: Apache-2.0
// Tier: plan. Products, sums and quotients of sizes that must fit 64 bits.
#pragma once
#include <fmt/format.h>

#include <cstdint>
#include <initializer_list>

#include "qkv/error.h"

namespace qkv {

inline int64_t times(std::initializer_list<int64_t> factors, const char* what) {
  int64_t product = 1;
  for (const int64_t f : factors) {
    if (__builtin_mul_overflow(product, f, &product))
      throw Error(fmt::format("plan: {} does not fit 64 bits", what));
  }
  return product;
}

inline int64_t plus(int64_t a, int64_t b, const char* what) {
  int64_t sum;
  if (__builtin_add_overflow(a, b, &sum))
    throw Error(fmt::format("plan: {} does not fit 64 bits", what));
  return sum;
}

/// a / b rounded up, for any a >= 0.
inline int64_t divide_up(int64_t a, int64_t b) { return a / b + (a % b != 0); }

}  // namespace qkv
