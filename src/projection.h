// SPDX-License-Identifier: Apache-2.0
// Tier: schedule. Projections: y = x w^T + bias with weights that were packed once, cut into tasks
// by the shape alone.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/kernels.h"
#include "qkv/runtime.h"

namespace qkv {

/// The weights of one projection, packed for the instruction set in force when it was made. It
/// keeps that set's kernel: a set that is forced later does not change the layout under it.
class Projection {
 public:
  /// weight is row-major [n, k] (torch.nn.Linear); bias has n elements or none.
  Projection(std::span<const float> weight, std::span<const float> bias, int64_t n, int64_t k);

  int64_t n() const { return n_; }
  int64_t k() const { return k_; }
  /// Columns that a task may start at: multiples of this.
  int64_t columns() const { return columns_; }
  /// Columns of y may lie apart in blocks of a multiple of this.
  int64_t block() const { return block_; }
  void run(const kernels::LinearTask& task) const { linear_(task); }
  const float* packed() const { return packed_.get(); }
  const float* bias() const { return bias_.empty() ? nullptr : bias_.data(); }

 private:
  struct Free {
    size_t alignment;
    void operator()(float* p) const;
  };
  int64_t n_, k_, columns_, block_;
  void (*linear_)(const kernels::LinearTask&);
  std::vector<float> bias_;
  std::unique_ptr<float[], Free> packed_;
};

/// y[g, i, :] = x[g, i, :] w^T + bias for `groups` groups of `rows` rows. Strides in elements. The
/// columns of y may be cut into heads of y_head columns (a multiple of block()) that lie
/// y_head_stride apart; y_head = 0: one piece.
struct ProjectionJob {
  const Projection* projection;
  int64_t groups, rows;
  const float* x;
  int64_t x_group_stride, x_row_stride;
  float* y;
  int64_t y_group_stride, y_row_stride;
  int64_t y_head = 0, y_head_stride = 0;
};

inline constexpr int kMaxProjectionJobs = 3;

/// Runs up to kMaxProjectionJobs independent jobs together. num_threads and executor as in
/// AttentionOptions. Allocates nothing.
void project(std::span<const ProjectionJob> jobs, int num_threads, Executor* executor);

}  // namespace qkv
