// SPDX-License-Identifier: Apache-2.0
// Tier: plan. plan(): which path a call takes and what it costs, before it runs. No path is taken
// in silence.
#pragma once
#include <cstdint>
#include <string>

#include "qkv/attention.h"

namespace qkv {

/// Which call is meant: attention(), attention_backward() or attention_double_backward().
enum class Pass : uint8_t { forward, backward, double_backward };

/// The extents and element types of one call.
struct Problem {
  int64_t batch = 1, num_heads = 1, num_kv_heads = 1;
  int64_t n_q = 1, n_kv = 1;
  int64_t head_dim_qk = 64, head_dim_v = 64;
  DType dtype = DType::f32;     ///< of q and out
  DType dtype_kv = DType::f32;  ///< of k and v
  bool want_weights = false;
  /// Forms of the weights that need scratch; entropy and the largest weights need none.
  bool want_mean_weights = false, want_row_weights = false, want_column_sums = false;
  Pass pass = Pass::forward;
};

struct Plan {
  std::string path;           ///< "prefill" (queries in the lanes), "decode" (head dim), "empty",
                              ///< "backward", "reference" (plain loops in double)
  std::string reason;         ///< why this path, in one sentence
  std::string isa;            ///< instruction set of the kernels
  int64_t tile_q = 0;         ///< query rows of a panel: (token, head of the group) pairs
  int64_t tile_kv = 0;        ///< keys of a block
  int64_t kv_splits = 1;      ///< parts the keys are cut into; depends on the shape alone
  int64_t work_items = 0;     ///< independent tasks
  int num_threads = 1;        ///< that the call would use
  int64_t visible_pairs = 0;  ///< over batch and heads; a dense mask counts as fully visible
  int64_t flop = 0;           ///< 2 * visible_pairs * (head_dim_qk + head_dim_v); backward:
                              ///< 2 * visible_pairs * (3 * head_dim_qk + 2 * head_dim_v)
  int64_t bytes = 0;          ///< q, k, v, out (backward: and their gradients) read or written once
  int64_t scratch_bytes = 0;  ///< exact: used beside the outputs, all threads together
  double expected_seconds = 0;  ///< from a coarse machine model; a guide, not a promise
};

/// dq, dk and dv are counted for the backward, and no other gradient.
/// Throws Error for a problem that attention() would refuse, and if a size does not fit 64 bits.
QKV_EXPORT Plan plan(const Problem& problem, const AttentionOptions& options = {});

}  // namespace qkv
