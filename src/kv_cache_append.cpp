// SPDX-License-Identifier: Apache-2.0
// Tier: call. KvCache::append(): first everything that can fail, checks and memory, then the rows. So
// all entries get their tokens or none does.
#include <fmt/format.h>

#include "call.h"
#include "check.h"
#include "checked_sizes.h"
#include "kv_cache_impl.h"
#include "positions.h"
#include "qkv/kv_cache.h"

namespace qkv {
namespace {

const Check kAppend("KvCache::append");

}  // namespace

// A task is some of the n tokens, of all entries and heads: entries whose tokens have the same
// positions share their sines and cosines. Tasks write different slots and allocate nothing.
struct KvCache::Impl::Append {
  const Impl& m;
  const ConstTensor &k, &v;
  const KvAppendOptions& options;
  int64_t n;
  int64_t task_tokens = 1;
  RopeTable* table = nullptr;  // a row per token
  std::vector<double> rows{};  // one for each task
  std::vector<QuantSums> k_sums{}, v_sums{};

  int64_t count(size_t b) const { return options.counts.empty() ? n : options.counts[b]; }
  int64_t num_tasks() const { return divide_up(n, task_tokens); }
  int64_t row_elements() const { return std::max(m.config.head_dim_qk, m.config.head_dim_v); }
  bool is_copy() const {
    return k.dtype == m.config.dtype && v.dtype == k.dtype && !table && m.config.k_norm.empty();
  }

  int64_t position(size_t b, int64_t i) const {
    const ConstTensor& p = options.positions;
    if (!p) return m.lengths[b] + i;
    const bool has_batch = p.rank == 2 && p.shape[0] > 1;
    return integer_element(
        p, (has_batch ? static_cast<int64_t>(b) * p.stride[0] : 0) + i * p.stride[p.rank - 1]);
  }

  void run(int64_t task) {
    const int64_t first = task * task_tokens, last = std::min(n, first + task_tokens);
    for (size_t b = 0; b < m.entries.size(); ++b) {
      const int64_t begin = m.lengths[b], end = begin + std::min(last, count(b));
      if (begin + first >= end) continue;
      if (table)
        for (int64_t i = first; begin + i < end; ++i) table->set(i, position(b, i));
      m.for_each_run(m.entries[b], begin + first, end,
                     [&](KvBlock& block, int64_t slot, int64_t token, int64_t tokens) {
                       for (int64_t h = 0; h < m.config.num_kv_heads; ++h)
                         write(task, b, h, block, slot, token - begin, tokens);
                     });
    }
  }

