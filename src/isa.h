// SPDX-License-Identifier: Apache-2.0
// Tier: plan. Which instruction set the kernels run on: names, detection, forcing. Called by
// kernels::active() before every dispatch, and by set_isa() and info().
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace qkv::isa {

/// Part of the text of the Error when a known instruction set does not run here. CTest looks for
/// it.
inline constexpr std::string_view kCannotRun = "this machine cannot run the instruction set ";

struct Choice {
  std::string name;    // "avx512", "avx2", "sse4", "neon", "baseline"
  std::string target;  // Highway's name
  int64_t target_bit;  // Highway's HWY_AVX2 ...
  std::string reason;  // "detected", "QKV_ISA", "set_isa"
};

/// Held while a set is chosen and while something is derived from the choice. A child after fork() finds
/// it free: it has fork handlers.
extern std::mutex mutex;

namespace internal {
extern std::atomic<uint32_t> epoch;  // 0 until a set is chosen, then grows by one with every choice
void initialise();
}  // namespace internal

/// Chooses the instruction set if no call has done so yet: QKV_ISA, else the best this machine has.
/// One load when that is done. Throws Error, at every call, while QKV_ISA names a set that cannot
/// be used.
inline void ensure_initialised() {
  if (internal::epoch.load(std::memory_order_acquire) == 0) internal::initialise();
}

/// Changes with every choice: a cache of what was dispatched is good for one epoch.
inline uint32_t epoch() { return internal::epoch.load(std::memory_order_acquire); }

/// Forces a set by name; "auto" detects. Throws Error, and changes nothing, if the name is unknown
/// or the set does not run here.
void force(std::string_view name);

/// The set in force. Throws as ensure_initialised.
Choice current();

/// Names of the sets that are compiled and run on this machine, weakest first.
std::vector<std::string> available();

}  // namespace qkv::isa
