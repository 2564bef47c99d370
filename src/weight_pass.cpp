// SPDX-License-Identifier: Apache-2.0
// Tier: schedule. See weight_pass.h.
#include "weight_pass.h"

#include <algorithm>
#include <cstring>

#include "checked_sizes.h"

namespace qkv {
namespace {

using kernels::AttentionTask;
using kernels::WeightForms;

// Keys of an item: its K and its sums stay in L2, and packing the queries anew for each costs 2 % of
// the scores at head dim 64. The bits do not depend on it.
constexpr int64_t kPassKeys = 512;

void clear(void* data, int64_t bytes) {
  if (bytes > 0) std::memset(data, 0, static_cast<size_t>(bytes));
}

}  // namespace

WeightForms row_forms(const Call& call, const TaskPlace& place) {
  WeightForms f{};
  if (!call.forms) return f;
  const Tensor &w = call.forms->top_weights, &keys = call.forms->top_keys,
               &entropy = call.forms->entropy;
  if (w) {
    f.top_k = w.shape[3], f.top_weights = group_pointer(call, w, place);
    f.top_keys = static_cast<int64_t*>(group_pointer(call, keys, place));
    f.top_weights_token_stride = w.stride[2], f.top_weights_head_stride = w.stride[1];
    f.top_keys_token_stride = keys.stride[2], f.top_keys_head_stride = keys.stride[1];
  }
  if (entropy) {
    f.entropy = group_pointer(call, entropy, place);
    f.entropy_token_stride = entropy.stride[2], f.entropy_head_stride = entropy.stride[1];
  }
  return f;
}

WeightPass::WeightPass(const Call& call, const Cut& cut, const TaskMaker& maker, char* states)
    : call_(call), cut_(cut), maker_(maker), states_(states) {
  chunks_ = divide_up(call.n_kv, kPassKeys);
  mean_tokens_ = std::max<int64_t>(cut.task_rows / std::max<int64_t>(call.group_size, 1), 1);
  const AttentionOutputs& forms = *call.forms;
  if (forms.column_sums) num_columns_ = call.batch * call.num_kv_heads * chunks_;
  if (forms.mean_weights) {
    mean_blocks_ = divide_up(call.n_q, mean_tokens_);
    num_means_ = call.batch * mean_blocks_ * chunks_;
  }
  if (forms.row_weights) {
    find_runs();
    num_rows_ = call.batch * call.num_kv_heads * static_cast<int64_t>(runs_.size()) * chunks_;
  }
}

void WeightPass::find_runs() {
  const int64_t most = mean_tokens_;  // tokens of a task
  for (const WeightRow& row : call_.weight_rows) {
    const Run* last = runs_.empty() ? nullptr : &runs_.back();
    if (last && last->token + last->count == row.token && last->slot + last->count == row.slot &&
        last->count < most) {
      ++runs_.back().count;
    } else {
      runs_.push_back({row.slot, row.token, 1});
    }
  }
}

int64_t WeightPass::state_bytes(const Call& call) {
  return 2 * call.num_kv_heads * call.n_q * call.group_size * call.arithmetic_bytes();
}

void WeightPass::use_state(const Call& call, const TaskPlace& place, char* states,
                           AttentionTask* task) {
  const int64_t rows = call.n_q * call.group_size, bytes = call.arithmetic_bytes();
  char* m =
      states + ((place.b * call.num_kv_heads + place.h_kv) * 2 * rows + place.row_begin) * bytes;
  task->state_m = m, task->state_l = m + rows * bytes;
}

int64_t WeightPass::item_flop() const {
  const double keys = static_cast<double>(std::min(call_.n_kv, kPassKeys));
  const double row_flop = 2 * keys * static_cast<double>(call_.head_dim_qk);
  const double rows = static_cast<double>(num_rows());
  const double flop = static_cast<double>(num_columns_) * rows +
                      static_cast<double>(num_means_) *
                          static_cast<double>(std::min(mean_tokens_, call_.n_q) * call_.num_heads) +
                      static_cast<double>(num_rows_) * static_cast<double>(call_.group_size);
  return static_cast<int64_t>(row_flop * flop /
                              static_cast<double>(std::max<int64_t>(num_items(), 1)));
}

WeightPass::Keys WeightPass::keys_of(int64_t chunk) const {
  return {chunk * kPassKeys, std::min((chunk + 1) * kPassKeys, call_.n_kv)};
}

void WeightPass::run_item(int64_t item) const {
  const Keys keys = keys_of(item % chunks_);  // every form has a multiple of chunks_ items
  if (item < num_columns_) return sum_columns(item / chunks_, keys);
  item -= num_columns_;
  if (item < num_means_) {
    const int64_t block = item / chunks_;
    return add_means(block / mean_blocks_, block % mean_blocks_ * mean_tokens_, keys);
  }
  item -= num_means_;
  const int64_t runs = static_cast<int64_t>(runs_.size()), at = item / chunks_;
  store_rows(at / runs, runs_[static_cast<size_t>(at % runs)], keys);
}

template <class F>
void WeightPass::for_tasks(const TaskPlace& rows, const Keys& keys, F f) const {
  TaskMemory& memory = task_memory();
  const int64_t first = rows.row_begin, end = first + rows.n_rows;
  for (int64_t row = first; row < end; row += cut_.task_rows) {
    const TaskPlace place{rows.b, rows.h_kv, row, std::min(cut_.task_rows, end - row)};
    AttentionTask task = maker_.make(place, &memory);
    task.kv_begin = keys.begin, task.kv_end = keys.end;
    use_state(call_, place, states_, &task);
    f(task);
  }
}

void WeightPass::make(const AttentionTask& task, const WeightForms& forms) const {
  (cut_.is_decode ? call_.kernels->decode_weights
                  : call_.kernels->prefill_weights)[call_.arithmetic](task, forms);
}

void WeightPass::sum_columns(int64_t pair, const Keys& keys) const {
  const int64_t b = pair / call_.num_kv_heads, h_kv = pair % call_.num_kv_heads;
  const Tensor& t = call_.forms->column_sums;
  WeightForms forms{};
  forms.column_sums = element_pointer(t, b * t.stride[0] + h_kv * call_.group_size * t.stride[1]);
  forms.column_sums_head_stride = t.stride[1];
  for (int64_t g = 0; g < call_.group_size; ++g) {
    const int64_t h = h_kv * call_.group_size + g;
    clear(element_pointer(t, b * t.stride[0] + h * t.stride[1] + keys.begin),
          (keys.end - keys.begin) * call_.arithmetic_bytes());
  }
  for_tasks({b, h_kv, 0, num_rows()}, keys, [&](const AttentionTask& task) { make(task, forms); });
}

void WeightPass::add_means(int64_t b, int64_t first_token, const Keys& keys) const {
  const Tensor& t = call_.forms->mean_weights;
  const int64_t tokens = std::min(mean_tokens_, call_.n_q - first_token);
  WeightForms forms{};
  forms.mean = element_pointer(t, b * t.stride[0]);
  forms.mean_token_stride = t.stride[1];
  forms.mean_factor = 1.0 / static_cast<double>(call_.num_heads);
  for (int64_t i = first_token; i < first_token + tokens; ++i) {
    clear(element_pointer(t, b * t.stride[0] + i * t.stride[1] + keys.begin),
          (keys.end - keys.begin) * call_.arithmetic_bytes());
  }
  for (int64_t h_kv = 0; h_kv < call_.num_kv_heads; ++h_kv) {
    for_tasks({b, h_kv, first_token * call_.group_size, tokens * call_.group_size}, keys,
              [&](const AttentionTask& task) { make(task, forms); });
  }
}

void WeightPass::store_rows(int64_t pair, const Run& run, const Keys& keys) const {
  const int64_t b = pair / call_.num_kv_heads, h_kv = pair % call_.num_kv_heads;
  const Tensor& t = call_.forms->row_weights;
  for_tasks({b, h_kv, run.token * call_.group_size, run.count * call_.group_size}, keys,
            [&](AttentionTask task) {
              task.weights =
                  element_pointer(t, b * t.stride[0] + h_kv * call_.group_size * t.stride[1] +
                                         run.slot * t.stride[2]);
              task.weights_token_stride = t.stride[2], task.weights_head_stride = t.stride[1];
              task.weights_first_token = run.token;
              make(task, {});
            });
}

void WeightPass::run(const std::deque<WeightPass>& passes, int num_threads, Executor* executor) {
  struct Tickets {
    const std::deque<WeightPass>& passes;
    ItemList items;
    int64_t per_ticket;
    void run_item(int64_t item) const {
      const size_t pass = items.find(&item);
      passes[pass].run_item(item);
    }
    static void run(void* self, int64_t ticket) {
      const Tickets& t = *static_cast<Tickets*>(self);
      const int64_t end = std::min(t.items.size(), (ticket + 1) * t.per_ticket);
      for (int64_t i = ticket * t.per_ticket; i < end; ++i) t.run_item(i);
    }
  } tickets{passes, {}, 1};
  int64_t most_flop = 0;
  double flop = 0;
  for (const WeightPass& pass : passes) {
    tickets.items.add(pass.num_items());
    if (pass.num_items() == 0) continue;
    flop += static_cast<double>(pass.item_flop()) * static_cast<double>(pass.num_items());
    most_flop = std::max(most_flop, pass.item_flop());
  }
  const int64_t items = tickets.items.size();
  if (items == 0) return;
  const int threads =
      useful_threads(static_cast<int64_t>(flop / static_cast<double>(items)), items, num_threads);
  if (threads <= 1 && !executor) {
    for (int64_t i = 0; i < items; ++i) tickets.run_item(i);
    return;
  }
  tickets.per_ticket = items_per_ticket(most_flop);
  (executor ? *executor : default_executor())
      .run(divide_up(items, tickets.per_ticket), std::max(threads, 1), &Tickets::run, &tickets);
}

}  // namespace qkv
