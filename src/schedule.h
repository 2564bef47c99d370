// SPDX-License-Identifier: Apache-2.0
// Tier: schedule. Memory that a call or a task borrows from its thread.
#pragma once
#include <cstddef>
#include <cstdint>

namespace qkv {

/// A buffer that grows and is kept: no allocation from the second call on.
class ScratchBuffer {
 public:
  ScratchBuffer() = default;
  ScratchBuffer(const ScratchBuffer&) = delete;
  ScratchBuffer& operator=(const ScratchBuffer&) = delete;
  ~ScratchBuffer();
  /// At least `bytes` bytes, aligned to kernels::kAlignment; the contents are undefined.
  void* reserve(int64_t bytes);

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace qkv
