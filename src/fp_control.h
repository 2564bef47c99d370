// SPDX-License-Identifier: Apache-2.0
// Tier: schedule. The floating-point control word of a thread (rounding, flush to zero), without
// its status flags. A worker takes over the caller's, so that results do not depend on who ran a
// task.
#pragma once
#include <cstdint>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace qkv {

inline uint64_t fp_control() {
#if defined(__SSE2__)
  return _mm_getcsr() & ~0x3fu;  // the low six bits are exceptions seen so far
#elif defined(__aarch64__)
  uint64_t word;
  asm volatile("mrs %0, fpcr" : "=r"(word));
  return word;
#else
  return 0;
#endif
}

inline void set_fp_control([[maybe_unused]] uint64_t word) {
#if defined(__SSE2__)
  _mm_setcsr(static_cast<uint32_t>(word));
#elif defined(__aarch64__)
  asm volatile("msr fpcr, %0" : : "r"(word));
#endif
}

}  // namespace qkv
