// SPDX-License-Identifier: Apache-2.0
// Tier: schedule. Cuts a validated call into tasks, runs them on the executor and merges the parts
// of split rows. The cut and the order of merging depend on the shape alone, so the bits depend on
// neither threads nor batch.
#include "schedule.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <deque>
#include <memory>
#include <new>
#include <numeric>
#include <utility>
#include <vector>

#include "call.h"
#include "checked_sizes.h"
#include "kept_memory.h"
#include "task.h"
#include "weight_pass.h"

namespace qkv {

ScratchBuffer::~ScratchBuffer() {
  ::operator delete (data_, std::align_val_t{kernels::kAlignment});
}

void* ScratchBuffer::reserve(int64_t bytes) {
  if (bytes > bytes_) {
    ::operator delete (data_, std::align_val_t{kernels::kAlignment});
    data_ = nullptr, bytes_ = 0;
    data_ = ::operator new (static_cast<size_t>(bytes), std::align_val_t{kernels::kAlignment});
    bytes_ = bytes;
  }
  return data_;
}

namespace {

using kernels::AttentionTask;

// One call, cut into blocks of rows of one (batch, KV head), each with kv_splits parts.
class Schedule {
 public:
  explicit Schedule(const Call& call)
      : call_(call),
        cut_(cut(*call.kernels, call.arithmetic, call.num_kv_heads, call.n_q * call.group_size,
                 call.n_kv)),
        is_small_(cut_.is_decode && call.arithmetic == 0 && !call.keys && !call.forms &&
                  call.n_kv <= call.kernels->small_keys),
        num_blocks_(is_small_ ? call.batch : call.batch * call.num_kv_heads * cut_.row_blocks),
        maker_(call, (cut_.is_decode ? call.kernels->decode_scratch_bytes
                                     : call.kernels->prefill_scratch_bytes)[call.arithmetic](
                         call.head_dim_qk, call.head_dim_v)) {
    part_elements_ = divide_up(cut_.task_rows * (call.head_dim_v + 2), 32) * 32;
  }

  int64_t num_items() const { return num_blocks_ * cut_.kv_splits; }
  // An upper bound of the work of one item.
  int64_t item_flop() const {
    return 2 *
           (is_small_ ? call_.num_kv_heads * num_rows() : std::min(cut_.task_rows, num_rows())) *
           std::min(call_.n_kv, cut_.split_keys) * (call_.head_dim_qk + call_.head_dim_v);
  }

  // The parts of split rows, then the states of all rows if they are needed after their tasks.
  int64_t memory_bytes() const { return parts_bytes() + states_bytes(); }
  void use_memory(char* memory) {
    if (needs_states(call_)) states_ = memory + parts_bytes();
    if (cut_.kv_splits == 1) return;
    parts_ = memory;
    missing_ = std::make_unique<std::atomic<int32_t>[]>(static_cast<size_t>(num_blocks_));
    for (int64_t i = 0; i < num_blocks_; ++i)
      missing_[static_cast<size_t>(i)] = static_cast<int32_t>(cut_.kv_splits);
  }

  // Keys that the last row of an item's block sees: a measure of its length.
  int64_t visible_keys(int64_t item) const {
    if (!items_differ()) return call_.n_kv;
    const TaskPlace place = place_of(item / cut_.kv_splits);
    RowRange range;
    const int64_t last = (place.row_begin + place.n_rows - 1) / call_.group_size;
    call_.options->mask.row_ranges(call_.mask_shape(), call_.first_entry + place.b, last, 1,
                                   &range);
    return range.hi - range.lo;
  }
  bool items_differ() const { return maker_.has_ranges() && !is_small_; }

  // What is left when all items are done.
  void add_weight_pass(std::deque<WeightPass>* passes) const {
    if (needs_states(call_)) passes->emplace_back(call_, cut_, maker_, states_);
  }

  void run_item(int64_t item) {
    TaskMemory& memory = task_memory();
    if (is_small_) {
      run_small(item, &memory);
    } else if (cut_.kv_splits == 1) {
      run_whole(place_of(item), &memory);
    } else {
      run_part(item / cut_.kv_splits, item % cut_.kv_splits, &memory);
    }
  }

 private:
  int64_t num_rows() const { return call_.n_q * call_.group_size; }
  int64_t parts_bytes() const {
    return cut_.kv_splits > 1 ? num_items() * part_elements_ * call_.arithmetic_bytes() : 0;
  }
  int64_t states_bytes() const {
    return needs_states(call_) ? call_.batch * WeightPass::state_bytes(call_) : 0;
  }

