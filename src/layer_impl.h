// SPDX-License-Identifier: Apache-2.0
// Tier: call. What the forward and the backward of AttentionLayer share: where projected heads lie,
// the packed parameters, the checks of inputs.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>

#include "call.h"
#include "check.h"
#include "projection.h"
#include "qkv/layer.h"
#include "schedule.h"

namespace qkv {

struct LayerSizes {
  int64_t batch, n_q, n_kv;
};

/// Where the heads of one projected tensor lie in the memory of a call.
struct LayerHeads {
  int64_t floats = 0;  // in all, a multiple of the alignment
  int64_t batch_stride = 0, head_stride = 0, row_stride = 0;
  int64_t y_head = 0, y_head_stride = 0;  // of a ProjectionJob
  float* data = nullptr;

  Tensor view(int64_t batch, int64_t num_heads, int64_t tokens, int64_t dim) const {
    return {data, {batch, num_heads, tokens, dim}, {batch_stride, head_stride, row_stride, 1}};
  }
};

/// Sizes that do not overflow, or Error.
int64_t layer_times(const Check& check, int64_t a, int64_t b);
/// Token-major rows [batch, tokens, num_heads * dim]: what a projection reads.
LayerHeads token_major(const Check& check, int64_t batch, int64_t tokens, int64_t num_heads,
                       int64_t dim);
/// What attention reads fastest: [num_heads, batch, tokens, dim] where heads are whole blocks of the
/// projection that writes them, else token-major.
LayerHeads heads_of(const Check& check, const Projection& projection, int64_t batch, int64_t tokens,
                    int64_t num_heads, int64_t dim);

struct AttentionLayer::Impl {
  LayerConfig config;
  Projection q, k, v, o;
  uint64_t serial;  // of these parameters: no other layer and no earlier parameters have it

  explicit Impl(const LayerWeights& weights);
  explicit Impl(const LayerParameters& parameters);
  void refuse_in_place(const Check& check) const;
  void set(const LayerWeights& weights);

  struct Transposed {
    Projection q, k, v, o;
  };
  /// The parameters for the way back, packed on first use. Valid until set(). layer_backward.cpp.
  const Transposed& transposed() const;

  /// The heads of a forward call, where they lie.
  struct Forward {
    LayerSizes sizes;
    LayerHeads q, k, v, o;
    int64_t floats() const { return q.floats + k.floats + v.floats + o.floats; }
    void use(float* memory);
  };
  /// Checks inputs and outputs.
  Forward check_forward(const Check& check, const ConstTensor& q, const ConstTensor& k,
                        const ConstTensor& v, const LayerOutputs& outputs) const;
  AttentionOptions attention_options(const LayerOptions& options) const;
  /// Checks the options, then projects, attends and projects. lse: empty, or filled.
  void run_forward(const Check& check, const Forward& forward, const ConstTensor& q,
                   const ConstTensor& k, const ConstTensor& v, const LayerOutputs& outputs,
                   const LayerOptions& options, const Tensor& lse) const;

 private:
  mutable std::mutex mutex_;  // of what follows
  mutable std::unique_ptr<Transposed> transposed_;
  mutable uint64_t transposed_serial_ = 0;
};

struct AttentionLayer::State::Impl {
  uint64_t serial = 0;  // of the parameters of the forward; 0: no forward yet
  ConstTensor q, k, v;
  LayerOptions options;
  AttentionLayer::Impl::Forward heads;
  Tensor lse;
  ScratchBuffer forward_memory, backward_memory;
};

}  // namespace qkv
