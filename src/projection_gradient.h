// SPDX-License-Identifier: Apache-2.0
// Tier: schedule. Gradients of the parameters of projections, cut into tasks: dw = dy^T x, dbias =
// the sums of the columns of dy.
#pragma once
#include <cstdint>
#include <span>

#include "qkv/runtime.h"

namespace qkv {

/// dw [n, k] and dbias [n] of y[g, i, :] = x[g, i, :] w^T + bias, over `groups` groups of `rows`
/// rows, in the order of the rows. Strides in elements.
struct ProjectionGradientJob {
  int64_t n = 0, k = 0;
  int64_t groups = 0, rows = 0;
  const float* dy = nullptr;
  int64_t dy_group_stride = 0, dy_row_stride = 0;
  const float* x = nullptr;
  int64_t x_group_stride = 0, x_row_stride = 0;
  float* dw = nullptr;  // nullptr: not wanted
  int64_t dw_row_stride = 0;
  float* dbias = nullptr;  // nullptr: not wanted
  bool adds = false;       // to what dw and dbias hold, instead of writing them
};

inline constexpr int kMaxProjectionGradientJobs = 4;

/// Runs up to kMaxProjectionGradientJobs independent jobs together. num_threads and executor as in
/// AttentionOptions. The bits depend on groups * rows alone, not on threads. A row of x that is not
/// finite counts for nothing where its whole row of dy is zero.
void project_gradients(std::span<const ProjectionGradientJob> jobs, int num_threads,
                       Executor* executor);

}  // namespace qkv
