// SPDX-License-Identifier: Apache-2.0
// Tier: schedule. Cuts the gradients of projections into blocks of dw. A task sums over all rows, so
// that no two tasks add to one element; the kernel gives the same bits for every division.
#include "projection_gradient.h"

#include <algorithm>

#include "call.h"
#include "schedule.h"

namespace qkv {
namespace {

struct Run {
  const kernels::KernelTable& table;
  std::span<const ProjectionGradientJob> jobs;

  int64_t row_blocks(const ProjectionGradientJob& job) const {
    return (job.n + table.gradient_block - 1) / table.gradient_block;
  }
  int64_t tasks(const ProjectionGradientJob& job) const {
    if (job.dw == nullptr) return job.dbias == nullptr ? 0 : row_blocks(job);
    return row_blocks(job) * ((job.k + table.gradient_block - 1) / table.gradient_block);
  }

  void task(int64_t index) const {
    thread_local ScratchBuffer scratch;
    size_t j = 0;
    while (index >= tasks(jobs[j])) index -= tasks(jobs[j++]);
    const ProjectionGradientJob& job = jobs[j];
    const int64_t block = table.gradient_block, n = index % row_blocks(job) * block;
    const int64_t k = index / row_blocks(job) * block;
    kernels::LinearGradientTask t{};
    t.dy = job.dy, t.dy_group_stride = job.dy_group_stride, t.dy_row_stride = job.dy_row_stride;
    t.x = job.x, t.x_group_stride = job.x_group_stride, t.x_row_stride = job.x_row_stride;
    t.groups = job.groups, t.group_rows = job.rows, t.n = job.n;
    t.n_begin = n, t.n_end = std::min(n + block, job.n);
    t.k_begin = k, t.k_end = std::min(k + block, job.k);
    t.dw = job.dw, t.dw_stride = job.dw_row_stride;
    t.dbias = k == 0 ? job.dbias : nullptr;
    t.adds = job.adds;
    t.scratch = scratch.reserve(table.gradient_scratch_bytes);
    table.linear_gradient(t);
  }
};

}  // namespace

void project_gradients(std::span<const ProjectionGradientJob> jobs, int num_threads,
                       Executor* executor) {
  const Run run{kernels::active(), jobs};
  int64_t tasks = 0, flop = 0;
  for (const ProjectionGradientJob& job : jobs) {
    tasks += run.tasks(job);
    if (job.dw != nullptr) flop += 2 * job.groups * job.rows * job.n * job.k;
  }
  if (tasks == 0) return;
  const int wanted = num_threads != 0 ? num_threads : default_num_threads();
  const int threads = useful_threads((flop + tasks - 1) / tasks, tasks, wanted);
  if (threads <= 1) {
    for (int64_t i = 0; i < tasks; ++i) run.task(i);
    return;
  }
  Executor& runner = executor != nullptr ? *executor : default_executor();
  runner.run(
      tasks, threads,
      [](void* context, int64_t index) { static_cast<const Run*>(context)->task(index); },
      const_cast<Run*>(&run));
}

}  // namespace qkv
