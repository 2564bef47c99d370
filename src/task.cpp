// SPDX-License-Identifier: Apache-2.0
// Tier: schedule. See task.h.
#include "task.h"

#include <atomic>

namespace qkv {
namespace {

// Tells the makers of a process apart, so that ranges kept by a thread are never another call's.
uint64_t next_serial() {
  static std::atomic<uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace

TaskMemory& task_memory() {
  thread_local TaskMemory memory;
  return memory;
}

TaskMaker::TaskMaker(const Call& call, int64_t kernel_scratch_bytes)
    : call_(call),
      kernel_scratch_bytes_(kernel_scratch_bytes),
      documents_(scattered_documents(call.options->mask)),
      has_ranges_(!call.options->mask.is_full()),
      has_dense_(call.options->mask.has_dense() || call.options->bias),
      serial_(has_ranges_ ? next_serial() : 0),
      common_{} {
  for_each_dense([&](size_t i, const ConstTensor& d, const DenseTiles* tiles) {
    const bool wanted = !tiles && wants_dense_tiles(d, call_.mask_shape());
    if (!wanted && tiles_.empty()) return;  // small calls allocate nothing
    tiles_.resize(i + 1);
    if (wanted) tiles_[i] = make_dense_tiles(d, *call_.options);
  });
  const Call& c = call;
  kernels::AttentionTask& t = common_;
  t.group_size = c.group_size;
  t.head_dim_qk = c.head_dim_qk, t.head_dim_v = c.head_dim_v;
  t.q_dtype = c.q.dtype, t.q_token_stride = c.q.stride[2], t.q_head_stride = c.q.stride[1];
  t.k_row_stride = c.k.stride[2], t.v_row_stride = c.v.stride[2], t.kv_dtype = c.k.dtype;
  t.kv_begin = 0, t.kv_end = c.n_kv;
  t.scale = c.scale, t.softcap = c.options->softcap;
  t.dropout = c.options->dropout, t.seed = c.options->seed;
}

template <class F>
void TaskMaker::for_each_dense(F f) const {
  size_t i = 0;
  for (const Mask::Term& term : call_.options->mask.terms()) {
    if (term.kind == Mask::Term::Kind::dense) f(i++, term.dense, term.tiles.get());
  }
  if (call_.options->bias) f(i++, call_.options->bias, static_cast<const DenseTiles*>(nullptr));
}

// The ranges of a batch entry serve all of its heads.
void TaskMaker::use_ranges(const TaskPlace& place, TaskMemory* memory,
                           kernels::AttentionTask* task) const {
  const int64_t first = place.row_begin / call_.group_size, entry = call_.first_entry + place.b;
  const int64_t last = (place.row_begin + place.n_rows - 1) / call_.group_size;
  const auto n = static_cast<size_t>(last - first + 1);
  if (memory->ranges_maker != serial_ || memory->ranges_b != entry ||
      memory->ranges_first != first || memory->ranges.size() != n) {
    memory->ranges.resize(n);
    call_.options->mask.row_ranges(call_.mask_shape(), entry, first, last - first + 1,
                                   memory->ranges.data());
    memory->ranges_maker = serial_, memory->ranges_b = entry, memory->ranges_first = first;
  }
  task->ranges = memory->ranges.data();
}

void TaskMaker::use_dense(const TaskPlace& place, TaskMemory* memory,
                          kernels::AttentionTask* task) const {
  const int64_t first_head = place.h_kv * call_.group_size, entry = call_.first_entry + place.b;
  memory->dense.clear();
  for_each_dense([&](size_t i, const ConstTensor& d, const DenseTiles* tiles) {
    const ScoreStrides s = score_strides(d);
    kernels::DenseTerm term{element_pointer(d, s.offset(entry, first_head, 0, 0)),
                            d.dtype,
                            s.query,
                            s.head,
                            s.key,
                            nullptr,
                            0,
                            0,
                            0};
    if (!tiles && i < tiles_.size() && !tiles_[i].bits.empty()) tiles = &tiles_[i];
    if (tiles) {
      term.tiles =
          tiles->bits.data() + entry * tiles->batch_stride + first_head * tiles->head_stride;
      term.tiles_token_stride = tiles->token_stride, term.tiles_head_stride = tiles->head_stride;
      term.tiles_key_stride = tiles->key_stride;
    }
    memory->dense.push_back(term);
  });
  task->dense = memory->dense.data();
  task->n_dense = static_cast<int64_t>(memory->dense.size());
}

void TaskMaker::use_keys(const TaskPlace& place, TaskMemory* memory,
                         kernels::AttentionTask* task) const {
  const Call& c = call_;
  std::vector<kernels::KvSegment>& segments = memory->segments;
  if (!c.keys) {
    segments.assign(
        1, {element_pointer(c.k, place.b * c.k.stride[0] + place.h_kv * c.k.stride[1]),
            element_pointer(c.v, place.b * c.v.stride[0] + place.h_kv * c.v.stride[1]), 0, c.n_kv});
  } else {
    const EntryKeys& keys = c.keys[place.b];
    segments.assign(keys.segments, keys.segments + keys.n_segments);
    for (kernels::KvSegment& s : segments) {
      s.k = static_cast<const char*>(s.k) + place.h_kv * keys.k_head_bytes;
      s.v = static_cast<const char*>(s.v) + place.h_kv * keys.v_head_bytes;
      if (s.k_scale) s.k_scale += place.h_kv * keys.head_scales;
      if (s.v_scale) s.v_scale += place.h_kv * keys.head_scales;
    }
  }
  task->segments = segments.data();
  task->n_segments = static_cast<int64_t>(segments.size());
}

kernels::AttentionTask TaskMaker::make(const TaskPlace& place, TaskMemory* memory) const {
  const Call& c = call_;
  kernels::AttentionTask t = common_;
  t.row_begin = place.row_begin, t.n_rows = place.n_rows;
  const int64_t first_head = place.h_kv * c.group_size, entry = c.first_entry + place.b;
  t.q = element_pointer(c.q, place.b * c.q.stride[0] + first_head * c.q.stride[1]);
  use_keys(place, memory, &t);
  if (has_ranges_) use_ranges(place, memory, &t);
  if (has_dense_) use_dense(place, memory, &t);
  if (documents_) t.q_ids = documents_->q(entry), t.kv_ids = documents_->kv(entry);
  if (const double* slopes = c.alibi_slopes.data()) {
    t.alibi_slopes = slopes + first_head;
    t.first_position = first_position(c.options->mask, c.mask_shape(), entry);
  }
  t.dropout_stream = first_head + c.num_heads * entry;
  t.scratch = memory->kernel.reserve(kernel_scratch_bytes_);
  return t;
}

}  // namespace qkv
