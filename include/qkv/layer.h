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

class KvCache;         // kv_cache.h
struct KvCacheConfig;  // kv_cache.h

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

/// The same parameters where they are, f32 and contiguous: what other software holds and changes. An
/// absent bias is an empty tensor.
struct QKV_EXPORT LayerParameters {
  LayerConfig config;
  ConstTensor fc_q_weight{}, fc_q_bias{};
  ConstTensor fc_k_weight{}, fc_k_bias{};
  ConstTensor fc_v_weight{}, fc_v_bias{};
  ConstTensor fc_o_weight{}, fc_o_bias{};

  /// Views of all parameters of `weights`, which must outlive them. Throws as weights.check().
  static LayerParameters of(const LayerWeights& weights);
  /// Throws Error, naming caller, if config.check() fails or a tensor does not fit config.
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
  Tensor output{};
  Tensor weights{};
};

/// What a gradient does to the memory that it arrives in.
enum class GradientWrite : uint8_t {
  overwrite,  ///< writes it
  add,        ///< is added to what is there: micro-batches, and inputs with several readers
};

/// Where AttentionLayer::backward() puts gradients, all f32. An empty tensor means "not wanted" and
/// costs nothing; asking for more never changes the others by a bit.
struct QKV_EXPORT LayerGradients {
  /// As the inputs. Those that are one tensor (self-attention: all three; k and v of a memory: two)
  /// may be the same view here: it then receives the sum, in the order q, k, v.
  Tensor q{}, k{}, v{};
  /// As the parameters [out, in] and [out]. A bias that the layer does not have must be empty.
  Tensor fc_q_weight{}, fc_q_bias{}, fc_k_weight{}, fc_k_bias{};
  Tensor fc_v_weight{}, fc_v_bias{}, fc_o_weight{}, fc_o_bias{};
  GradientWrite inputs = GradientWrite::overwrite;      ///< of q, k and v
  GradientWrite parameters = GradientWrite::overwrite;  ///< of the eight

  /// Views of all parameters of `into`; absent biases stay absent. No input. Throws Error if an array
  /// does not have the size that into.config asks for.
  static LayerGradients of(LayerWeights& into);
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
  };

  /// What backward() needs of a forward_training() call: its arguments as views (the memory of q, k,
  /// v, bias and dense masks must stay as it was), and copies of the projected heads, their outputs
  /// and lse. The first backward() doubles that memory; all of it grows to the largest call and is
  /// kept. Movable; not for two calls at once.
  class QKV_EXPORT State {
   public:
    State();
    ~State();
    State(State&&) noexcept;
    State& operator=(State&&) noexcept;

   private:
    friend class AttentionLayer;
    struct Impl;
    std::unique_ptr<Impl> impl_;
  };

  explicit AttentionLayer(const LayerWeights& weights);
  /// A layer over parameters that stay the caller's: every call reads them as they are then, so they may
  /// change between calls and must outlive the layer. Nothing is copied or packed ahead. The bits of a
  /// layer made of the same values. A call packs each panel of weights on the way, once per 128 rows of
  /// input: 5.4 us on top of 36 for the lesson's MHA, 0.9 on top of 26 for its MQA (Zen 3, AVX2). No
  /// training: forward_training() and set_weights() are refused.
  explicit AttentionLayer(const LayerParameters& parameters);
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

  /// Self-attention of n more tokens: projects x, appends its keys and values to the cache, lets the
  /// n tokens attend over all that the cache holds, and projects the heads' outputs.
  ///
  ///   x               [batch, n, dim], dim_q = dim_k = dim_v = dim
  ///   outputs.output  [batch, n, dim_out];  outputs.weights  [num_heads * batch, n, longest + n]
  ///
  /// Causal by position unless options.mask is given. RoPE, QK-norm, window, kind and element type are
  /// the cache's (cache_config()). Token by token and all at once give the same numbers; without rope
  /// those of forward() with causal_bottom_right. Throws Error and leaves the cache as it was if
  /// something does not fit. The memory of a step is taken and given back.
  void step(ConstTensor x, KvCache& cache, const LayerOutputs& outputs,
            const LayerOptions& options = {}) const;
  /// Cross-attention: projects k [batch, n, dim_k] and v [batch, n, dim_v] into the cache, once.
  void project_kv(ConstTensor k, ConstTensor v, KvCache& cache,
                  const LayerOptions& options = {}) const;
  /// Cross-attention over a cache that project_kv() filled and that stays as it is: the bits of
  /// forward(). Every key is visible unless options.mask hides it. Not for a cache with window or rope.
  ///
  ///   q  [batch, n_q, dim_q];  n_q may be larger than the number of keys
  void attend(ConstTensor q, const KvCache& cache, const LayerOutputs& outputs,
              const LayerOptions& options = {}) const;
  /// The sizes of a cache for this layer; capacity 0: no limit.
  KvCacheConfig cache_config(int64_t batch, int64_t capacity = 0) const;

  /// forward() that fills `state` for backward(); the same bits.
  void forward_training(ConstTensor q, ConstTensor k, ConstTensor v, const LayerOutputs& outputs,
                        State& state, const LayerOptions& options = {}) const;

  /// Gradients of sum(doutput * output) of the forward_training() call that filled `state`, with
  /// respect to the inputs and the parameters. With y = x w^T + b: dx = dy w, dw = dy^T x summed over
  /// batch and tokens, db = sum of dy.
  ///
  ///   doutput [batch, n_q, dim_out]   f32, any strides with a contiguous last axis
  ///
  /// Options, threads and executor are those of the forward. The same state may be used again. A
  /// gradient that arrives at the returned weights is not supported: there is no argument for it.
  /// Gradients overlap neither arguments nor each other, but for the same view of inputs above.
  /// A row that sees no key, and a key that no row sees, get exact zeros; NaN or Inf in a hidden row of
  /// k or v reaches no gradient.
  /// Same bits for any number of threads; gradients of inputs also for any batch.
  /// Cost: twice the flop of the forward's projections and 2.5 times those of its attention. The first
  /// call after construction or set_weights() packs the weights a second time, transposed.
  /// Throws Error before a gradient is written if shapes do not fit, if `state` is empty or of another
  /// layer, or if set_weights() was called since.
  void backward(State& state, ConstTensor doutput, const LayerGradients& gradients) const;

  /// Other parameters, as after a step of an optimiser: packs them into the memory of the old ones.
  /// Sizes and absent biases must be those of config(). Not while another call uses this layer.
  void set_weights(const LayerWeights& weights);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace qkv