 private:
  // Tokens [i, i + tokens) of head h to slots of a block.
  void write(int64_t task, size_t b, int64_t h, KvBlock& block, int64_t slot, int64_t i,
             int64_t tokens) {
    const DType dtype = m.config.dtype;
    const auto job = [&](const ConstTensor& t, char* to, int64_t head_stride, int64_t row_stride,
                         float* scales) {
      const int64_t at = static_cast<int64_t>(b) * t.stride[0] + h * t.stride[1];
      return RowsJob{static_cast<const char*>(t.data) + at * size_bytes(t.dtype),
                     t.dtype,
                     t.stride[2],
                     to + (h * head_stride + slot * row_stride) * size_bytes(dtype),
                     dtype,
                     row_stride,
                     scales ? scales + h * block.slots + slot : nullptr,
                     i,
                     tokens,
                     t.shape[3],
                     rows.data() + task * row_elements()};
    };
    const auto at = static_cast<size_t>(task);
    write_rows(job(k, block.k, block.k_head_stride, m.sizes.k_row_stride, block.k_scale),
               {&m.config.k_norm, m.config.norm_eps, table}, &k_sums[at]);
    write_rows(job(v, block.v, block.v_head_stride, m.sizes.v_row_stride, block.v_scale), {},
               &v_sums[at]);
  }
};

void KvCache::append(ConstTensor k, ConstTensor v, const KvAppendOptions& options) {
  Impl& m = *impl_;
  const KvCacheConfig& c = m.config;
  const auto check = [&](const ConstTensor& t, const char* what, int64_t dim) {
    if (t.rank != 4 || t.shape[0] != c.batch || t.shape[1] != c.num_kv_heads || t.shape[3] != dim)
      kAppend.refuse(fmt::format("{} needs shape [{}, {}, n, {}], got {}", what, c.batch,
                                 c.num_kv_heads, dim, shape_text(t)));
    if (!info(t.dtype).is_float)
      kAppend.refuse(fmt::format("{} must be floating point, got {}", what, name(t.dtype)));
    kAppend.layout(t, what);
  };
  check(k, "k", c.head_dim_qk);
  check(v, "v", c.head_dim_v);
  const int64_t n = k.shape[2];
  if (v.shape[2] != n)
    kAppend.refuse(
        fmt::format("k and v differ in tokens, got k {} and v {}", shape_text(k), shape_text(v)));
  if (options.num_threads < 0)
    kAppend.refuse(fmt::format("num_threads must not be negative, got {}", options.num_threads));
  if (!options.counts.empty() && static_cast<int64_t>(options.counts.size()) != c.batch)
    kAppend.refuse(fmt::format("counts need one number per batch entry, {}, got {}", c.batch,
                               options.counts.size()));
  Impl::Append job{m, k, v, options, n};
  for (size_t b = 0; b < m.entries.size(); ++b) {
    if (job.count(b) < 0 || job.count(b) > n)
      kAppend.refuse(fmt::format("a count must lie in [0, {}], got {} and k {}", n, job.count(b),
                                 shape_text(k)));
    const bool is_callers = !m.entries[b].blocks.empty() && m.entries[b].blocks[0]->is_callers;
    const bool is_bounded = !m.is_ring() && (c.capacity > 0 || is_callers);
    if (is_bounded && m.lengths[b] + job.count(b) > c.capacity)
      kAppend.refuse(fmt::format("{} tokens do not fit, length {} of capacity {}, got k {}",
                                 job.count(b), m.lengths[b], c.capacity, shape_text(k)));
  }
  if (options.positions) {
    check_positions(kAppend, options.positions, c.batch, n);
    if (!m.rope) kAppend.refuse("positions are for rope, and this cache has none");
  }

  for (size_t b = 0; b < m.entries.size(); ++b)
    if (job.count(b) > 0) m.make_room(b, m.lengths[b], m.lengths[b] + job.count(b));
  std::optional<RopeTable> table = m.rope;
  if (table) table->resize(n), job.table = &*table;
  const int64_t token_elements = c.batch * c.num_kv_heads * (c.head_dim_qk + c.head_dim_v);
  job.task_tokens = append_task_tokens(token_elements);
  const int64_t tasks = job.num_tasks();
  job.rows.resize(static_cast<size_t>(tasks * job.row_elements()));
  job.k_sums.resize(static_cast<size_t>(tasks)), job.v_sums.resize(static_cast<size_t>(tasks));

  // From here on nothing fails.
  const int threads =
      append_threads(job.task_tokens * token_elements, job.is_copy(), tasks, options.num_threads);
  if (threads <= 1 && !options.executor) {
    for (int64_t task = 0; task < tasks; ++task) job.run(task);
  } else {
    (options.executor ? *options.executor : default_executor())
        .run(
            tasks, std::max(threads, 1),
            [](void* self, int64_t task) { static_cast<Impl::Append*>(self)->run(task); }, &job);
  }
  for (size_t b = 0; b < m.entries.size(); ++b) {
    const int64_t count = job.count(b);
    if (count == 0) continue;
    m.lengths[b] += count;
    Impl::Entry& e = m.entries[b];
    if (m.is_ring()) e.first = std::max(e.first, m.lengths[b] - (e.blocks[0]->slots - m.kept()));
    if (c.dtype == DType::i8) m.num_rows += count * c.num_kv_heads;
  }
  for (const QuantSums& sums : job.k_sums) m.k_sums.add(sums);
  for (const QuantSums& sums : job.v_sums) m.v_sums.add(sums);
}

}  // namespace qkv
