// SPDX-License-Identifier: Apache-2.0
// Tier: call. KvCache::attend(): which tokens each query may see, as segments of the cache and a mask;
// then attention on them where they lie.
#include <fmt/format.h>

#include <cmath>
#include <numeric>

#include "check.h"
#include "convert_row.h"
#include "element.h"
#include "entry_calls.h"
#include "kv_cache_impl.h"
#include "positions.h"
#include "qkv/kv_cache.h"

namespace qkv {
namespace {

const Check kAttend("KvCache::attend");

// The rows of q that are queries of an entry: its last n_rows tokens.
struct Rows {
  int64_t first, n;
};

// q after norm and rope, in f32 (f64 for f64).
template <class T>
class PreparedQuery {
 public:
  PreparedQuery(const ConstTensor& q, const std::vector<float>& norm, double norm_eps)
      : q_(q), dim_(q.shape[3]), data_(static_cast<size_t>(q.num_elements())) {
    steps_.norm = &norm, steps_.norm_eps = norm_eps;
  }
  void prepare(int64_t b, const Rows& rows, const RopeTable* table) {
    steps_.rope = table;
    for (int64_t h = 0; h < q_.shape[1]; ++h)
      for (int64_t i = rows.first; i < rows.first + rows.n; ++i) {
        const int64_t at = b * q_.stride[0] + h * q_.stride[1] + i * q_.stride[2];
        T* to = data_.data() + ((b * q_.shape[1] + h) * q_.shape[2] + i) * dim_;
        load_row(static_cast<const char*>(q_.data) + at * size_bytes(q_.dtype), q_.dtype, dim_, to);
        steps_.apply(i, dim_, to);
      }
  }
  ConstTensor view() const { return {data_.data(), {q_.shape[0], q_.shape[1], q_.shape[2], dim_}}; }

 private:
  const ConstTensor q_;
  const int64_t dim_;
  std::vector<T> data_;
  RowSteps steps_;
};

// out = the union of two disjoint sets of keys, as merge_states() defines it.
template <class T>
void merge(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b,
           const AttentionOutputs& to) {
  const T *a = static_cast<const T*>(out_a.data), *b = static_cast<const T*>(out_b.data);
  const T *la = static_cast<const T*>(lse_a.data), *lb = static_cast<const T*>(lse_b.data);
  const int64_t dim = out_a.shape[3];
  std::vector<T> row(static_cast<size_t>(dim));
  for (int64_t x = 0; x < out_a.shape[0]; ++x)
    for (int64_t h = 0; h < out_a.shape[1]; ++h)
      for (int64_t i = 0; i < out_a.shape[2]; ++i, a += dim, b += dim, ++la, ++lb) {
        const double none = -std::numeric_limits<double>::infinity();
        const double sa = static_cast<double>(*la), sb = static_cast<double>(*lb);
        const double top = sa == none ? sb : sb == none ? sa : std::max(sa, sb);
        const double wa = sa == none ? 0 : std::exp(sa - top),
                     wb = sb == none ? 0 : std::exp(sb - top);
        const double total = wa + wb;
        const T fa = total == 0 ? T{0} : static_cast<T>(wa / total);
        const T fb = total == 0 ? T{0} : static_cast<T>(wb / total);
        for (int64_t d = 0; d < dim; ++d)
          row[static_cast<size_t>(d)] =
              (sa == none ? T{0} : fa * a[d]) + (sb == none ? T{0} : fb * b[d]);
        if (const Tensor& o = to.out)
          store_row(row.data(), dim,
                    static_cast<char*>(o.data) +
                        (x * o.stride[0] + h * o.stride[1] + i * o.stride[2]) * size_bytes(o.dtype),
                    o.dtype);
        if (const Tensor& o = to.lse)
          store_element(o, x * o.stride[0] + h * o.stride[1] + i * o.stride[2],
                        total == 0 ? none : top + std::log(total));
      }
}

}  // namespace

void KvCache::Impl::list_segments(size_t entry, int64_t keys_begin, int64_t keys_end,
                                  std::vector<kernels::KvSegment>* segments) const {
  const int64_t element = size_bytes(sizes.dtype);
  for_each_held(entries[entry], lengths[entry],
                [&](const KvBlock& b, int64_t slot, int64_t token, int64_t n) {
                  const int64_t from = std::max(token, keys_begin),
                                to = std::min(token + n, keys_end);
                  if (from >= to) return;
                  slot += from - token;
                  segments->push_back({b.k + slot * sizes.k_row_stride * element,
                                       b.v + slot * sizes.v_row_stride * element, from - keys_begin,
                                       to - from, b.k_scale ? b.k_scale + slot : nullptr,
                                       b.v_scale ? b.v_scale + slot : nullptr});
                });
}

namespace {

// Segments of all entries, and where each entry's begin.
struct SegmentLists {
  std::vector<kernels::KvSegment> segments;
  std::vector<size_t> first{0};

