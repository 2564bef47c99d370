// SPDX-License-Identifier: Apache-2.0
// An executor for tests of order.
#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "qkv/runtime.h"

namespace qkv::test {

/// Runs the tasks in a shuffled order on the calling thread.
class ShuffledExecutor : public Executor {
 public:
  explicit ShuffledExecutor(uint64_t seed) : random_(seed) {}
  void run(int64_t num_tasks, int, void (*task)(void*, int64_t), void* context) override {
    num_tasks_ += num_tasks;
    std::vector<int64_t> order(static_cast<size_t>(num_tasks));
    std::iota(order.begin(), order.end(), int64_t{0});
    std::shuffle(order.begin(), order.end(), random_);
    for (int64_t index : order) task(context, index);
  }
  int64_t num_tasks() const { return num_tasks_; }

 private:
  std::mt19937_64 random_;
  int64_t num_tasks_ = 0;
};

}  // namespace qkv::test
