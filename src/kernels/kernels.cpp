// SPDX-License-Identifier: Apache-2.0
// Tier: kernel. The table of the instruction set in force, assembled from the families.
#include "kernels/kernels.h"

#include <atomic>
#include <mutex>

#include "isa.h"
#include "kernels/tables.h"

namespace qkv::kernels {

const KernelTable& active() {
  static KernelTable table;
  static std::atomic<uint32_t> filled{0};  // epoch of the table; 0: empty
  isa::ensure_initialised();
  const uint32_t wanted = isa::epoch();
  if (filled.load(std::memory_order_acquire) != wanted) {
    const std::lock_guard lock(isa::mutex);
    if (filled.load(std::memory_order_relaxed) != wanted) {
      table = {};
      fill_prefill(&table);
      fill_decode(&table);
      fill_backward(&table);
      fill_linear(&table);
      filled.store(wanted, std::memory_order_release);
    }
  }
  return table;
}

}  // namespace qkv::kernels
