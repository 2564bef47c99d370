// SPDX-License-Identifier: Apache-2.0
// How much memory is held at most through new, all threads together. Include it once per test
// program: it replaces the global operators.
#pragma once
#include <malloc.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <thread>

namespace qkv::test {

inline std::atomic<int64_t> live_bytes{0}, most_bytes{0};

inline void* counted(void* p) {
  if (!p) throw std::bad_alloc();
  const int64_t now = live_bytes += static_cast<int64_t>(malloc_usable_size(p));
  int64_t most = most_bytes.load();
  while (now > most && !most_bytes.compare_exchange_weak(most, now)) {
  }
  return p;
}
inline void uncounted(void* p) {
  if (p) live_bytes -= static_cast<int64_t>(malloc_usable_size(p));
  std::free(p);
}

/// The peak since it was made, over what was held then.
class PeakMemory {
 public:
  PeakMemory() : before_(live_bytes) { most_bytes = live_bytes.load(); }
  int64_t peak_bytes() const { return most_bytes - before_; }

 private:
  int64_t before_;
};

}  // namespace qkv::test

// Not inlined: gcc would take the malloc of one half and the delete of the other for a mismatch.
__attribute__((noinline)) void* operator new(size_t n) {
  return qkv::test::counted(std::malloc(n ? n : 1));
}
__attribute__((noinline)) void* operator new(size_t n, const std::nothrow_t&) noexcept {
  void* p = std::malloc(n ? n : 1);
  return p ? qkv::test::counted(p) : nullptr;
}
__attribute__((noinline)) void* operator new(size_t n, std::align_val_t alignment) {
  const auto a = static_cast<size_t>(alignment);
  return qkv::test::counted(std::aligned_alloc(a, (n + a - 1) / a * a));
}
__attribute__((noinline)) void operator delete(void* p) noexcept { qkv::test::uncounted(p); }
__attribute__((noinline)) void operator delete(void* p, const std::nothrow_t&) noexcept {
  qkv::test::uncounted(p);
}
__attribute__((noinline)) void operator delete(void* p, size_t) noexcept {
  qkv::test::uncounted(p);
}
__attribute__((noinline)) void operator delete(void* p, std::align_val_t) noexcept {
  qkv::test::uncounted(p);
}
__attribute__((noinline)) void operator delete(void* p, size_t, std::align_val_t) noexcept {
  qkv::test::uncounted(p);
}