  void end_entry() { first.push_back(segments.size()); }
  EntryKeys keys(size_t b, const KvBlock* block, int64_t element) const {
    if (!block) return {nullptr, 0, 0, 0, 0};
    return {segments.data() + first[b], static_cast<int64_t>(first[b + 1] - first[b]),
            block->k_head_stride * element, block->v_head_stride * element, block->slots};
  }
};

}  // namespace

void KvCache::attend(ConstTensor q, const AttentionOutputs& outputs,
                     const AttentionOptions& options, const KvQueryOptions& queries) const {
  const Impl& m = *impl_;
  const KvCacheConfig& c = m.config;
  EntryCalls calls{kAttend, m.sizes, {}, true, options.mask, longest()};
  std::vector<EntryWork> work(m.entries.size());
  calls.entries = work;
  calls.check_query(q);
  const int64_t n_q = q.shape[2];
  if (!queries.counts.empty() && static_cast<int64_t>(queries.counts.size()) != c.batch)
    kAttend.refuse(fmt::format("counts need one number per batch entry, {}, got {}", c.batch,
                               queries.counts.size()));
  if (queries.are_outside && (c.window > 0 || m.rope))
    kAttend.refuse("queries outside the cache have no position, and window and rope need one");
  if (queries.counts.empty() && !queries.are_outside && n_q > calls.longest && c.batch > 0)
    kAttend.refuse(fmt::format("the queries are the last {} tokens, but length is {}, got q {}",
                               n_q, calls.longest, shape_text(q)));
  if (queries.positions) {
    check_positions(kAttend, queries.positions, c.batch, n_q);
    if (!m.rope) kAttend.refuse("positions are for rope, and this cache has none");
  }
  if (c.num_sink_tokens > 0) {
    if (!options.mask.is_full() || options.bias || options.alibi_slopes || outputs.weights ||
        options.dropout > 0)
      kAttend.refuse(
          "a cache with num_sink_tokens takes no mask, bias, alibi_slopes, dropout or weights");
    kAttend.no_forms(outputs);
  }

  std::vector<Rows> rows;
  for (size_t b = 0; b < m.entries.size(); ++b) {
    const int64_t length = m.lengths[b];
    if (queries.counts.empty()) {
      const int64_t n = queries.are_outside ? n_q : std::min(n_q, length);
      rows.push_back({n_q - n, n});
    } else {
      const int64_t n = queries.counts[b];
      if (n < 0 || n > n_q || (n > length && !queries.are_outside))
        kAttend.refuse(fmt::format("a count must lie in [0, {}], got {} and q {}",
                                   std::min(n_q, length), n, shape_text(q)));
      rows.push_back({0, n});
    }
    const int64_t first = length - rows[b].n - c.window + 1;  // that a query may see
    if (m.is_ring() && rows[b].n > 0 && m.entries[b].first > std::max(first, m.kept()))
      kAttend.refuse(
          fmt::format("the ring has lost what the last {} tokens may see, it holds the "
                      "tokens [{}, {}), got q {}",
                      rows[b].n, m.entries[b].first, length, shape_text(q)));
  }

  const auto attend_to = [&](const ConstTensor& query) {
    SegmentLists lists;
    const int64_t element = size_bytes(c.dtype);
    const auto list = [&](bool front, bool behind) {  // the kept tokens, and those behind them
      lists = {};
      for (size_t b = 0; b < m.entries.size(); ++b) {
        const int64_t length = m.lengths[b], kept = std::min(length, c.num_sink_tokens);
        m.list_segments(b, front ? 0 : kept, behind ? length : kept, &lists.segments);
        lists.end_entry();
      }
      for (size_t b = 0; b < m.entries.size(); ++b) {
        const Impl::Entry& e = m.entries[b];
        const int64_t length = m.lengths[b], kept = std::min(length, c.num_sink_tokens);
        work[b].keys = lists.keys(b, e.blocks.empty() ? nullptr : &*e.blocks[0], element);
        work[b].n_kv = (behind ? length : kept) - (front ? 0 : kept);
        work[b].first_row = rows[b].first, work[b].n_rows = rows[b].n;
      }
      calls.longest = 0;
      for (const EntryWork& e : work) calls.longest = std::max(calls.longest, e.n_kv);
    };
    // What position and window show: one range per row, of one row with everything visible none.
    const Mask causal = c.window > 0 ? Mask::window(c.window - 1, 0) : Mask::causal_bottom_right();
    const auto mask_of = [&](const Rows& r) {
      if (queries.are_outside) return Mask();
      if (!options.mask.is_full()) return c.window > 0 ? Mask::window(c.window - 1, -1) : Mask();
      return c.window == 0 && r.n == 1 ? Mask() : causal;
    };
    if (c.num_sink_tokens == 0) {
      list(true, true);
      for (size_t b = 0; b < work.size(); ++b) work[b].mask = mask_of(rows[b]);
      calls.run(query, q.dtype, outputs, options);
      return;
    }
    // Two disjoint sets of keys: the tokens in front, which a query sees if they are not behind it,
    // and the others, whose window and positions are the same without those in front.
    const bool wide = query.dtype == DType::f64;
    const auto elements = static_cast<size_t>(c.batch * query.shape[1] * n_q);
    const auto bytes = static_cast<size_t>(wide ? 8 : 4);
    std::vector<char> memory(2 * elements * (static_cast<size_t>(c.head_dim_v) + 1) * bytes);
    char* at = memory.data();
    const auto take = [&](int64_t dim) {
      const int64_t shape[] = {c.batch, query.shape[1], n_q, dim};
      Tensor t(at, wide ? DType::f64 : DType::f32,
               std::span<const int64_t>(shape, dim < 0 ? 3u : 4u));
      at += static_cast<size_t>(t.num_elements()) * bytes;
      return t;
    };
    const Tensor out_a = take(c.head_dim_v), out_b = take(c.head_dim_v), lse_a = take(-1),
                 lse_b = take(-1);
    list(false, true);
    for (size_t b = 0; b < work.size(); ++b) work[b].mask = causal;
    kAttend.outputs(outputs, {c.batch, query.shape[1], n_q, 0, c.head_dim_v, 0}, q.dtype,
                    lse_a.dtype);
    calls.run(query, out_b.dtype, {out_b, lse_b, {}}, options);
    list(true, false);
    bool same = true;
    for (size_t b = 0; b < work.size(); ++b) {
      const int64_t before = m.lengths[b] - rows[b].n;  // position of the first query
      work[b].mask =
          before >= c.num_sink_tokens ? Mask() : Mask::window(-1, before, Alignment::top_left);
      same &= m.lengths[b] == m.lengths[0] && rows[b].n == rows[0].n;
    }
    calls.same_mask = same;
    AttentionOptions front = options;
    front.sinks = {};
    calls.run(query, out_a.dtype, {out_a, lse_a, {}}, front);
    wide ? merge<double>(out_a, lse_a, out_b, lse_b, outputs)
         : merge<float>(out_a, lse_a, out_b, lse_b, outputs);
  };

  if (!m.rope && c.q_norm.empty()) return attend_to(q);
  std::optional<RopeTable> table = m.rope;
  const auto prepared = [&](auto arithmetic) {
    PreparedQuery<decltype(arithmetic)> query(q, c.q_norm, c.norm_eps);
    for (size_t b = 0; b < m.entries.size(); ++b) {
      if (table) {
        std::vector<int64_t> positions(static_cast<size_t>(n_q));
        if (queries.positions) {
          positions = positions_of(queries.positions, static_cast<int64_t>(b));
        } else {
          std::iota(positions.begin(), positions.end(), m.lengths[b] - rows[b].n - rows[b].first);
        }
        table->fill(positions);
      }
      query.prepare(static_cast<int64_t>(b), rows[b], table ? &*table : nullptr);
    }
    attend_to(query.view());
  };
  q.dtype == DType::f64 ? prepared(double{}) : prepared(float{});
}

void KvCache::attend_tree(ConstTensor q, std::span<const int64_t> parents,
                          const AttentionOutputs& outputs, const AttentionOptions& options,
                          const KvQueryOptions& queries) const {
  const Check check("KvCache::attend_tree");
  const Impl& m = *impl_;
  if (m.config.window > 0) check.refuse("a window counts tokens in a line, and this cache has one");
  const auto n = static_cast<int64_t>(parents.size());
  if (q.rank != 4 || q.shape[2] != n || !queries.counts.empty())
    check.refuse(fmt::format("one parent for each of the n_q queries is needed, got {} and q {}", n,
                             shape_text(q)));
  if (options.alibi_slopes) check.refuse("alibi_slopes count tokens in a line");
  for (int64_t i = 0; i < n; ++i)
    if (parents[static_cast<size_t>(i)] < -1 || parents[static_cast<size_t>(i)] >= i)
      check.refuse(fmt::format("parents[{}] must lie in [-1, {}), got {}", i, i,
                               parents[static_cast<size_t>(i)]));
  const int64_t most = longest();
  for (const int64_t length : m.lengths)
    if (length < n)
      check.refuse(fmt::format("the tree has {} nodes, but a length is {}", n, length));
  // Entries of one length share the table.
  const bool same = std::all_of(m.lengths.begin(), m.lengths.end(),
                                [&](int64_t length) { return length == most; });
  const int64_t tables = same ? std::min<int64_t>(m.config.batch, 1) : m.config.batch;
  std::vector<uint8_t> seen(static_cast<size_t>(tables * n * most));
  for (int64_t b = 0; b < tables; ++b)
    for (int64_t i = 0; i < n; ++i) {
      uint8_t* row = seen.data() + (b * n + i) * most;
      const int64_t before = m.lengths[static_cast<size_t>(b)] - n;
      std::fill(row, row + before, uint8_t{1});
      for (int64_t node = i; node >= 0; node = parents[static_cast<size_t>(node)])
        row[before + node] = 1;
    }
  AttentionOptions o = options;
  const int64_t shape[] = {tables, n, most};
  if (tables > 0) o.mask = Mask::dense(ConstTensor(seen.data(), DType::boolean, shape)) & o.mask;
  attend(q, outputs, o, queries);
}

}  // namespace qkv
