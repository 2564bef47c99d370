// SPDX-License-Identifier: Apache-2.0
// Tier: benchmark. The one table of attention cases: benchmarks, `qkv bench` and the comparison with peers read it. A new
// case is a row. reach_*: the fraction of the FMA peak that the case is meant to reach on one core.
#pragma once
#include <cstdint>

#include "qkv/dtype.h"

namespace qkv::bench {

enum class CaseMask { full, causal, window256 };

struct AttentionCase {
  const char* name;
  int64_t batch, num_heads, num_kv_heads, n_q, n_kv, head_dim;
  CaseMask mask;  // causal and window: bottom-right
  double reach_avx512, reach_avx2;
};

inline constexpr AttentionCase kAttentionCases[] = {
    {"full-n512-d64", 1, 8, 8, 512, 512, 64, CaseMask::full, 0.93, 0.89},
    {"full-n2048-d64", 1, 8, 8, 2048, 2048, 64, CaseMask::full, 0.93, 0.89},
    {"full-n8192-d64", 1, 8, 8, 8192, 8192, 64, CaseMask::full, 0.93, 0.89},
    {"full-n1024-d80", 1, 8, 8, 1024, 1024, 80, CaseMask::full, 0.95, 0.92},
    {"full-n1024-d96", 1, 8, 8, 1024, 1024, 96, CaseMask::full, 0.95, 0.92},
    {"full-n1024-d128", 1, 8, 8, 1024, 1024, 128, CaseMask::full, 0.95, 0.92},
    {"full-n1024-d256", 1, 8, 8, 1024, 1024, 256, CaseMask::full, 0.95, 0.92},
    {"full-n128-d64", 1, 8, 8, 128, 128, 64, CaseMask::full, 0.88, 0.80},
    {"full-n128-d128", 1, 8, 8, 128, 128, 128, CaseMask::full, 0.91, 0.83},
    {"causal-n4096-d64", 1, 8, 8, 4096, 4096, 64, CaseMask::causal, 0.91, 0.87},
    {"causal-n2048-d64", 1, 8, 8, 2048, 2048, 64, CaseMask::causal, 0.91, 0.87},
    {"causal-n2048-d128", 1, 8, 8, 2048, 2048, 128, CaseMask::causal, 0.925, 0.89},
    {"causal-n512-d64", 1, 8, 8, 512, 512, 64, CaseMask::causal, 0.88, 0.83},
    {"causal-n512-d128", 1, 8, 8, 512, 512, 128, CaseMask::causal, 0.90, 0.85},
    {"causal-n128-d64", 1, 8, 8, 128, 128, 64, CaseMask::causal, 0.74, 0.64},
    {"causal-n128-d128", 1, 8, 8, 128, 128, 128, CaseMask::causal, 0.77, 0.68},
    {"gqa4-causal-n1024-d128", 1, 32, 8, 1024, 1024, 128, CaseMask::causal, 0.90, 0.87},
    {"mqa32-causal-n1024-d128", 1, 32, 1, 1024, 1024, 128, CaseMask::causal, 0.90, 0.87},
    {"bert-b8-h12-n128-d64", 8, 12, 12, 128, 128, 64, CaseMask::full, 0.85, 0.78},
    {"bert-b8-h12-n384-d64", 8, 12, 12, 384, 384, 64, CaseMask::full, 0.89, 0.84},
    {"vit-b8-h12-n197-d64", 8, 12, 12, 197, 197, 64, CaseMask::full, 0.82, 0.74},
    {"odd-n1023-d72", 1, 8, 8, 1023, 1023, 72, CaseMask::full, 0.88, 0.84},
    {"chunk-q64-kv4096-d64", 1, 8, 8, 64, 4096, 64, CaseMask::causal, 0.88, 0.84},
    {"chunk-q64-kv4096-gqa4-d128", 1, 32, 8, 64, 4096, 128, CaseMask::causal, 0.92, 0.88},
    {"window256-n4096-d64", 1, 8, 8, 4096, 4096, 64, CaseMask::window256, 0.78, 0.72},
    // The lesson's operator: microseconds count, not the fraction (4 us at d 16, 6 us at d 64).
    {"lesson-b10-h8-d16", 10, 8, 8, 2, 4, 16, CaseMask::full, 0, 0},
    {"lesson-b10-h8-d64", 10, 8, 8, 2, 4, 64, CaseMask::full, 0, 0},
};

/// attention_backward() with dq, dk and dv. with_bias: a bias of its own per head and its gradient.
struct BackwardCase {
  const char* name;
  int64_t batch, num_heads, num_kv_heads, n, head_dim_qk, head_dim_v;
  CaseMask mask;
  bool with_bias, with_dropout;
  double reach_avx512, reach_avx2;
};

inline constexpr BackwardCase kBackwardCases[] = {
    {"full-n512-d64", 1, 8, 8, 512, 64, 64, CaseMask::full, false, false, 0.93, 0.90},
    {"full-n512-d128", 1, 8, 8, 512, 128, 128, CaseMask::full, false, false, 0.93, 0.90},
    {"full-n2048-d64", 1, 8, 8, 2048, 64, 64, CaseMask::full, false, false, 0.93, 0.90},
    {"full-n2048-d128", 1, 8, 8, 2048, 128, 128, CaseMask::full, false, false, 0.93, 0.90},
    {"causal-n2048-d64", 1, 8, 8, 2048, 64, 64, CaseMask::causal, false, false, 0.86, 0.82},
    {"causal-n2048-d128", 1, 8, 8, 2048, 128, 128, CaseMask::causal, false, false, 0.86, 0.82},
    {"causal-n512-d64", 1, 8, 8, 512, 64, 64, CaseMask::causal, false, false, 0.80, 0.76},
    {"causal-n512-d128", 1, 8, 8, 512, 128, 128, CaseMask::causal, false, false, 0.80, 0.76},
    {"gqa4-causal-n1024-d128", 1, 32, 8, 1024, 128, 128, CaseMask::causal, false, false, 0.84,
     0.80},
    {"mqa32-causal-n1024-d128", 1, 32, 1, 1024, 128, 128, CaseMask::causal, false, false, 0.84,
     0.80},
    {"bert-b8-h12-n128-d64", 8, 12, 12, 128, 64, 64, CaseMask::full, false, false, 0.80, 0.76},
    {"odd-n1023-d72-dv40", 1, 8, 8, 1023, 72, 40, CaseMask::full, false, false, 0.80, 0.76},
    {"bias-n512-d64", 1, 8, 8, 512, 64, 64, CaseMask::full, true, false, 0, 0},
    {"dropout-n512-d64", 1, 8, 8, 512, 64, 64, CaseMask::full, false, true, 0, 0},
};

/// Where K and V are: tensors for attention(), or a KvCache.
enum class DecodeStore { tensors, contiguous, paged };

/// Few queries against long caches that are used in turn, together larger than the L3 cache. num_threads: 0
/// as many as asked for. reach: fraction of the read bandwidth of that many threads (bytes of K, V and
/// scales), or of the FMA peak where is_compute_bound.
struct DecodeCase {
  const char* name;
  int64_t batch, num_heads, num_kv_heads, n_q, n_kv, head_dim;
  DType kv_dtype;
  DecodeStore store;
  int num_threads;
  bool is_compute_bound;
  double reach;
};

inline constexpr DecodeCase kDecodeCases[] = {
    {"mha-f32", 1, 32, 32, 1, 4096, 128, DType::f32, DecodeStore::tensors, 0, false, 0.95},
    {"mha-bf16", 1, 32, 32, 1, 4096, 128, DType::bf16, DecodeStore::tensors, 0, false, 0.92},
    {"mha-f16", 1, 32, 32, 1, 4096, 128, DType::f16, DecodeStore::tensors, 0, false, 0.92},
    {"group2-f32", 1, 32, 16, 1, 4096, 128, DType::f32, DecodeStore::tensors, 0, false, 0.92},
    {"group4-f32", 1, 32, 8, 1, 4096, 128, DType::f32, DecodeStore::tensors, 0, false, 0.85},
    {"group8-f32", 1, 32, 4, 1, 4096, 128, DType::f32, DecodeStore::tensors, 0, false, 0.75},
    {"group4-bf16", 1, 32, 8, 1, 4096, 128, DType::bf16, DecodeStore::tensors, 0, false, 0.75},
    {"mqa-f32", 1, 32, 1, 1, 4096, 128, DType::f32, DecodeStore::tensors, 0, true, 0.93},
    {"b8-mha-f32", 8, 32, 32, 1, 1024, 128, DType::f32, DecodeStore::tensors, 0, false, 0.95},
    {"b8-group4-f32", 8, 32, 8, 1, 1024, 128, DType::f32, DecodeStore::tensors, 0, false, 0.85},
    {"mha-f32-2-threads", 1, 32, 32, 1, 4096, 128, DType::f32, DecodeStore::tensors, 2, false,
     0.90},
    {"mha-bf16-2-threads", 1, 32, 32, 1, 4096, 128, DType::bf16, DecodeStore::tensors, 2, false,
     0.90},
    {"cache-mha-f32", 1, 32, 32, 1, 4096, 128, DType::f32, DecodeStore::contiguous, 0, false, 0.95},
    {"cache-mha-bf16", 1, 32, 32, 1, 4096, 128, DType::bf16, DecodeStore::contiguous, 0, false,
     0.92},
    {"cache-mha-i8", 1, 32, 32, 1, 4096, 128, DType::i8, DecodeStore::contiguous, 0, false, 0.75},
    {"cache-group4-f32", 1, 32, 8, 1, 4096, 128, DType::f32, DecodeStore::contiguous, 0, false,
     0.85},
    {"cache-group4-bf16", 1, 32, 8, 1, 4096, 128, DType::bf16, DecodeStore::contiguous, 0, false,
     0.75},
    {"cache-group4-i8", 1, 32, 8, 1, 4096, 128, DType::i8, DecodeStore::contiguous, 0, false, 0.60},
    {"paged-mha-f32", 1, 32, 32, 1, 4096, 128, DType::f32, DecodeStore::paged, 0, false, 0.95},
    {"paged-mha-bf16", 1, 32, 32, 1, 4096, 128, DType::bf16, DecodeStore::paged, 0, false, 0.92},
    {"paged-mha-i8", 1, 32, 32, 1, 4096, 128, DType::i8, DecodeStore::paged, 0, false, 0.75},
    {"paged-group4-bf16", 1, 32, 8, 1, 4096, 128, DType::bf16, DecodeStore::paged, 0, false, 0.75},
    // Speculation: 1.1, 1.2 and 1.5 times the time of one query.
    {"mha-q2-f32", 1, 32, 32, 2, 4096, 128, DType::f32, DecodeStore::tensors, 0, false, 0.86},
    {"mha-q4-f32", 1, 32, 32, 4, 4096, 128, DType::f32, DecodeStore::tensors, 0, false, 0.79},
    {"mha-q8-f32", 1, 32, 32, 8, 4096, 128, DType::f32, DecodeStore::tensors, 0, false, 0.63},
    // A step of a small model: 40 us count.
    {"small-9-3-f32", 1, 9, 3, 1, 512, 64, DType::f32, DecodeStore::tensors, 0, false, 0},
};

/// A projection: m rows of k numbers to n. Few rows are bound by reading the weights: their reach
/// is a fraction of the read bandwidth.
struct LinearCase {
  const char* name;
  int64_t m, k, n;
  bool is_read_bound;
  double reach_avx512, reach_avx2;
};

inline constexpr LinearCase kLinearCases[] = {
    {"linear-lesson-q", 20, 128, 128, false, 0.97, 0.95},
    {"linear-lesson-v", 40, 64, 128, false, 0.97, 0.95},
    {"linear-minilm", 128, 384, 384, false, 0.97, 0.95},
    {"linear-m1024-768", 1024, 768, 768, false, 0.95, 0.94},
    {"linear-m2048-512-1536", 2048, 512, 1536, false, 0.95, 0.94},
    {"linear-m512-4096", 512, 4096, 4096, false, 0.95, 0.94},
    {"linear-m1-4096", 1, 4096, 4096, true, 0.95, 0.95},
    {"linear-m4-4096", 4, 4096, 4096, true, 0.95, 0.95},
    {"linear-m8-4096", 8, 4096, 4096, true, 0.95, 0.95},
};

/// A layer with biases: dim_q = dim_k, head_dim_qk = head_dim_v.
struct LayerCase {
  const char* name;
  int64_t batch, n_q, n_kv, num_heads, num_kv_heads, dim_k, dim_v, head_dim, dim_out;
  CaseMask mask;
  double reach_avx512, reach_avx2;
};

inline constexpr LayerCase kLayerCases[] = {
    // Microseconds count: 30 us (MHA) and 13 us (MQA).
    {"lesson-mha", 10, 2, 4, 8, 8, 128, 64, 16, 8, CaseMask::full, 0, 0},
    {"lesson-mqa", 10, 2, 4, 8, 1, 128, 64, 16, 8, CaseMask::full, 0, 0},
    {"n2048-512-h8", 1, 2048, 2048, 8, 8, 512, 512, 64, 512, CaseMask::full, 0.90, 0.87},
    {"b8-n128-768-h12", 8, 128, 128, 12, 12, 768, 768, 64, 768, CaseMask::full, 0.92, 0.90},
    {"causal-n512-2048-gqa4", 1, 512, 512, 32, 8, 2048, 2048, 64, 2048, CaseMask::causal, 0.90,
     0.87},
};

/// What `qkv bench` runs when it is not told what: the usual shapes, in half a minute.
inline constexpr const char* kSummary[] = {
    "attention/full-n2048-d64",
    "attention/causal-n2048-d128",
    "attention/causal-n512-d64",
    "attention/gqa4-causal-n1024-d128",
    "attention/bert-b8-h12-n128-d64",
    "attention/window256-n4096-d64",
    "backward/causal-n512-d64",
    "decode/mha-f32",
    "decode/mha-bf16",
    "decode/group4-bf16",
    "decode/cache-group4-i8",
    "layer/linear-minilm",
    "layer/lesson-mha",
    "layer/b8-n128-768-h12",
};

}  // namespace qkv::bench
