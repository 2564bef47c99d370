// SPDX-License-Identifier: Apache-2.0
// Tier: plan. What a dense mask or bias does to each tile of kDenseTileTokens queries x kDenseTileKeys keys: hide all of it,
// nothing, or something in between. Read once per call (or once for a prepared mask), shared by all heads and batch entries
// that share the array.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "qkv/attention.h"

namespace qkv {

struct DenseTiles {
  static constexpr uint8_t kSomeVisible = 1;  // some element is not -inf (true)
  static constexpr uint8_t kSomeNotZero = 2;  // some element is neither 0 nor true

  std::vector<uint8_t> bits;
  int64_t batch_stride = 0, head_stride = 0, token_stride = 0,
          key_stride = 0;  // in tiles; 0: broadcast
};

/// Reads every element of the array once; on the executor of the options if it is large.
DenseTiles make_dense_tiles(const ConstTensor& dense, const AttentionOptions& options);

/// True if reading the array once more than the kernel does pays for a call.
bool wants_dense_tiles(const ConstTensor& dense, const MaskShape& shape);

}  // namespace qkv