  TaskPlace place_of(int64_t block) const {
    const int64_t pair = cut_.row_blocks == 1 ? block : block / cut_.row_blocks;
    const int64_t begin = (block - pair * cut_.row_blocks) * cut_.task_rows;
    return {pair / call_.num_kv_heads, pair % call_.num_kv_heads, begin,
            std::min(cut_.task_rows, num_rows() - begin)};
  }

  // A task with its results; the state has room for state_rows rows.
  AttentionTask make_task(const TaskPlace& place, int64_t state_rows, TaskMemory* memory) const {
    AttentionTask task = maker_.make(place, memory);
    const int64_t bytes = call_.arithmetic_bytes();
    if (states_) {
      WeightPass::use_state(call_, place, states_, &task);
    } else {
      char* state = static_cast<char*>(memory->state.reserve(2 * state_rows * bytes));
      task.state_m = state, task.state_l = state + state_rows * bytes;
    }
    const Tensor& out = call_.out;
    // Without out no values are needed. Decode reads them all the same: its runs of keys, and with
    // them the bits of lse, depend on their size.
    if (!out && !cut_.is_decode) task.head_dim_v = 0;
    if (out) {
      task.out_dtype = out.dtype, task.out_token_stride = out.stride[2],
      task.out_head_stride = out.stride[1];
      const int64_t offset =
          place.b * out.stride[0] + place.h_kv * call_.group_size * out.stride[1];
      task.out = element_pointer(out, offset);
    }
    return task;
  }

  void attend(const AttentionTask& task) const {
    (cut_.is_decode ? call_.kernels->decode : call_.kernels->prefill)[call_.arithmetic](task);
  }

  void run_small(int64_t b, TaskMemory* memory) const;
  void run_whole(const TaskPlace& place, TaskMemory* memory) const;
  void run_part(int64_t block, int64_t split, TaskMemory* memory);

  // Part of a split: n_rows x head_dim_v sums, then m and l.
  char* part(int64_t block, int64_t split) const {
    return parts_ + (block * cut_.kv_splits + split) * part_elements_ * call_.arithmetic_bytes();
  }
  void use_part(AttentionTask* task, int64_t block, int64_t split) const {
    const int64_t bytes = call_.arithmetic_bytes();
    char* p = part(block, split);
    task->out = p;
    task->state_m = p + cut_.task_rows * call_.head_dim_v * bytes;
    task->state_l = p + cut_.task_rows * (call_.head_dim_v + 1) * bytes;
  }

  // Adds the parts of a block in key order.
  template <class T>
  void merge(const AttentionTask& task, int64_t block) const {
    T* m = static_cast<T*>(task.state_m);
    T* l = static_cast<T*>(task.state_l);
    std::vector<T> row(static_cast<size_t>(call_.head_dim_v));
    for (int64_t r = 0; r < task.n_rows; ++r) {
      T reference = 0;
      bool started = false;
      for (int64_t s = 0; s < cut_.kv_splits; ++s) {
        AttentionTask p{};
        use_part(&p, block, s);
        const T sum = static_cast<const T*>(p.state_l)[r];
        if (sum == 0) continue;
        const T at = static_cast<const T*>(p.state_m)[r];
        reference = started ? std::max(reference, at) : at;
        started = true;
      }
      T total = 0;
      std::fill(row.begin(), row.end(), T{0});
      for (int64_t s = 0; s < cut_.kv_splits; ++s) {
        AttentionTask p{};
        use_part(&p, block, s);
        const T sum = static_cast<const T*>(p.state_l)[r];
        if (sum == 0) continue;
        const T factor = std::exp2(2 * (static_cast<const T*>(p.state_m)[r] - reference));
        total += sum * factor;
        if (!task.out) continue;
        const T* from = static_cast<const T*>(p.out) + r * call_.head_dim_v;
        for (int64_t d = 0; d < call_.head_dim_v; ++d)
          row[static_cast<size_t>(d)] += from[d] * factor;
      }
      m[r] = reference, l[r] = total;
      if (task.out) store_row(task, r, row.data(), total);
    }
  }

  template <class T>
  void store_row(const AttentionTask& task, int64_t r, const T* row, T total) const {
    const int64_t token = (task.row_begin + r) / call_.group_size,
                  head = (task.row_begin + r) % call_.group_size;
    const int64_t offset = token * task.out_token_stride + head * task.out_head_stride;
    const T factor = total == 0 ? T{0} : 1 / total;
    for (int64_t d = 0; d < call_.head_dim_v; ++d) {
      const T value = row[d] * factor;
      switch (task.out_dtype) {
        case DType::bf16:
          static_cast<bf16_t*>(task.out)[offset + d] = to_bf16(static_cast<float>(value));
          break;
        case DType::f16:
          static_cast<f16_t*>(task.out)[offset + d] = to_f16(static_cast<float>(value));
          break;
        default:
          static_cast<T*>(task.out)[offset + d] = value;
      }
    }
  }

