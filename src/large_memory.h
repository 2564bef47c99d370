// SPDX-License-Identifier: Apache-2.0
// Tier: plan. Memory that kernels stream through: aligned, and from a huge page on in huge pages, because rows that are read
// once meet a new page every few rows (weights of
// 4096 x 4096: 2 to 5 % of the time of one row).
#pragma once
#ifdef __linux__
#include <sys/mman.h>
#endif

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "kernels/kernels.h"

namespace qkv {

inline constexpr int64_t kHugePageBytes = int64_t{2} << 20;

struct FreeLargeMemory {
  std::size_t alignment = 0;
  void operator()(void* p) const { ::operator delete (p, std::align_val_t{alignment}); }
};
using LargeMemory = std::unique_ptr<void, FreeLargeMemory>;

/// Not initialised. Throws std::bad_alloc.
inline LargeMemory allocate_large(int64_t bytes) {
  const bool is_large = bytes >= kHugePageBytes;
  const auto alignment = static_cast<std::size_t>(is_large ? kHugePageBytes : kernels::kAlignment);
  const auto size = static_cast<std::size_t>(bytes);
  LargeMemory memory(::operator new (size, std::align_val_t{alignment}), {alignment});
#ifdef __linux__
  if (is_large) madvise(memory.get(), size, MADV_HUGEPAGE);  // a hint: small pages work too
#endif
  return memory;
}

}  // namespace qkv
