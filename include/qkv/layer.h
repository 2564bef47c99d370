// SPDX-License-Identifier: Apache-2.0
// Tier: call. AttentionLayer: projections + heads + mask, the MHA, MQA and GQA modules of the lesson.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "qkv/attention.h"

namespace qkv {

/// Sizes of a layer. Widths are per token, head widths per head.
struct QKV_EXPORT LayerConfig {
  int64_t num_heads = 1;
  int64_t num_kv_heads = 1;
  int64_t dim_q = 0;        ///< input width of q
  int64_t dim_k = 0;        ///< input width of k
  int64_t dim_v = 0;        ///< input width of v
  int64_t head_dim_qk = 0;  ///< per head, of q and k
  int64_t head_dim_v = 0;   ///< per head, of v
  int64_t dim_out = 0;
  bool bias_q = true, bias_k = true, bias_v = true, bias_o = true;

  std::optional<double> scale;  ///< default 1 / sqrt(head_dim_qk)
  double softcap = 0;

  /// The lesson's argument order. dim_q defaults to dim_k. The sizes are checked at once.
  static LayerConfig mha(int64_t num_heads, int64_t dim_k, int64_t dim_v, int64_t head_dim_qk,
                         int64_t head_dim_v, int64_t dim_out, int64_t dim_q = 0);
  static LayerConfig mqa(int64_t num_heads, int64_t dim_k, int64_t dim_v, int64_t head_dim_qk,
                         int64_t head_dim_v, int64_t dim_out, int64_t dim_q = 0);
  static LayerConfig gqa(int64_t num_heads, int64_t num_kv_heads, int64_t dim_k, int64_t dim_v,
                         int64_t head_dim_qk, int64_t head_dim_v, int64_t dim_out,
                         int64_t dim_q = 0);

  int64_t group_size() const { return num_heads / num_kv_heads; }
  /// Weights and biases together.
  int64_t num_parameters() const;
  /// Bytes of K and V per token in a cache of elements of this type.
  int64_t kv_bytes_per_token(DType dtype) const;
  /// Throws Error, naming caller, if a size is not positive, num_kv_heads does not divide num_heads, the number of
  /// parameters overflows, or scale or softcap is not a finite number (softcap: >= 0).
  void check(const char* caller) const;
};

/// The parameters in f32, row-major [out, in] as torch.nn.Linear stores them. An absent bias is an empty vector.
struct QKV_EXPORT LayerWeights {
  LayerConfig config;
  std::vector<float> fc_q_weight;  ///< [num_heads * head_dim_qk, dim_q]
  std::vector<float> fc_q_bias;
  std::vector<float> fc_k_weight;  ///< [num_kv_heads * head_dim_qk, dim_k]
  std::vector<float> fc_k_bias;
  std::vector<float> fc_v_weight;  ///< [num_kv_heads * head_dim_v, dim_v]
  std::vector<float> fc_v_bias;
  std::vector<float> fc_o_weight;  ///< [dim_out, num_heads * head_dim_v]
  std::vector<float> fc_o_bias;

  /// Throws Error, naming caller, if config.check() fails or an array does not have the size that config asks for.
  void check(const char* caller) const;
};

struct LayerOptions {
  Mask mask{};
  ConstTensor
      bias{};  ///< the lesson's additive mask [batch, n_q, n_kv] (any broadcast of [batch, num_heads, n_q, n_kv] too)
  int num_threads = 0;
  Executor* executor = nullptr;
};

/// output [batch, n_q, dim_out]; weights head-major [num_heads * batch, n_q, n_kv], index
/// h * batch + b, after the mask and the softmax. Either may be empty: then it is never built. Both
/// f32, any strides with a contiguous last axis.
struct LayerOutputs {
  Tensor output;
  Tensor weights;
};

/// output = fc_o(concat over heads of attention(split(fc_q(q)), split(fc_k(k)), split(fc_v(v))))
///
///   q [batch, n_q, dim_q], k [batch, n_kv, dim_k], v [batch, n_kv, dim_v]   f32
///
/// Strides are free (0 broadcasts); the last axis must be contiguous. batch, n_q and n_kv may be 0.
/// Weights are packed once, at construction, for the instruction set in force. MQA and GQA read the
/// shared KV head in place. A row that sees no key gives weights 0 and the output fc_o.bias.
/// Numerics and bits as attention(): the same for any number of threads and any batch.
/// Memory: the projected q, k, v and the heads' outputs live in a Workspace, which grows to the
/// largest call and is kept: nothing of it is allocated from the second call on.
/// Throws Error before an output is written if shapes, dtypes, strides or options do not fit; the
/// text names the shapes.
/// One object may be used by several threads at once if each has its own Workspace.
class QKV_EXPORT AttentionLayer {
 public:
  /// The memory of forward(). Movable; not for two calls at once.
  class QKV_EXPORT Workspace {
   public:
    Workspace();
    ~Workspace();
    Workspace(Workspace&&) noexcept;
    Workspace& operator=(Workspace&&) noexcept;
    int64_t size_bytes() const { return size_bytes_; }

   private:
    friend class AttentionLayer;
    float* data_ = nullptr;
    int64_t size_bytes_ = 0;
    bool is_busy_ = false;
  };

  explicit AttentionLayer(const LayerWeights& weights);
  static AttentionLayer from_weights(const LayerWeights& weights) {
    return AttentionLayer(weights);
  }
  ~AttentionLayer();
  AttentionLayer(AttentionLayer&&) noexcept;
  AttentionLayer& operator=(AttentionLayer&&) noexcept;

  const LayerConfig& config() const;
  /// workspace: nullptr uses one that this thread keeps.
  void forward(ConstTensor q, ConstTensor k, ConstTensor v, const LayerOutputs& outputs,
               const LayerOptions& options = {}, Workspace* workspace = nullptr) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace qkv
