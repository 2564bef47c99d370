// SPDX-License-Identifier: Apache-2.0
// Tier: schedule. Projections: y = x w^T + bias with weights that were packed once, cut into tasks
// by the shape alone.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kernels.h"
#include "large_memory.h"
#include "qkv/runtime.h"

namespace qkv {

/// The weights of one projection, packed for the instruction set in force when it was made. It
/// keeps that set's kernel: a set that is forced later does not change the layout under it.
class Projection {
 public:
  /// weight is row-major [n, k] (torch.nn.Linear); bias has n elements or none.
  Projection(std::span<const float> weight, std::span<const float> bias, int64_t n, int64_t k);
  /// Reads weight [n, k] and bias (nullptr: none) where they are, in every run: nothing is packed
  /// ahead, allocated or kept. The same bits. Cannot be transposed or set.
  static Projection in_place(const float* weight, const float* bias, int64_t n, int64_t k);

  /// Other weights of the same size; bias has as many elements as before. Allocates nothing.
  void set(std::span<const float> weight, std::span<const float> bias);
  /// The projection w^T [k, n] without a bias: x -> x w, what gradients pass through on their way
  /// back.
  Projection transposed() const;
  /// The same into a projection that transposed() made.
  void transpose_into(Projection* to) const;

  int64_t n() const { return n_; }
  int64_t k() const { return k_; }
  /// Columns that a task may start at: multiples of this.
  int64_t columns() const { return kernels_.columns; }
  /// Columns of y may lie apart in blocks of a multiple of this.
  int64_t block() const { return kernels_.block; }
  void run(kernels::LinearTask task) const;
  const float* weights() const { return is_in_place_ ? weight_in_place_ : packed(); }
  const float* bias() const {
    return is_in_place_ ? bias_in_place_ : bias_.empty() ? nullptr : bias_.data();
  }
  bool is_in_place() const { return is_in_place_; }

 private:
  // The functions of the instruction set that the layout is for.
  struct Kernels {
    int64_t columns, block, panel_floats;
    void (*linear)(const kernels::LinearTask&);
    void (*pack)(const float*, int64_t, int64_t, float*);
    int64_t (*packed_floats)(int64_t, int64_t);
    void (*pack_transposed)(const float*, int64_t, int64_t, float*);
  };
  Projection(const Kernels& kernels, int64_t n, int64_t k);
  Projection(const float* weight, const float* bias, int64_t n, int64_t k);
  static Kernels active_kernels();
  float* packed() const { return static_cast<float*>(packed_.get()); }

  Kernels kernels_;
  int64_t n_, k_;
  std::vector<float> bias_;
  LargeMemory packed_;
  bool is_in_place_ = false;
  const float *weight_in_place_ = nullptr, *bias_in_place_ = nullptr;
};

/// y[g, i, :] = x[g, i, :] w^T + bias for `groups` groups of `rows` rows. Strides in elements. The
/// columns of y may be cut into heads of y_head columns (a multiple of block()) that lie
/// y_head_stride apart; y_head = 0: one piece. adds: y += instead.
struct ProjectionJob {
  const Projection* projection;
  int64_t groups, rows;
  const float* x;
  int64_t x_group_stride, x_row_stride;
  float* y;
  int64_t y_group_stride, y_row_stride;
  int64_t y_head = 0, y_head_stride = 0;
  bool adds = false;
};

/// Groups whose rows follow each other in x and in y become one group of rows: larger tiles, the same bits.
void join_groups(ProjectionJob* job);

inline constexpr int kMaxProjectionJobs = 3;

/// Runs up to kMaxProjectionJobs independent jobs together. num_threads and executor as in
/// AttentionOptions. Allocates nothing.
void project(std::span<const ProjectionJob> jobs, int num_threads, Executor* executor);

}  // namespace qkv
