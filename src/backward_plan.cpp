// SPDX-License-Identifier: Apache-2.0
// Tier: plan. The choices of a backward call, with their origins.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "backward.h"
#include "checked_sizes.h"

namespace qkv {
namespace {

// Tasks that one batch entry is cut into where it has few KV heads.
constexpr int64_t kWantedTasks = 16;
// A part clears, writes and reads dk and dv of all keys once more: 2 % of 512 rows' products (Zen 5,
// head_dim 64).
constexpr int64_t kMinPartRows = 512;
// Parts hold dk and dv of all keys each. Four of them are 8 times the memory of one dq for MHA
// (32 MB for 16,384 tokens of head_dim 64); a group of heads shares them.
constexpr int64_t kMaxParts = 4;

}  // namespace

BackwardCut backward_cut(const kernels::KernelTable& table, int arithmetic, int64_t num_kv_heads,
                         int64_t group_size, int64_t n_q) {
  BackwardCut cut{};
  cut.task_rows = table.task_rows[arithmetic];
  const int64_t group = std::max<int64_t>(group_size, 1);
  const int64_t rows = n_q * group;
  const int64_t most =
      std::max<int64_t>(std::min(std::max(kMaxParts, 2 * group), rows / kMinPartRows), 1);
  cut.parts =
      std::clamp<int64_t>(divide_up(kWantedTasks, std::max<int64_t>(num_kv_heads, 1)), 1, most);
  // Whole kernel calls in every part but the last.
  const int64_t step = cut.task_rows / std::gcd(cut.task_rows, group);
  cut.part_tokens = std::max<int64_t>(divide_up(divide_up(n_q, cut.parts), step) * step, 1);
  cut.parts = std::max<int64_t>(divide_up(n_q, cut.part_tokens), 1);
  return cut;
}

bool splits_parts(const BackwardCut& cut, int64_t pairs, int num_threads) {
  // Four pairs per thread level out what masks make uneven.
  return cut.parts > 1 && num_threads > 1 && pairs < 4 * num_threads;
}

int64_t pairs_at_once(const BackwardCut& cut, int64_t pairs, int num_threads) {
  return std::clamp<int64_t>(divide_up(2 * num_threads, cut.parts), 1, std::max<int64_t>(pairs, 1));
}

int64_t part_elements(const kernels::KernelTable& table, int arithmetic, int64_t n_kv,
                      int64_t head_dim_qk, int64_t head_dim_v) {
  const auto& row = table.backward_row_elements[arithmetic];
  const int64_t align = kernels::kAlignment / (arithmetic ? 8 : 4);
  return divide_up(n_kv * row(head_dim_qk), align) * align +
         divide_up(n_kv * row(head_dim_v), align) * align;
}

void describe_backward(const Problem& p, const AttentionOptions& options, Plan* plan) {
  const kernels::KernelTable& table = kernels::active();
  const int arithmetic = p.dtype == DType::f64 ? 1 : 0;
  const int64_t item_bytes = arithmetic ? 8 : 4;
  const int64_t heads = p.batch * p.num_heads, kv_heads = p.batch * p.num_kv_heads;
  plan->kv_splits = 1;
  plan->tile_kv = table.tile_kv;
  plan->tile_q = table.tile_q[arithmetic];
  plan->flop =
      times({2, plan->visible_pairs,
             plus(times({3, p.head_dim_qk}, "flop"), times({2, p.head_dim_v}, "flop"), "flop")},
            "flop");
  // q, dq, out, dout; k, dk, v, dv; lse.
  plan->bytes = plus(
      times({heads, p.n_q,
             plus(times({2, plus(p.head_dim_qk, p.head_dim_v, "bytes"), size_bytes(p.dtype)},
                        "bytes"),
                  item_bytes, "bytes")},
            "bytes"),
      times(
          {2, kv_heads, p.n_kv, plus(p.head_dim_qk, p.head_dim_v, "bytes"), size_bytes(p.dtype_kv)},
          "bytes"),
      "bytes");
  if (p.pass == Pass::double_backward) {
    plan->path = "reference";
    plan->reason =
        "second derivatives are the reference's plain loops in double, on one thread: for gradient "
        "checks and small problems";
    plan->work_items = 1, plan->num_threads = 1;
    // The results in double; a row of scores is small beside them.
    plan->scratch_bytes = times(
        {8, plus(times({heads, p.n_q}, "scratch"), times({kv_heads, p.n_kv}, "scratch"), "scratch"),
         plus(p.head_dim_qk, p.head_dim_v, "scratch")},
        "scratch");
    return;
  }
  const BackwardCut cut =
      backward_cut(table, arithmetic, p.num_kv_heads, p.num_heads / p.num_kv_heads, p.n_q);
  const int wanted = options.num_threads ? options.num_threads : default_num_threads();
  const bool split = splits_parts(cut, kv_heads, wanted);
  plan->path = "backward";
  plan->reason = fmt::format(
      "weights are recomputed from lse in panels of {} rows; the rows of a KV head are {} part{} "
      "whose dk and dv are added in order{}",
      plan->tile_q, cut.parts, cut.parts == 1 ? "" : "s", split ? ", each a task" : "");
  plan->work_items = times({kv_heads, split ? cut.parts : 1}, "the number of tasks");
  const int64_t item_flop =
      static_cast<int64_t>(static_cast<double>(plan->flop) / static_cast<double>(plan->work_items));
  plan->num_threads = std::max(1, useful_threads(item_flop, plan->work_items, wanted));
  const int64_t kernel = table.backward_scratch_bytes[arithmetic](p.head_dim_qk, p.head_dim_v);
  const int64_t pair =
      times({cut.parts, part_elements(table, arithmetic, p.n_kv, p.head_dim_qk, p.head_dim_v),
             item_bytes},
            "scratch");
  const int64_t pairs = split ? pairs_at_once(cut, kv_heads, wanted) : plan->num_threads;
  plan->scratch_bytes = plus(times({kernel, plan->num_threads}, "scratch"),
                             times({pair, pairs}, "scratch"), "scratch");
}

}  // namespace qkv
