// SPDX-License-Identifier: Apache-2.0
// Tier: test. The table of element types and the scalar conversions, against a plain search for the
// nearest value.
#include "qkv/dtype.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace {

using qkv::bf16_t;
using qkv::DType;
using qkv::f16_t;

struct Format {
  int exponent_bits;
  int mantissa_bits;
};
constexpr Format kF16 = {5, 10};
constexpr Format kBf16 = {8, 7};

/// The definition of the value of a bit pattern; all steps are exact in double.
double decode(Format f, uint32_t bits) {
  const uint32_t mantissa = bits & ((1u << f.mantissa_bits) - 1u);
  const int exponent_mask = (1 << f.exponent_bits) - 1;
  const int exponent = static_cast<int>(bits >> f.mantissa_bits) & exponent_mask;
  const int bias = exponent_mask >> 1;
  const double sign = (bits >> (f.exponent_bits + f.mantissa_bits)) & 1u ? -1.0 : 1.0;
  if (exponent == exponent_mask) {
    return mantissa == 0 ? sign * HUGE_VAL : std::numeric_limits<double>::quiet_NaN();
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - f.mantissa_bits);
  return sign * std::ldexp(1.0 + std::ldexp(mantissa, -f.mantissa_bits), exponent - bias);
}

/// Nearest value, ties to the even mantissa, by bisection over the ordered non-negative patterns.
uint32_t encode(Format f, float x) {
  const uint32_t sign = std::signbit(x) ? 1u << (f.exponent_bits + f.mantissa_bits) : 0u;
  const uint32_t infinity = ((1u << f.exponent_bits) - 1u) << f.mantissa_bits;
  const double a = std::fabs(static_cast<double>(x));
  uint32_t lo = 0, hi = infinity;  // decode(lo) <= a, decode(hi) > a
  if (a == HUGE_VAL) return sign | infinity;
  while (hi - lo > 1) {
    const uint32_t mid = (lo + hi) / 2;
    (decode(f, mid) <= a ? lo : hi) = mid;
  }
  // Overflow is decided as if the exponent went on: the step behind the largest finite value is a
  // power of two.
  const double below = decode(f, lo);
  const double above = hi == infinity ? 2 * below - decode(f, lo - 1) : decode(f, hi);
  const double to_below = a - below, to_above = above - a;
  if (to_below < to_above) return sign | lo;
  if (to_above < to_below) return sign | hi;
  return sign | (lo % 2 == 0 ? lo : hi);
}

/// Every bit pattern of a 16-bit format, its neighbours in f32, the midpoints between values, and
/// random floats.
std::vector<float> hard_values(Format f) {
  std::vector<float> values;
  for (uint32_t bits = 0; bits < 0x8000u; ++bits) {
    const double value = decode(f, bits);
    if (std::isnan(value)) continue;
    const double next = decode(f, bits + 1);
    for (const double v : {value, 0.5 * (value + next)}) {
      const float x = static_cast<float>(v);
      if (!std::isfinite(x)) continue;
      for (const float y : {x, std::nextafterf(x, HUGE_VALF), std::nextafterf(x, -HUGE_VALF)}) {
        values.push_back(y);
        values.push_back(-y);
      }
    }
  }
  for (const float x :
       {65504.0f, 65519.99f, 65520.0f, 65536.0f, HUGE_VALF, -HUGE_VALF, 0.0f, -0.0f,
        std::numeric_limits<float>::max(), std::numeric_limits<float>::denorm_min()}) {
    values.push_back(x);
  }
  std::mt19937 random(7);
  while (values.size() < 600000) {
    const float x = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (!std::isnan(x)) values.push_back(x);
  }
  return values;
}

TEST(Dtype, Table_IsInTheOrderOfTheEnumeration) {
  for (size_t i = 0; i < qkv::kDTypes.size(); ++i) {
    EXPECT_EQ(static_cast<size_t>(qkv::kDTypes[i].dtype), i);
  }
  EXPECT_EQ(qkv::size_bytes(DType::bf16), 2);
  EXPECT_EQ(qkv::name(DType::boolean), "bool");
  EXPECT_EQ(qkv::dtype_of<qkv::f16_t>(), DType::f16);
}

TEST(Dtype, Bf16ToFloat_EveryPattern) {
  for (uint32_t bits = 0; bits <= 0xffffu; ++bits) {
    const float got = qkv::to_float(bf16_t{static_cast<uint16_t>(bits)});
    const double want = decode(kBf16, bits);
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(got)) << bits;
    } else {
      ASSERT_EQ(std::bit_cast<uint32_t>(got), std::bit_cast<uint32_t>(static_cast<float>(want)))
          << bits;
    }
  }
}

TEST(Dtype, F16ToFloat_EveryPattern) {
  for (uint32_t bits = 0; bits <= 0xffffu; ++bits) {
    const float got = qkv::to_float(f16_t{static_cast<uint16_t>(bits)});
    const double want = decode(kF16, bits);
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(got)) << bits;
      EXPECT_EQ(std::signbit(got), (bits >> 15) != 0) << bits;
    } else {
      ASSERT_EQ(std::bit_cast<uint32_t>(got), std::bit_cast<uint32_t>(static_cast<float>(want)))
          << bits;
    }
  }
}

TEST(Dtype, FloatToBf16_NearestTiesToEven) {
  for (const float x : hard_values(kBf16)) {
    ASSERT_EQ(qkv::to_bf16(x).bits, encode(kBf16, x)) << std::hexfloat << x;
  }
}

TEST(Dtype, FloatToF16_NearestTiesToEven) {
  for (const float x : hard_values(kF16)) {
    ASSERT_EQ(qkv::to_f16(x).bits, encode(kF16, x)) << std::hexfloat << x;
  }
}

TEST(Dtype, NaN_StaysNaNWithItsSign) {
  for (const uint32_t payload : {0x1u, 0x1000u, 0x2000u, 0x400000u, 0x7fffffu}) {
    for (const uint32_t sign : {0u, 0x80000000u}) {
      const float x = std::bit_cast<float>(sign | 0x7f800000u | payload);
      const uint16_t b = qkv::to_bf16(x).bits, h = qkv::to_f16(x).bits;
      EXPECT_TRUE(std::isnan(decode(kBf16, b))) << std::hex << payload;
      EXPECT_TRUE(std::isnan(decode(kF16, h))) << std::hex << payload;
      EXPECT_EQ(b >> 15, sign >> 31);
      EXPECT_EQ(h >> 15, sign >> 31);
    }
  }
}

}  // namespace
