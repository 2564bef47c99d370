// SPDX-License-Identifier: Apache-2.0
// Tier: plan. Memory of a KvCache: blocks with room for some tokens of all heads, shared between
// forks by a count. A contiguous cache and a ring have one block for each batch entry, a paged one
// has a list.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "kv_pages.h"
#include "large_memory.h"
#include "qkv/tensor.h"

namespace qkv {

/// Sizes that all blocks of a cache share.
struct KvSizes {
  int64_t num_kv_heads, head_dim_qk, head_dim_v;
  DType dtype;
  int64_t k_row_stride, v_row_stride;  // elements; of new blocks, and of all that are attended to
  bool has_scales() const { return dtype == DType::i8; }
};

/// Rows of `slots` tokens: row `slot` of head h of K is at k + (h * k_head_stride + slot *
/// k_row_stride) elements; its scale at k_scale + h * slots + slot.
struct KvBlock {
  std::atomic<int64_t> owners{1};
  int64_t slots = 0, bytes = 0;
  bool is_callers = false;  // the memory belongs to the caller
  char* k = nullptr;
  char* v = nullptr;
  float* k_scale = nullptr;
  float* v_scale = nullptr;
  int64_t k_head_stride = 0, v_head_stride = 0;  // elements
  int64_t k_row_stride = 0, v_row_stride = 0;
  LargeMemory memory;              // one of these two, unless the memory is the caller's
  std::shared_ptr<KvPages> pages;  // where k begins a piece

  KvBlock() = default;
  KvBlock(const KvBlock&) = delete;
  KvBlock& operator=(const KvBlock&) = delete;
  ~KvBlock() {
    if (pages) pages->give_back(k);
  }
};

/// A counted reference.
class KvBlockRef {
 public:
  KvBlockRef() = default;
  /// Fresh memory, not initialised: a piece of `pages`, if given. Throws Error if the size does not fit 64 bits.
  KvBlockRef(const KvSizes& sizes, int64_t slots, std::shared_ptr<KvPages> pages = nullptr);
  explicit KvBlockRef(KvBlock* block) : block_(block) {}
  KvBlockRef(const KvBlockRef& o) : block_(o.block_) {
    if (block_) block_->owners.fetch_add(1, std::memory_order_relaxed);
  }
  KvBlockRef(KvBlockRef&& o) noexcept : block_(std::exchange(o.block_, nullptr)) {}
  KvBlockRef& operator=(KvBlockRef o) noexcept {
    std::swap(block_, o.block_);
    return *this;
  }
  ~KvBlockRef() {
    if (block_ && block_->owners.fetch_sub(1, std::memory_order_acq_rel) == 1) delete block_;
  }

  explicit operator bool() const { return block_ != nullptr; }
  KvBlock* operator->() const { return block_; }
  KvBlock& operator*() const { return *block_; }
  /// No other cache looks at it: it may be written.
  bool is_own() const { return block_->owners.load(std::memory_order_acquire) == 1; }

 private:
  KvBlock* block_ = nullptr;
};

/// Copies the rows of n tokens, all heads, with their scales. Slots of one block may overlap only if
/// to_slot <= from_slot.
void copy_slots(const KvSizes& sizes, const KvBlock& from, int64_t from_slot, KvBlock* to,
                int64_t to_slot, int64_t n);

}  // namespace qkv
