// SPDX-License-Identifier: Apache-2.0
// Tier: plan. The choices of a call, all in one place: which kernel, how rows and keys are cut, how
// many threads. Every tuning number of the library has its name and origin here.
#include "qkv/plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "backward.h"
#include "call.h"
#include "checked_sizes.h"

namespace qkv {
namespace {

// Tasks that a call with few (KV head, row block) pairs is cut into by splitting the keys: enough
// for 16 threads at two tasks each. A split costs one read and one add of its rows' sums.
constexpr int64_t kWantedTasks = 32;
// Shorter parts would spend more on merging than they gain (a part of 512 keys is 4 blocks).
constexpr int64_t kMinSplitKeys = 512;
// Up to here a panel of rows costs more to fill and empty than its products with few keys gain (lesson's
// MQA with weights, 16 rows on 4 keys: 9.6 -> 6.7 us, Zen 5).
constexpr int64_t kRowsOfFewKeys = 64;
// Waking a thread costs about 30 us after a pause (pool, measured on Zen 4); below this share per
// thread it does not pay.
constexpr int64_t kFlopPerThread = 4'000'000;
// Small items go out in batches of about 50 us.
constexpr int64_t kFlopPerTicket = 10'000'000;

// Elements of K and V in a task of KvCache::append(): some tens of microseconds.
constexpr int64_t kAppendTaskElements = 32768;
// What an element costs there, as flop of a product: one that is copied, and one that is converted or
// turned by rope (2 to 8 times a copy; 4096 tokens of 8 heads of 128, Zen 3).
constexpr int64_t kCopyFlop = 20, kConvertFlop = 100;

}  // namespace

Cut cut(const kernels::KernelTable& table, int arithmetic, int64_t num_kv_heads, int64_t rows,
        int64_t n_kv) {
  Cut cut{};
  const bool has_few_keys = arithmetic == 0 && n_kv <= table.small_keys && rows <= kRowsOfFewKeys;
  cut.is_decode = rows > 0 && (rows <= table.decode_rows || has_few_keys);
  cut.task_rows = cut.is_decode ? table.decode_rows : table.task_rows[arithmetic];
  cut.row_blocks = divide_up(rows, cut.task_rows);
  const int64_t tasks =
      std::max<int64_t>(times({num_kv_heads, cut.row_blocks}, "the number of tasks"), 1);
  const int64_t most = std::max<int64_t>(n_kv / kMinSplitKeys, 1);
  cut.kv_splits = std::clamp<int64_t>(divide_up(kWantedTasks, tasks), 1, most);
  const int64_t blocks = divide_up(n_kv, table.tile_kv);
  cut.split_keys =
      times({std::max<int64_t>(divide_up(blocks, cut.kv_splits), 1), table.tile_kv}, "n_kv");
  cut.kv_splits = std::max<int64_t>(divide_up(n_kv, cut.split_keys), 1);
  return cut;
}

int useful_threads(int64_t flop, int64_t items, int num_threads) {
  const double total = static_cast<double>(flop) * static_cast<double>(items);
  const double most =
      std::min(total / static_cast<double>(kFlopPerThread) + 1, static_cast<double>(items));
  return static_cast<int>(std::min(most, static_cast<double>(num_threads)));
}

int64_t items_per_ticket(int64_t item_flop) {
  return std::max<int64_t>(1, kFlopPerTicket / std::max<int64_t>(item_flop, 1));
}

int64_t append_task_tokens(int64_t token_elements) {
  return std::max<int64_t>(1, kAppendTaskElements / std::max<int64_t>(token_elements, 1));
}

int append_threads(int64_t task_elements, bool is_copy, int64_t tasks, int num_threads) {
  return useful_threads(task_elements * (is_copy ? kCopyFlop : kConvertFlop), tasks,
                        num_threads ? num_threads : default_num_threads());
}

Plan plan(const Problem& p, const AttentionOptions& options) {
  for (const int64_t n :
       {p.batch, p.num_heads, p.num_kv_heads, p.n_q, p.n_kv, p.head_dim_qk, p.head_dim_v}) {
    if (n < 0) throw Error(fmt::format("plan: sizes must not be negative, got {}", n));
  }
  if (p.num_kv_heads == 0 ? p.num_heads != 0 : p.num_heads % p.num_kv_heads != 0) {
    throw Error(fmt::format("plan: num_heads {} is not a multiple of num_kv_heads {}", p.num_heads,
                            p.num_kv_heads));
  }
  if (!info(p.dtype).is_float || !info(p.dtype_kv).is_float ||
      (p.dtype == DType::f64) != (p.dtype_kv == DType::f64)) {
    throw Error(fmt::format("plan: element types {} and {} do not go together", name(p.dtype),
                            name(p.dtype_kv)));
  }
  const MaskShape shape{p.batch, p.num_heads, p.n_q, p.n_kv};
  options.mask.check(shape, "plan");
  const kernels::KernelTable& table = kernels::active();
  const int arithmetic = p.dtype == DType::f64 ? 1 : 0;
  const int64_t group = p.num_kv_heads ? p.num_heads / p.num_kv_heads : 1;
  const int64_t rows = times({p.n_q, group}, "n_q * group_size");
  const Cut c = cut(table, arithmetic, p.num_kv_heads, rows, p.n_kv);

  Plan plan;
  plan.isa = info().isa;
  const bool is_empty = p.batch == 0 || rows == 0 || p.num_heads == 0;
  plan.path = is_empty ? "empty" : c.is_decode ? "decode" : "prefill";
  if (is_empty) {
    plan.reason = "there are no query rows";
  } else if (c.is_decode && rows > table.decode_rows) {
    plan.reason = fmt::format(
        "{} keys (at most {}) and {} query rows of a KV head (at most {}): head dim in the lanes",
        p.n_kv, table.small_keys, rows, kRowsOfFewKeys);
  } else if (c.is_decode) {
    plan.reason = fmt::format(
        "{} query rows share a KV head (at most {}): head dim in the lanes, every K and V row is "
        "read once",
        rows, table.decode_rows);
  } else {
    plan.reason =
        fmt::format("{} query rows share a KV head: queries in the lanes, panels of {} rows", rows,
                    table.tile_q[arithmetic]);
  }
  plan.tile_q = c.is_decode ? 1 : table.tile_q[arithmetic];
  plan.tile_kv = table.tile_kv;
  plan.kv_splits = c.kv_splits;
  plan.work_items =
      times({p.batch, p.num_kv_heads, c.row_blocks, c.kv_splits}, "the number of tasks");
  const int64_t heads = times({p.batch, p.num_heads}, "batch * num_heads");
  times({heads, p.n_q, p.n_kv}, "the number of (query, key) pairs");
  plan.visible_pairs = options.mask.count_visible(shape);
  const int64_t dims = plus(p.head_dim_qk, p.head_dim_v, "head_dim_qk + head_dim_v");
  plan.flop = times({2, plan.visible_pairs, dims}, "flop");
  const int64_t kv_rows = times({p.batch, p.num_kv_heads, p.n_kv}, "the number of keys");
  plan.bytes = plus(times({heads, p.n_q, dims, size_bytes(p.dtype)}, "bytes of q and out"),
                    times({kv_rows, dims, size_bytes(p.dtype_kv)}, "bytes of k and v"), "bytes");
  const int64_t item_flop = static_cast<int64_t>(
      static_cast<double>(plan.flop) / static_cast<double>(std::max<int64_t>(plan.work_items, 1)));
  const int wanted = options.num_threads ? options.num_threads : default_num_threads();
  plan.num_threads = std::max(1, useful_threads(item_flop, plan.work_items, wanted));
  const auto& scratch = c.is_decode ? table.decode_scratch_bytes : table.prefill_scratch_bytes;
  const int64_t item_bytes = arithmetic ? 8 : 4;
  const int64_t state = 2 * c.task_rows * item_bytes;
  plan.scratch_bytes = times(
      {plus(scratch[arithmetic](p.head_dim_qk, p.head_dim_v), state, "scratch"), plan.num_threads},
      "scratch");
  if (c.kv_splits > 1) {
    const int64_t part = (c.task_rows * (p.head_dim_v + 2) + 31) / 32 * 32 * item_bytes;
    plan.scratch_bytes =
        plus(plan.scratch_bytes, times({part, plan.work_items}, "scratch of splits"), "scratch");
  }
  if (p.want_mean_weights || p.want_row_weights || p.want_column_sums) {
    plan.scratch_bytes = plus(plan.scratch_bytes,
                              times({2, heads, p.n_q, item_bytes}, "scratch of states"), "scratch");
  }
  if (p.pass != Pass::forward && !is_empty) describe_backward(p, options, &plan);
  // Coarse model: 0.9 of two FMAs per cycle at 3.5 GHz, or 15 GB/s per thread, whichever is slower.
  const double lanes = static_cast<double>(table.tile_q[arithmetic]) / 2;
  const double flops = 0.9 * lanes * 4 * 3.5e9 * plan.num_threads;
  plan.expected_seconds = std::max(static_cast<double>(plan.flop) / flops,
                                   static_cast<double>(plan.bytes) / (15e9 * plan.num_threads)) +
                          1e-6;
  return plan;
}

}  // namespace qkv