  // lse, weights and their forms by row of a block, from the state that its attention left.
  void finish(const TaskPlace& place, AttentionTask* task) const {
    if (call_.lse)
      call_.arithmetic == 0 ? store_lse<float>(place, *task) : store_lse<double>(place, *task);
    const AttentionOutputs* forms = call_.forms;
    if (!call_.weights && !(forms && (forms->top_weights || forms->entropy))) return;
    if (call_.weights) use_weights(place, task);
    (cut_.is_decode
         ? call_.kernels->decode_weights
         : call_.kernels->prefill_weights)[call_.arithmetic](*task, row_forms(call_, place));
  }

  void use_weights(const TaskPlace& place, AttentionTask* task) const {
    const Tensor& w = call_.weights;
    task->weights = group_pointer(call_, w, place);
    task->weights_token_stride = w.stride[2], task->weights_head_stride = w.stride[1];
  }

  template <class T>
  void store_lse(const TaskPlace& place, const AttentionTask& task) const {
    const T* m = static_cast<const T*>(task.state_m);
    const T* l = static_cast<const T*>(task.state_l);
    constexpr double kLn2 = 0.69314718055994530942;
    for (int64_t r = 0; r < task.n_rows; ++r) {
      const int64_t token = (task.row_begin + r) / call_.group_size,
                    head = (task.row_begin + r) % call_.group_size;
      const int64_t offset = place.b * call_.lse.stride[0] +
                             (place.h_kv * call_.group_size + head) * call_.lse.stride[1] +
                             token * call_.lse.stride[2];
      const double sum = static_cast<double>(l[r]);
      static_cast<T*>(call_.lse.data)[offset] =
          static_cast<T>((2 * static_cast<double>(m[r]) + std::log2(sum)) * kLn2);
    }
  }

