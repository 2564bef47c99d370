// SPDX-License-Identifier: Apache-2.0
// Counts what this thread allocates with new. Include it once per test program: it replaces the
// global operators.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <new>

namespace qkv::test {
inline thread_local int64_t num_allocations = 0;
}

// Not inlined: gcc would take the malloc of one half and the delete of the other for a mismatch.
__attribute__((noinline)) void* operator new(size_t n) {
  ++qkv::test::num_allocations;
  if (void* p = std::malloc(n ? n : 1)) return p;
  throw std::bad_alloc();
}
__attribute__((noinline)) void* operator new(size_t n, const std::nothrow_t&) noexcept {
  ++qkv::test::num_allocations;
  return std::malloc(n ? n : 1);
}
__attribute__((noinline)) void* operator new(size_t n, std::align_val_t align) {
  ++qkv::test::num_allocations;
  const size_t a = static_cast<size_t>(align);
  if (void* p = std::aligned_alloc(a, (n + a) / a * a)) return p;
  throw std::bad_alloc();
}
__attribute__((noinline)) void operator delete(void* p) noexcept { std::free(p); }
__attribute__((noinline)) void operator delete(void* p, size_t) noexcept { std::free(p); }
__attribute__((noinline)) void operator delete(void* p, const std::nothrow_t&) noexcept {
  std::free(p);
}
__attribute__((noinline)) void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
__attribute__((noinline)) void operator delete(void* p, size_t, std::align_val_t) noexcept {
  std::free(p);
}
