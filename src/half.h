// SPDX-License-Identifier: Apache-2.0
// Tier: call. Scalar conversions of bf16 and f16 in integer arithmetic, inline so that loops over
// tensors can use them. Round to nearest, ties to even; denormals are kept; a NaN stays a NaN (made
// quiet, sign and high payload bits kept).
#pragma once
#include <bit>
#include <cstdint>

#include "qkv/dtype.h"

namespace qkv::half {

inline float from_bf16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

inline uint16_t to_bf16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x0040u);
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

inline float from_f16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  const uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0x1fu) {
    const uint32_t quiet = mantissa != 0 ? 0x00400000u : 0u;
    return std::bit_cast<float>(sign | 0x7f800000u | quiet | (mantissa << 13));
  }
  if (exponent == 0) {  // zero and denormals: mantissa * 2^-24, exact in f32
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
  }
  return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

inline uint16_t to_f16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  }
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and above
  if (magnitude >= 0x38800000u) {  // 2^-14: the smallest normal f16
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
  }
  if (magnitude < 0x33000000u) return static_cast<uint16_t>(sign);  // below 2^-25: rounds to zero
  // Denormal: the value is m * 2^(e - 150) and one f16 step is 2^-24, so m is shifted right by 126
  // - e.
  const uint32_t shift = 126u - (magnitude >> 23);
  const uint32_t m = (magnitude & 0x007fffffu) | 0x00800000u;
  const uint32_t low = m & ((1u << shift) - 1u);
  const uint32_t tie = 1u << (shift - 1u);
  uint32_t result = m >> shift;
  if (low > tie || (low == tie && (result & 1u) != 0)) ++result;
  return static_cast<uint16_t>(sign | result);
}

}  // namespace qkv::half
