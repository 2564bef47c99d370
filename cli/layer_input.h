// SPDX-License-Identifier: Apache-2.0
// Tier: command line. What a layer runs on: q, k, v and a mask, read from a safetensors file and
// checked against the layer.
#pragma once
#include <string>
#include <vector>

#include "qkv/layer.h"
#include "qkv/weights.h"

namespace qkv::cli {

/// Views into the mapped file, or into copies where the file is not f32 or not aligned.
struct LayerInput {
  ConstTensor q, k, v;  // [batch, n_q, dim_q], [batch, n_kv, dim_k], [batch, n_kv, dim_v], f32
  ConstTensor bias;  // the tensor mask, if it is additive: f32, broadcast over [batch, n_q, n_kv]
  Mask mask;         // the tensor mask, if it is boolean (true = attend); else full
  std::string mask_text;           // "additive mask [10, 2, 4]", or empty
  std::vector<std::string> notes;  // which tensor stands in for an absent one

  std::vector<SafetensorsFile> files;       // keep the mapping alive
  std::vector<std::vector<float>> storage;  // converted tensors

  MaskShape mask_shape(const LayerConfig& config) const {
    return {q.shape[0], config.num_heads, q.shape[1], k.shape[1]};
  }
};

/// Reads q, k, v, or x for self-attention, and mask. An absent q is x; an absent k is x, else q; an
/// absent v is x, else k. Other tensors are ignored. Throws Error naming the file and both shapes
/// if something does not fit.
LayerInput read_layer_input(const std::string& path, const LayerConfig& config);

}  // namespace qkv::cli
