// SPDX-License-Identifier: Apache-2.0
// Tier: plan. One validated call of attention_backward(): numbers only, nothing left to check.
#pragma once
#include <cstdint>

#include "call.h"
#include "qkv/attention.h"
#include "qkv/plan.h"

namespace qkv {

struct BackwardCall {
  Call call;  // of the forward, without results
  ConstTensor out, lse, dout, dlse;
  BackwardOutputs outputs;
};

/// How the rows of a (batch, KV head) are cut. Each part sums what its rows add to dk and dv; the
/// parts are then added in order of the rows. Depends on the shape (not the batch) and the
/// instruction set alone: the bits depend on neither threads nor batch.
struct BackwardCut {
  int64_t task_rows;    // rows (token, head of the group) of a kernel call
  int64_t parts;        // per (batch, KV head)
  int64_t part_tokens;  // query tokens of a part: the heads of a token stay together
};
BackwardCut backward_cut(const kernels::KernelTable& table, int arithmetic, int64_t num_kv_heads,
                         int64_t group_size, int64_t n_q);  // backward_plan.cpp

/// True if parts go out as tasks of their own, for want of (batch, KV head) pairs; the results are
/// the same. backward_plan.cpp.
bool splits_parts(const BackwardCut& cut, int64_t pairs, int num_threads);
/// (batch, KV head) pairs whose parts are held at a time when parts are tasks. backward_plan.cpp.
int64_t pairs_at_once(const BackwardCut& cut, int64_t pairs, int num_threads);
/// Elements of the dk and dv of one part.
int64_t part_elements(const kernels::KernelTable& table, int arithmetic, int64_t n_kv,
                      int64_t head_dim_qk, int64_t head_dim_v);  // backward_plan.cpp

/// Replaces what differs from the forward in the plan of a backward. backward_plan.cpp.
void describe_backward(const Problem& problem, const AttentionOptions& options, Plan* plan);

/// Runs a call. backward_schedule.cpp.
void run(const BackwardCall& call);

}  // namespace qkv
