// SPDX-License-Identifier: Apache-2.0
// Tier: schedule. The kernel's view of some rows of a call: pointers instead of tensors, visible
// ranges instead of mask kinds. Forward and backward make their tasks here.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "call.h"
#include "dense_tiles.h"
#include "schedule.h"

namespace qkv {

inline void* element_pointer(const Tensor& t, int64_t offset) {
  return static_cast<char*>(t.data) + offset * size_bytes(t.dtype);
}
inline const void* element_pointer(const ConstTensor& t, int64_t offset) {
  return static_cast<const char*>(t.data) + offset * size_bytes(t.dtype);
}

/// Some rows (token, head of the group) of one (batch, KV head).
struct TaskPlace {
  int64_t b, h_kv, row_begin, n_rows;
};

/// Element (token 0, head 0 of the group) of a result [batch, num_heads, n_q, ...].
inline void* group_pointer(const Call& call, const Tensor& t, const TaskPlace& place) {
  return element_pointer(t, place.b * t.stride[0] + place.h_kv * call.group_size * t.stride[1]);
}

/// Items of several lists, one list behind the other.
class ItemList {
 public:
  void add(int64_t items) { end_.push_back(size() + items); }
  int64_t size() const { return end_.empty() ? 0 : end_.back(); }
  /// The list of an item; *item becomes its place there.
  size_t find(int64_t* item) const {
    const auto list =
        static_cast<size_t>(std::upper_bound(end_.begin(), end_.end(), *item) - end_.begin());
    if (list > 0) *item -= end_[list - 1];
    return list;
  }

 private:
  std::vector<int64_t> end_;  // of each list
};

/// What a task points to, kept per thread: no allocation from the second call on.
struct TaskMemory {
  ScratchBuffer kernel, state;
  std::vector<RowRange> ranges;
  uint64_t ranges_maker = 0;  // serial number of the maker whose rows `ranges` holds
  int64_t ranges_b = 0, ranges_first = 0;
  std::vector<kernels::DenseTerm> dense;
  std::vector<kernels::KvSegment> segments;
};

/// Of the calling thread, for one task at a time.
TaskMemory& task_memory();

class TaskMaker {
 public:
  TaskMaker(const Call& call, int64_t kernel_scratch_bytes);
  /// The operands, the scores and the scratch of a task; results and sinks are the caller's.
  kernels::AttentionTask make(const TaskPlace& place, TaskMemory* memory) const;
  /// Rows differ in what they see.
  bool has_ranges() const { return has_ranges_; }

 private:
  // f(index, array, its prepared table or nullptr) for dense terms of the mask and the bias.
  template <class F>
  void for_each_dense(F f) const;
  void use_ranges(const TaskPlace& place, TaskMemory* memory, kernels::AttentionTask* task) const;
  void use_keys(const TaskPlace& place, TaskMemory* memory, kernels::AttentionTask* task) const;
  void use_dense(const TaskPlace& place, TaskMemory* memory, kernels::AttentionTask* task) const;

  const Call& call_;
  const int64_t kernel_scratch_bytes_;
  const MaskDocuments* const documents_;
  // One per dense term in the order of make(), if any is wanted; empty entries for the others.
  std::vector<DenseTiles> tiles_;
  const bool has_ranges_, has_dense_;
  const uint64_t serial_;          // of this maker, if it has ranges
  kernels::AttentionTask common_;  // what all tasks share
};

}  // namespace qkv
