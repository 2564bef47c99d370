// SPDX-License-Identifier: Apache-2.0
// Tier: plan. See kv_block.h.
#include "kv_block.h"

#include <cstring>

#include "kernels/kernels.h"

namespace qkv {
namespace {

int64_t times(int64_t a, int64_t b) {
  int64_t product;
  if (__builtin_mul_overflow(a, b, &product) || product > INT64_MAX / 4)
    throw Error("KvCache: the sizes are too large for this machine");
  return product;
}

int64_t aligned(int64_t bytes) {
  return (bytes + kernels::kAlignment - 1) / kernels::kAlignment * kernels::kAlignment;
}

void copy_rows(char* to, int64_t to_stride, const char* from, int64_t from_stride, int64_t n,
               int64_t row_bytes) {
  if (row_bytes == 0) return;
  if (row_bytes == to_stride && row_bytes == from_stride) {
    std::memmove(to, from, static_cast<size_t>(n * row_bytes));
    return;
  }
  for (int64_t i = 0; i < n; ++i)
    std::memmove(to + i * to_stride, from + i * from_stride, static_cast<size_t>(row_bytes));
}

}  // namespace

KvBlockRef::KvBlockRef(const KvSizes& s, int64_t slots, std::shared_ptr<KvPages> pages) {
  const int64_t rows = times(s.num_kv_heads, slots), element = size_bytes(s.dtype);
  const int64_t k_bytes = aligned(times(times(rows, s.k_row_stride), element));
  const int64_t v_bytes = aligned(times(times(rows, s.v_row_stride), element));
  const int64_t scale_bytes = s.has_scales() ? aligned(times(rows, 4)) : 0;
  KvBlockRef made(new KvBlock);
  KvBlock& b = *made;
  b.slots = slots, b.bytes = k_bytes + v_bytes + 2 * scale_bytes;
  if (pages) {
    b.k = static_cast<char*>(pages->take(b.bytes));
    b.pages = std::move(pages);
  } else {
    b.memory = allocate_large(b.bytes);
    b.k = static_cast<char*>(b.memory.get());
  }
  b.v = b.k + k_bytes;
  if (s.has_scales()) {
    b.k_scale = reinterpret_cast<float*>(b.v + v_bytes);
    b.v_scale = reinterpret_cast<float*>(b.v + v_bytes + scale_bytes);
  }
  b.k_row_stride = s.k_row_stride, b.v_row_stride = s.v_row_stride;
  b.k_head_stride = slots * s.k_row_stride, b.v_head_stride = slots * s.v_row_stride;
  *this = std::move(made);
}

void copy_slots(const KvSizes& s, const KvBlock& from, int64_t from_slot, KvBlock* to,
                int64_t to_slot, int64_t n) {
  if (n <= 0) return;
  const int64_t element = size_bytes(s.dtype);
  for (int64_t h = 0; h < s.num_kv_heads; ++h) {
    copy_rows(to->k + (h * to->k_head_stride + to_slot * to->k_row_stride) * element,
              to->k_row_stride * element,
              from.k + (h * from.k_head_stride + from_slot * from.k_row_stride) * element,
              from.k_row_stride * element, n, s.head_dim_qk * element);
    copy_rows(to->v + (h * to->v_head_stride + to_slot * to->v_row_stride) * element,
              to->v_row_stride * element,
              from.v + (h * from.v_head_stride + from_slot * from.v_row_stride) * element,
              from.v_row_stride * element, n, s.head_dim_v * element);
    if (!s.has_scales()) continue;
    std::memmove(to->k_scale + h * to->slots + to_slot, from.k_scale + h * from.slots + from_slot,
                 static_cast<size_t>(n) * 4);
    std::memmove(to->v_scale + h * to->slots + to_slot, from.v_scale + h * from.slots + from_slot,
                 static_cast<size_t>(n) * 4);
  }
}

}  // namespace qkv
