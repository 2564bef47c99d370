// SPDX-License-Identifier: Apache-2.0
// Tier: call. attention_paged(): the pages of the caller become segments; nothing is copied.
#include <fmt/format.h>

#include <algorithm>

#include "check.h"
#include "entry_calls.h"
#include "positions.h"
#include "qkv/kv_cache.h"

namespace qkv {
namespace {

const Check kCheck("attention_paged");

void check_pages(const ConstTensor& k, const ConstTensor& v) {
  bool fits = k.rank == 4 && v.rank == 4 && k.dtype == v.dtype;
  for (int a = 0; fits && a < 3; ++a) fits = k.shape[a] == v.shape[a];
  if (!fits)
    kCheck.refuse(
        fmt::format("k_pages and v_pages need [num_pages, page_size, num_kv_heads, dim] of one "
                    "element type, got {} {} and {} {}",
                    name(k.dtype), shape_text(k), name(v.dtype), shape_text(v)));
  if (!info(k.dtype).is_float)
    kCheck.refuse(fmt::format("pages must be floating point, got {}", name(k.dtype)));
  kCheck.layout(k, "k_pages");
  kCheck.layout(v, "v_pages");
}

void check_table(const ConstTensor& q, const ConstTensor& table, const ConstTensor& lengths) {
  if (table.rank != 2 || lengths.rank != 1 || q.rank != 4 || table.shape[0] != q.shape[0] ||
      lengths.shape[0] != q.shape[0] || !is_integer(table) || !is_integer(lengths) ||
      (!table.data && table.num_elements() > 0) || (!lengths.data && lengths.num_elements() > 0))
    kCheck.refuse(
        fmt::format("block_table [batch, max_pages] and lengths [batch] need integers (i32 or i64) "
                    "for each batch entry, got q {}, block_table {} {} and lengths {} {}",
                    shape_text(q), name(table.dtype), shape_text(table), name(lengths.dtype),
                    shape_text(lengths)));
}

}  // namespace

void attention_paged(ConstTensor q, ConstTensor k_pages, ConstTensor v_pages,
                     ConstTensor block_table, ConstTensor lengths, const AttentionOutputs& outputs,
                     const AttentionOptions& options) {
  check_pages(k_pages, v_pages);
  check_table(q, block_table, lengths);
  const int64_t batch = q.shape[0], n_q = q.shape[2], num_pages = k_pages.shape[0];
  const int64_t page_size = k_pages.shape[1], element = size_bytes(k_pages.dtype);
  std::vector<EntryWork> work(static_cast<size_t>(batch));
  const KvSizes sizes{k_pages.shape[2], k_pages.shape[3],  v_pages.shape[3],
                      k_pages.dtype,    k_pages.stride[1], v_pages.stride[1]};
  EntryCalls calls{kCheck, sizes, work, true, options.mask, 0};
  calls.check_query(q);

  std::vector<kernels::KvSegment> segments;
  std::vector<size_t> first;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t length = integer_element(lengths, b * lengths.stride[0]);
    if (length < 0 ||
        (length > 0 && (page_size == 0 || (length - 1) / page_size >= block_table.shape[1])))
      kCheck.refuse(
          fmt::format("a length must lie in [0, max_pages * page_size], got {}, "
                      "block_table {} and k_pages {}",
                      length, shape_text(block_table), shape_text(k_pages)));
    first.push_back(segments.size());
    for (int64_t t = 0; t < length; t += page_size) {
      const int64_t page = integer_element(
          block_table, b * block_table.stride[0] + t / page_size * block_table.stride[1]);
      if (page < 0 || page >= num_pages)
        kCheck.refuse(fmt::format("block_table names page {} of {} for token {} of entry {}", page,
                                  num_pages, t, b));
      segments.push_back(
          {static_cast<const char*>(k_pages.data) + page * k_pages.stride[0] * element,
           static_cast<const char*>(v_pages.data) + page * v_pages.stride[0] * element, t,
           std::min(page_size, length - t)});
    }
    EntryWork& e = work[static_cast<size_t>(b)];
    e.n_kv = length, e.n_rows = std::min(n_q, length), e.first_row = n_q - e.n_rows;
    if (options.mask.is_full() && e.n_rows > 1) e.mask = Mask::causal_bottom_right();
    calls.longest = std::max(calls.longest, length);
  }
  first.push_back(segments.size());
  if (n_q > calls.longest && batch > 0)
    kCheck.refuse(
        fmt::format("the queries are the last {} tokens, but the longest length is {}, got q {}",
                    n_q, calls.longest, shape_text(q)));
  for (size_t b = 0; b < work.size(); ++b)
    work[b].keys = {segments.data() + first[b], static_cast<int64_t>(first[b + 1] - first[b]),
                    k_pages.stride[2] * element, v_pages.stride[2] * element, 0};
  calls.run(q, q.dtype, outputs, options);
}

}  // namespace qkv
