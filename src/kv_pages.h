// SPDX-License-Identifier: Apache-2.0
// Tier: plan. Memory for the pages of a KvCache and its forks. A page of its own is smaller than a huge page of the
// machine, so that a walk over a long cache meets a new small page every few rows: pages are cut from slabs
// instead (Zen 5, 64 tokens per page, GQA 32/8 bf16 22 -> 26 GB/s, f32 23 -> 28; MHA i8 17 -> 21).
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "large_memory.h"

namespace qkv {

/// Pieces of one size, from slabs that double up to kSlabBytes. A piece that comes back is given out again, a slab
/// whose pieces have all come back is freed while others have room. Any thread may call.
class KvPages {
 public:
  static constexpr int64_t kSlabBytes = 4 * kHugePageBytes;

  /// Not initialised; `bytes` is the same in every call. Throws std::bad_alloc, and nothing has changed then.
  void* take(int64_t bytes);
  void give_back(void* piece) noexcept;
  /// Of all slabs.
  int64_t num_pieces() const;

 private:
  struct Slab {
    LargeMemory memory;
    std::size_t num_pieces;
    std::vector<char*> free;
  };
  Slab* add_slab(int64_t bytes);

  mutable std::mutex mutex_;
  std::map<char*, Slab> slabs_;  // by address
  std::vector<Slab*> open_;      // those with free pieces; has room for all slabs
};

}  // namespace qkv
