// SPDX-License-Identifier: Apache-2.0
// Tier: schedule. Memory that a thread keeps from call to call. An executor may run another call of
// the same thread inside a call (a pool that steals work while it waits): that one gets memory of
// its own.
#pragma once
#include <utility>

namespace qkv {

/// T for the time of a call: the thread's, or a new one if an outer call of the same kind holds it.
template <class T>
class KeptMemory {
 public:
  KeptMemory() : is_inside_(std::exchange(slot().is_busy, true)) {}
  ~KeptMemory() { slot().is_busy = is_inside_; }
  KeptMemory(const KeptMemory&) = delete;
  KeptMemory& operator=(const KeptMemory&) = delete;
  T& get() { return is_inside_ ? own_ : slot().memory; }

 private:
  struct Slot {
    T memory{};
    bool is_busy = false;
  };
  static Slot& slot() {
    thread_local Slot slot;
    return slot;
  }

  const bool is_inside_;
  T own_{};
};

}  // namespace qkv
