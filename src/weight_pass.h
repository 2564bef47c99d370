// SPDX-License-Identifier: Apache-2.0
// Tier: schedule. The forms of the weights that sum over rows or heads, or are wanted for some rows
// only: independent items that run when the softmax state of every row is known. What an item writes
// is its own, and sums run in the order of rows and heads, so who runs which item changes no bit.
#pragma once
#include <cstdint>
#include <deque>
#include <vector>

#include "call.h"
#include "task.h"

namespace qkv {

/// The forms that are made of one row at a time, by the task that attended it.
kernels::WeightForms row_forms(const Call& call, const TaskPlace& place);

class WeightPass {
 public:
  /// states: state_bytes() for each batch entry, filled through use_state().
  WeightPass(const Call& call, const Cut& cut, const TaskMaker& maker, char* states);

  /// Bytes of m and l of all rows of a batch entry.
  static int64_t state_bytes(const Call& call);
  /// Points a task to the m and l of its rows.
  static void use_state(const Call& call, const TaskPlace& place, char* states,
                        kernels::AttentionTask* task);

  int64_t num_items() const { return num_columns_ + num_means_ + num_rows_; }
  /// Of an average item.
  int64_t item_flop() const;
  void run_item(int64_t item) const;
  /// All items of all passes, on at most num_threads threads. executor: the caller's or nullptr.
  static void run(const std::deque<WeightPass>& passes, int num_threads, Executor* executor);

 private:
  // Weight rows that follow each other: rows [slot, slot + count) hold tokens from `token` on.
  struct Run {
    int64_t slot, token, count;
  };
  struct Keys {
    int64_t begin, end;
  };

  int64_t num_rows() const { return call_.n_q * call_.group_size; }
  Keys keys_of(int64_t chunk) const;
  void find_runs();
  void sum_columns(int64_t pair, const Keys& keys) const;
  void add_means(int64_t b, int64_t first_token, const Keys& keys) const;
  void store_rows(int64_t pair, const Run& run, const Keys& keys) const;
  void make(const kernels::AttentionTask& task, const kernels::WeightForms& forms) const;
  // f(task) for the rows [begin, end) of a (batch, KV head) in order, with keys as their range.
  template <class F>
  void for_tasks(const TaskPlace& rows, const Keys& keys, F f) const;

  const Call& call_;
  const Cut& cut_;
  const TaskMaker& maker_;
  char* const states_;
  std::vector<Run> runs_;
  int64_t chunks_, mean_tokens_, mean_blocks_ = 0;
  int64_t num_columns_ = 0, num_means_ = 0, num_rows_ = 0;  // items of each form
};

}  // namespace qkv
