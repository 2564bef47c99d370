// SPDX-License-Identifier: Apache-2.0
// Tier: schedule. Cuts the gradients of projections into blocks of dw. A task sums over all rows, so
// that no two tasks add to one element; the kernel gives the same bits for every division.
#include "projection_gradient.h"

#include <algorithm>

#include "call.h"
#include "schedule.h"

namespace qkv {
namespace {

// Columns of a task for several threads: 768 x 768 makes 3 tasks. One thread takes all columns at
// once and packs dy once.
constexpr int64_t kTaskColumns = 256;

struct Run {
  const kernels::KernelTable& table;
  std::span<const ProjectionGradientJob> jobs;
  bool is_alone;

  int64_t row_blocks(const ProjectionGradientJob& job) const {
    return (job.n + table.gradient_block - 1) / table.gradient_block;
  }
  int64_t tasks(const ProjectionGradientJob& job) const {
    if (job.dw == nullptr) return job.dbias == nullptr ? 0 : row_blocks(job);
    return row_blocks(job) * (is_alone ? 1 : (job.k + kTaskColumns - 1) / kTaskColumns);
  }

  void task(int64_t index) const {
    thread_local ScratchBuffer scratch;
    size_t j = 0;
    while (index >= tasks(jobs[j])) index -= tasks(jobs[j++]);
    const ProjectionGradientJob& job = jobs[j];
    const int64_t blocks = row_blocks(job);
    // Blocks of equal height, in whole cache lines of floats.
    const int64_t block = ((job.n + blocks - 1) / blocks + 15) / 16 * 16;
    const int64_t columns = is_alone ? job.k : kTaskColumns;
    const int64_t n = index % blocks * block, k = index / blocks * columns;
    kernels::LinearGradientTask t{};
    t.dy = job.dy, t.dy_group_stride = job.dy_group_stride, t.dy_row_stride = job.dy_row_stride;
    t.x = job.x, t.x_group_stride = job.x_group_stride, t.x_row_stride = job.x_row_stride;
    t.groups = job.groups, t.group_rows = job.rows, t.n = job.n;
    t.n_begin = std::min(n, job.n), t.n_end = std::min(n + block, job.n);
    t.k_begin = k, t.k_end = std::min(k + columns, job.k);
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
  const int wanted = num_threads != 0 ? num_threads : default_num_threads();
  const Run run{kernels::active(), jobs, wanted <= 1};
  int64_t tasks = 0, flop = 0;
  for (const ProjectionGradientJob& job : jobs) {
    tasks += run.tasks(job);
    if (job.dw != nullptr) flop += 2 * job.groups * job.rows * job.n * job.k;
  }
  if (tasks == 0) return;
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
