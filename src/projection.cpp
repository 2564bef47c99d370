// SPDX-License-Identifier: Apache-2.0
// Tier: schedule. Packs the weights of projections and cuts their products into tasks: blocks of
// rows times blocks of columns. The kernel gives the same bits for every division, and the division
// depends on the shape alone.
#include "projection.h"

#include <algorithm>

#include "call.h"
#include "task.h"

namespace qkv {
namespace {

// Rows of a task: the kernel's block, which meets a chunk of weights while that is in the cache.
constexpr int64_t kTaskRows = 128;
// Panels of weights that a task of many rows reads: x is then read n / 256 times from beyond the L2
// cache (AVX-512), and 2048 x 512 x 1536 makes 96 tasks of 0.12 ms.
constexpr int64_t kTaskPanels = 8;
// Up to this many rows reading the weights is what costs, and a task reads about 1 MB (20 us).
constexpr int64_t kFewRows = 16;
constexpr int64_t kTaskWeightFloats = 1 << 18;

struct Division {
  int64_t row_blocks, column_blocks, block_columns, tasks;
};

Division divide(const ProjectionJob& job) {
  const Projection& p = *job.projection;
  Division d;
  d.row_blocks = (job.rows + kTaskRows - 1) / kTaskRows;
  const int64_t panels = (p.n() + p.columns() - 1) / p.columns();
  const int64_t panel_floats = std::max<int64_t>(p.columns() * p.k(), 1);
  const int64_t wanted = job.rows <= kFewRows ? kTaskWeightFloats / panel_floats : kTaskPanels;
  const int64_t block = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(panels, 1));
  d.column_blocks = (panels + block - 1) / block;
  d.block_columns = block * p.columns();
  d.tasks = job.groups * d.row_blocks * d.column_blocks;
  return d;
}

kernels::LinearTask whole(const ProjectionJob& job, int64_t group) {
  const Projection& p = *job.projection;
  kernels::LinearTask t;
  t.x = job.x + group * job.x_group_stride;
  t.x_stride = job.x_row_stride;
  t.w = p.weights();
  t.bias = p.bias();
  t.y = job.y + group * job.y_group_stride;
  t.y_stride = job.y_row_stride;
  t.y_column = 0, t.y_block = job.y_head, t.y_block_stride = job.y_head_stride;
  t.m = job.rows, t.k = p.k(), t.n = p.n(), t.adds = job.adds;
  t.panel = nullptr;
  return t;
}

struct Run {
  std::span<const ProjectionJob> jobs;
  Division division[kMaxProjectionJobs];

  // Column blocks are the slow index: neighbours in time share their weights.
  void task(int64_t index) const {
    size_t j = 0;
    while (index >= division[j].tasks) index -= division[j++].tasks;
    const ProjectionJob& job = jobs[j];
    const Division& d = division[j];
    const int64_t row_block = index % d.row_blocks;
    const int64_t group = index / d.row_blocks % job.groups;
    const int64_t column = index / (d.row_blocks * job.groups) * d.block_columns;
    kernels::LinearTask t = whole(job, group);
    const int64_t row = row_block * kTaskRows;
    t.x += row * t.x_stride, t.y += row * t.y_stride, t.y_column = column;
    t.m = std::min(kTaskRows, t.m - row);
    t.w += column * t.k;
    if (t.bias != nullptr) t.bias += column;
    t.n = std::min(d.block_columns, t.n - column);
    job.projection->run(t);
  }
};

}  // namespace

Projection::Projection(const Kernels& kernels, int64_t n, int64_t k)
    : kernels_(kernels),
      n_(n),
      k_(k),
      packed_(allocate_large(kernels_.packed_floats(n, k) * static_cast<int64_t>(sizeof(float)))) {}

Projection::Projection(const float* weight, const float* bias, int64_t n, int64_t k)
    : kernels_(active_kernels()),
      n_(n),
      k_(k),
      is_in_place_(true),
      weight_in_place_(weight),
      bias_in_place_(bias) {}

Projection::Kernels Projection::active_kernels() {
  const kernels::KernelTable& t = kernels::active();
  return {t.linear_columns, t.linear_block,  t.linear_panel_floats, t.linear,
          t.pack,           t.packed_floats, t.pack_transposed};
}

Projection::Projection(std::span<const float> weight, std::span<const float> bias, int64_t n,
                       int64_t k)
    : Projection(active_kernels(), n, k) {
  bias_.assign(bias.begin(), bias.end());
  set(weight, bias);
}

Projection Projection::in_place(const float* weight, const float* bias, int64_t n, int64_t k) {
  return {weight, bias, n, k};
}

void Projection::run(kernels::LinearTask task) const {
  if (is_in_place_) {
    task.panel = static_cast<float*>(task_memory().kernel.reserve(kernels_.panel_floats * 4));
  }
  kernels_.linear(task);
}

void Projection::set(std::span<const float> weight, std::span<const float> bias) {
  kernels_.pack(weight.data(), n_, k_, packed());
  std::copy(bias.begin(), bias.end(), bias_.begin());
}

Projection Projection::transposed() const {
  Projection to(kernels_, k_, n_);
  transpose_into(&to);
  return to;
}

void Projection::transpose_into(Projection* to) const {
  kernels_.pack_transposed(packed(), n_, k_, to->packed());
}

void join_groups(ProjectionJob* job) {
  const bool x_follows = job->rows == 1 || job->x_group_stride == job->rows * job->x_row_stride;
  const bool y_follows = job->rows == 1 || job->y_group_stride == job->rows * job->y_row_stride;
  if (job->groups <= 1 || !x_follows || !y_follows) return;
  if (job->rows == 1)
    job->x_row_stride = job->x_group_stride, job->y_row_stride = job->y_group_stride;
  job->rows *= job->groups, job->groups = 1;
}

void project(std::span<const ProjectionJob> jobs, int num_threads, Executor* executor) {
  const auto alone = [&] {
    for (const ProjectionJob& job : jobs) {
      for (int64_t group = 0; group < job.groups; ++group) job.projection->run(whole(job, group));
    }
  };
  const int wanted = num_threads != 0 ? num_threads : default_num_threads();
  if (wanted <= 1) return alone();
  Run run{jobs, {}};
  int64_t tasks = 0, flop = 0;
  for (size_t j = 0; j < jobs.size(); ++j) {
    run.division[j] = divide(jobs[j]);
    tasks += run.division[j].tasks;
    flop += 2 * jobs[j].groups * jobs[j].rows * jobs[j].projection->n() * jobs[j].projection->k();
  }
  if (tasks == 0) return;
  const int threads = useful_threads((flop + tasks - 1) / tasks, tasks, wanted);
  if (threads <= 1) return alone();
  Executor& runner = executor != nullptr ? *executor : default_executor();
  runner.run(
      tasks, threads,
      [](void* context, int64_t index) { static_cast<const Run*>(context)->task(index); }, &run);
}

}  // namespace qkv
