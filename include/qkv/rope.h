// SPDX-License-Identifier: Apache-2.0
// Tier: call. Positions: rotary embedding (RoPE) of q and k, and the slopes of ALiBi.
#pragma once
#include <cstdint>
#include <vector>

#include "qkv/tensor.h"

namespace qkv {

/// Which features make a pair that turns together.
enum class RopeStyle : uint8_t {
  half_split,   ///< pair i is (i, i + rot_dim / 2): Llama as stored by transformers, NeoX
  interleaved,  ///< pair i is (2 i, 2 i + 1): GPT-J, Llama's own files
};

struct RopeOptions {
  double base = 10000;  ///< theta
  RopeStyle style = RopeStyle::half_split;
  int64_t rot_dim = -1;  ///< the first rot_dim features turn, the others pass through; -1: all
};

/// Rotary position embedding: pair i of a row at position p turns by p * base^(-2 i / rot_dim):
///
///   (a, b)  ->  (a cos - b sin, b cos + a sin)
///
///   x          [batch, heads, tokens, dim]            f32 | f64 | bf16 | f16
///   positions  [tokens], or [batch or 1, tokens]      i32 | i64; any sign
///   out        as x; may be x itself, else overlaps nothing
///
/// Angles, sines and cosines are computed in double, then used in f32 (f64 for f64); out is rounded
/// once. Strides are free, the last axis is contiguous; any extent may be 0.
/// Cost: batch * tokens * rot_dim / 2 sines and cosines, and 3 * rot_dim flop for each row.
/// Throws Error before anything is written if shapes or types do not fit, rot_dim is odd or larger
/// than dim, or base is not positive and finite.
/// Source: RoFormer, arXiv:2104.09864.
QKV_EXPORT void rope(ConstTensor x, ConstTensor positions, Tensor out,
                     const RopeOptions& options = {});

/// The slopes of ALiBi for num_heads heads: 2^(-8 i / n), i = 1 ... n, for the largest power of two
/// n <= num_heads, then every second slope of 2 n. Throws Error if num_heads < 1.
/// Source: arXiv:2108.12409.
QKV_EXPORT std::vector<float> alibi_slopes(int64_t num_heads);

}  // namespace qkv