  const Call& call_;
  const Cut cut_;
  const bool is_small_;  // blocks are batch entries, with all their heads
  const int64_t num_blocks_;
  const TaskMaker maker_;
  int64_t part_elements_ = 0;
  char* parts_ = nullptr;
  char* states_ = nullptr;  // of all rows; nullptr: not needed after their tasks
  std::unique_ptr<std::atomic<int32_t>[]> missing_;
};

// All heads of a batch entry.
void Schedule::run_small(int64_t b, TaskMemory* memory) const {
  const Call& c = call_;
  AttentionTask task = make_task({b, 0, 0, num_rows()}, c.num_kv_heads * num_rows(), memory);
  task.sinks = c.sinks.data();
  if (c.weights) use_weights({b, 0, 0, num_rows()}, &task);
  const kernels::HeadSteps steps{
      c.num_kv_heads, c.group_size * c.q.stride[1],   c.k.stride[1],
      c.v.stride[1],  c.group_size * c.out.stride[1], c.group_size * c.weights.stride[1]};
  if (!c.kernels->decode_small(task, steps)) {
    for (int64_t h = 0; h < c.num_kv_heads; ++h)
      for (int64_t row = 0; row < num_rows(); row += cut_.task_rows)
        run_whole({b, h, row, std::min(cut_.task_rows, num_rows() - row)}, memory);
    return;
  }
  if (!c.lse) return;
  for (int64_t h = 0; h < c.num_kv_heads; ++h) {
    store_lse<float>({b, h, 0, num_rows()}, task);
    task.state_m = static_cast<float*>(task.state_m) + num_rows();
    task.state_l = static_cast<float*>(task.state_l) + num_rows();
  }
}

// A block of rows with all of its keys.
void Schedule::run_whole(const TaskPlace& place, TaskMemory* memory) const {
  AttentionTask task = make_task(place, cut_.task_rows, memory);
  if (call_.sinks.data()) task.sinks = call_.sinks.data() + place.h_kv * call_.group_size;
  attend(task);
  finish(place, &task);
}

// A block of rows with one part of its keys; who finishes last merges.
void Schedule::run_part(int64_t block, int64_t split, TaskMemory* memory) {
  const TaskPlace place = place_of(block);
  AttentionTask task = make_task(place, cut_.task_rows, memory);
  AttentionTask part = task;
  part.kv_begin = std::min(split * cut_.split_keys, call_.n_kv);
  part.kv_end = std::min(part.kv_begin + cut_.split_keys, call_.n_kv);
  use_part(&part, block, split);
  if (split == 0 && call_.sinks.data())
    part.sinks = call_.sinks.data() + place.h_kv * call_.group_size;
  part.unnormalised = true;
  attend(part);
  if (missing_[static_cast<size_t>(block)].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  call_.arithmetic == 0 ? merge<float>(task, block) : merge<double>(task, block);
  finish(place, &task);
}

// Items of one or several calls as the tickets of one job.
struct Job {
  std::deque<Schedule> schedules;
  ItemList items;
  std::vector<int64_t> order;  // items, longest first; empty: as they come
  int64_t per_ticket = 1;

  void run_item(int64_t item) {
    const size_t schedule = items.find(&item);
    schedules[schedule].run_item(item);
  }
  static void run_ticket(void* self, int64_t ticket) {
    Job& job = *static_cast<Job*>(self);
    const int64_t end = std::min(job.items.size(), (ticket + 1) * job.per_ticket);
    for (int64_t i = ticket * job.per_ticket; i < end; ++i)
      job.run_item(job.order.empty() ? i : job.order[static_cast<size_t>(i)]);
  }
};

}  // namespace

void run(const Call& call) { run(std::span<const Call>(&call, 1)); }

void run(std::span<const Call> calls) {
  if (calls.empty()) return;
  const AttentionOptions& options = *calls[0].options;
  const int wanted = options.num_threads ? options.num_threads : default_num_threads();
  KeptMemory<ScratchBuffer> kept;  // for parts and states
  ScratchBuffer& memory = kept.get();
  if (calls.size() == 1) {  // small calls count nanoseconds: no lists
    Schedule schedule(calls[0]);
    if (useful_threads(schedule.item_flop(), schedule.num_items(), wanted) <= 1 &&
        !options.executor) {
      schedule.use_memory(static_cast<char*>(memory.reserve(schedule.memory_bytes())));
      for (int64_t i = 0; i < schedule.num_items(); ++i) schedule.run_item(i);
      if (needs_states(calls[0])) {
        std::deque<WeightPass> passes;
        schedule.add_weight_pass(&passes);
        WeightPass::run(passes, 1, nullptr);
      }
      return;
    }
  }
  Job job;
  int64_t bytes = 0, most_flop = 0;
  double flop = 0;
  bool differ = calls.size() > 1;
  for (const Call& call : calls) {
    const Schedule& s = job.schedules.emplace_back(call);
    job.items.add(s.num_items());
    bytes += s.memory_bytes();
    flop += static_cast<double>(s.item_flop()) * static_cast<double>(s.num_items());
    if (s.num_items() > 0) most_flop = std::max(most_flop, s.item_flop());
    differ |= s.items_differ();
  }
  const int64_t items = job.items.size();
  char* at = static_cast<char*>(memory.reserve(bytes));
  for (Schedule& s : job.schedules) s.use_memory(at), at += s.memory_bytes();
  const auto finish = [&](int threads) {
    std::deque<WeightPass> passes;
    for (const Schedule& s : job.schedules) s.add_weight_pass(&passes);
    WeightPass::run(passes, threads, options.executor);
  };
  if (items == 0) return finish(1);
  const int threads =
      useful_threads(static_cast<int64_t>(flop / static_cast<double>(items)), items, wanted);
  if (threads <= 1 && !options.executor) {
    for (int64_t i = 0; i < items; ++i) job.run_item(i);
    return finish(1);
  }
  // Small items go out in batches; long ones first.
  job.per_ticket = items_per_ticket(most_flop);
  if (differ) {
    std::vector<int64_t> keys(static_cast<size_t>(items));
    for (int64_t i = 0; i < items; ++i) {
      int64_t item = i;
      const size_t schedule = job.items.find(&item);
      keys[static_cast<size_t>(i)] = job.schedules[schedule].visible_keys(item);
    }
    job.order.resize(static_cast<size_t>(items));
    std::iota(job.order.begin(), job.order.end(), int64_t{0});
    std::stable_sort(job.order.begin(), job.order.end(), [&](int64_t a, int64_t b) {
      return keys[static_cast<size_t>(a)] > keys[static_cast<size_t>(b)];
    });
  }
  Executor& executor = options.executor ? *options.executor : default_executor();
  executor.run((items + job.per_ticket - 1) / job.per_ticket, threads, &Job::run_ticket, &job);
  finish(std::max(threads, 1));
}

}  // namespace qkv
