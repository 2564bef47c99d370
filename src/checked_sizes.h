// SPDX-License-Identifier: Apache-2.0
// Tier: plan. Products and sums of sizes that must fit 64 bits.
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

}  // namespace qkv
