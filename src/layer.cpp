// SPDX-License-Identifier: Apache-2.0
// Tier: call. AttentionLayer: checks every argument, projects q, k and v into a workspace, attends
// on views of it, projects the heads' outputs. Nothing is written before all checks have passed.
#include "qkv/layer.h"

#include <fmt/format.h>

#include <atomic>
#include <new>
#include <optional>
#include <utility>

#include "kept_memory.h"
#include "layer_impl.h"

namespace qkv {
namespace {

// columns: of the weight [columns, width] that t meets.
void check_input(const Check& check, const ConstTensor& t, const char* what, int64_t width,
                 int64_t columns) {
  if (t.rank != 3) {
    check.refuse(
        fmt::format("{0} needs 3 axes [batch, tokens, dim_{0}], got {1}", what, shape_text(t)));
  }
  if (t.shape[2] != width) {
    check.refuse(fmt::format("dim_{0} differs, got {0} {1} and fc_{0}.weight [{2}, {3}]", what,
                             shape_text(t), columns, width));
  }
  if (t.dtype != DType::f32)
    check.refuse(fmt::format("{} must be f32, got {}", what, name(t.dtype)));
  check.layout(t, what);
}

LayerSizes check_inputs(const Check& check, const LayerConfig& c, const ConstTensor& q,
                        const ConstTensor& k, const ConstTensor& v) {
  check_input(check, q, "q", c.dim_q, c.num_heads * c.head_dim_qk);
  check_input(check, k, "k", c.dim_k, c.num_kv_heads * c.head_dim_qk);
  check_input(check, v, "v", c.dim_v, c.num_kv_heads * c.head_dim_v);
  if (q.shape[0] != k.shape[0] || q.shape[0] != v.shape[0]) {
    check.refuse(fmt::format("batch differs, got q {}, k {} and v {}", shape_text(q), shape_text(k),
                             shape_text(v)));
  }
  if (k.shape[1] != v.shape[1]) {
    check.refuse(
        fmt::format("n_kv of k and v differ, got k {} and v {}", shape_text(k), shape_text(v)));
  }
  return {q.shape[0], q.shape[1], k.shape[1]};
}

void check_outputs(const Check& check, const LayerConfig& c, const LayerSizes& n,
                   const LayerOutputs& outputs) {
  if (outputs.output) {
    check.output(outputs.output, "outputs.output", {n.batch, n.n_q, c.dim_out}, DType::f32);
    check.layout(outputs.output, "outputs.output");
  }
  if (outputs.weights) {
    check.output(outputs.weights, "outputs.weights",
                 {layer_times(check, c.num_heads, n.batch), n.n_q, n.n_kv}, DType::f32);
    check.layout(outputs.weights, "outputs.weights");
  }
}

constexpr int64_t kAlignFloats = kernels::kAlignment / 4;

int64_t aligned(int64_t n) { return (n + kAlignFloats - 1) / kAlignFloats * kAlignFloats; }

ProjectionJob job(const Projection& projection, const ConstTensor& x, const LayerHeads& to) {
  ProjectionJob j;
  j.projection = &projection;
  j.groups = x.shape[0], j.rows = x.shape[1];
  j.x = static_cast<const float*>(x.data);
  j.x_group_stride = x.stride[0], j.x_row_stride = x.stride[1];
  j.y = to.data;
  j.y_group_stride = to.batch_stride, j.y_row_stride = to.row_stride;
  j.y_head = to.y_head, j.y_head_stride = to.y_head_stride;
  return j;
}

// No two layers, and no two sets of parameters of a layer, have the same number.
uint64_t next_serial() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

}  // namespace

int64_t layer_times(const Check& check, int64_t a, int64_t b) {
  int64_t product;
  if (__builtin_mul_overflow(a, b, &product)) {
    check.refuse("the sizes are too large for this machine");
  }
  return product;
}

LayerHeads token_major(const Check& check, int64_t batch, int64_t tokens, int64_t num_heads,
                       int64_t dim) {
  LayerHeads h;
  h.row_stride = num_heads * dim;
  // Rows a multiple of 1 KB apart fall into few sets of the cache (Zen 5, n 512, 8 heads, d 128:
  // attention at 0.72 of the FMA peak, 0.80 with one more cache line per row).
  if (h.row_stride % 256 == 0) h.row_stride += 16;
  h.head_stride = dim;
  h.batch_stride = layer_times(check, tokens, h.row_stride);
  h.floats = aligned(layer_times(check, batch, h.batch_stride));
  return h;
}

// Head-major: each head's rows in one piece (Zen 5: as fast as separate tensors).
LayerHeads heads_of(const Check& check, const Projection& projection, int64_t batch, int64_t tokens,
                    int64_t num_heads, int64_t dim) {
  if (dim % projection.block() != 0) return token_major(check, batch, tokens, num_heads, dim);
  LayerHeads h;
  h.row_stride = dim;
  h.batch_stride = layer_times(check, tokens, dim);
  h.head_stride = layer_times(check, batch, h.batch_stride);
  h.floats = aligned(layer_times(check, num_heads, h.head_stride));
  h.y_head = dim, h.y_head_stride = h.head_stride;
  return h;
}

AttentionLayer::Workspace::Workspace() = default;

AttentionLayer::Workspace::~Workspace() {
  ::operator delete (data_, std::align_val_t{kernels::kAlignment});
}

AttentionLayer::Workspace::Workspace(Workspace&& o) noexcept
    : data_(std::exchange(o.data_, nullptr)), size_bytes_(std::exchange(o.size_bytes_, 0)) {}

AttentionLayer::Workspace& AttentionLayer::Workspace::operator=(Workspace&& o) noexcept {
  std::swap(data_, o.data_);
  std::swap(size_bytes_, o.size_bytes_);
  return *this;
}

AttentionLayer::Impl::Impl(const LayerWeights& w)
    : config(w.config),
      q(w.fc_q_weight, w.fc_q_bias, config.num_heads * config.head_dim_qk, config.dim_q),
      k(w.fc_k_weight, w.fc_k_bias, config.num_kv_heads * config.head_dim_qk, config.dim_k),
      v(w.fc_v_weight, w.fc_v_bias, config.num_kv_heads * config.head_dim_v, config.dim_v),
      o(w.fc_o_weight, w.fc_o_bias, config.dim_out, config.num_heads * config.head_dim_v),
      serial(next_serial()) {}

namespace {
Projection in_place(const ConstTensor& weight, const ConstTensor& bias) {
  return Projection::in_place(static_cast<const float*>(weight.data),
                              static_cast<const float*>(bias.data), weight.shape[0],
                              weight.shape[1]);
}
}  // namespace

AttentionLayer::Impl::Impl(const LayerParameters& p)
    : config(p.config),
      q(in_place(p.fc_q_weight, p.fc_q_bias)),
      k(in_place(p.fc_k_weight, p.fc_k_bias)),
      v(in_place(p.fc_v_weight, p.fc_v_bias)),
      o(in_place(p.fc_o_weight, p.fc_o_bias)),
      serial(next_serial()) {}

void AttentionLayer::Impl::refuse_in_place(const Check& check) const {
  if (q.is_in_place())
    check.refuse("a layer over LayerParameters cannot be trained; make one of LayerWeights");
}

void AttentionLayer::Impl::set(const LayerWeights& w) {
  config = w.config;
  q.set(w.fc_q_weight, w.fc_q_bias), k.set(w.fc_k_weight, w.fc_k_bias);
  v.set(w.fc_v_weight, w.fc_v_bias), o.set(w.fc_o_weight, w.fc_o_bias);
  serial = next_serial();
}

void AttentionLayer::Impl::Forward::use(float* memory) {
  q.data = memory;
  k.data = q.data + q.floats;
  v.data = k.data + k.floats;
  o.data = v.data + v.floats;
}

AttentionLayer::Impl::Forward AttentionLayer::Impl::check_forward(
    const Check& check, const ConstTensor& tq, const ConstTensor& tk, const ConstTensor& tv,
    const LayerOutputs& outputs) const {
  const LayerConfig& c = config;
  const LayerSizes n = check_inputs(check, c, tq, tk, tv);
  check_outputs(check, c, n, outputs);
  return {n, heads_of(check, q, n.batch, n.n_q, c.num_heads, c.head_dim_qk),
          heads_of(check, k, n.batch, n.n_kv, c.num_kv_heads, c.head_dim_qk),
          heads_of(check, v, n.batch, n.n_kv, c.num_kv_heads, c.head_dim_v),
          token_major(check, n.batch, n.n_q, c.num_heads, c.head_dim_v)};
}

AttentionOptions AttentionLayer::Impl::attention_options(const LayerOptions& options) const {
  AttentionOptions a;
  a.mask = options.mask;
  a.bias = options.bias;
  a.scale = config.scale;
  a.softcap = config.softcap;
  a.num_threads = options.num_threads;
  a.executor = options.executor;
  return a;
}

void AttentionLayer::Impl::run_forward(const Check& check, const Forward& f, const ConstTensor& tq,
                                       const ConstTensor& tk, const ConstTensor& tv,
                                       const LayerOutputs& outputs, const LayerOptions& options,
                                       const Tensor& lse) const {
  const LayerConfig& c = config;
  const LayerSizes& n = f.sizes;
  const AttentionOptions attention = attention_options(options);
  Call call = check.call(f.q.view(n.batch, c.num_heads, n.n_q, c.head_dim_qk),
                         f.k.view(n.batch, c.num_kv_heads, n.n_kv, c.head_dim_qk),
                         f.v.view(n.batch, c.num_kv_heads, n.n_kv, c.head_dim_v), attention);
  if (outputs.output || lse) call.out = f.o.view(n.batch, c.num_heads, n.n_q, c.head_dim_v);
  call.lse = lse;
  if (const Tensor& t = outputs.weights) {
    call.weights = Tensor(static_cast<float*>(t.data), {n.batch, c.num_heads, n.n_q, n.n_kv},
                          {t.stride[0], n.batch * t.stride[0], t.stride[1], 1});
  }
  if (!call.out && !call.weights) return;

  ProjectionJob jobs[] = {job(q, tq, f.q), job(k, tk, f.k), job(v, tv, f.v)};
  for (ProjectionJob& j : jobs) join_groups(&j);
  project(jobs, options.num_threads, options.executor);
  run(call);
  if (!outputs.output) return;
  const Tensor& output = outputs.output;
  ProjectionJob last;
  last.projection = &o;
  last.groups = n.batch, last.rows = n.n_q;
  last.x = f.o.data, last.x_group_stride = f.o.batch_stride, last.x_row_stride = f.o.row_stride;
  last.y = static_cast<float*>(output.data);
  last.y_group_stride = output.stride[0], last.y_row_stride = output.stride[1];
  join_groups(&last);
  project({&last, 1}, options.num_threads, options.executor);
}

namespace {
template <class Parameters>
const Parameters& checked(const Parameters& parameters) {
  parameters.check("AttentionLayer");
  return parameters;
}
}  // namespace

AttentionLayer::AttentionLayer(const LayerWeights& weights)
    : impl_(std::make_unique<Impl>(checked(weights))) {}
AttentionLayer::AttentionLayer(const LayerParameters& parameters)
    : impl_(std::make_unique<Impl>(checked(parameters))) {}
AttentionLayer::~AttentionLayer() = default;
AttentionLayer::AttentionLayer(AttentionLayer&&) noexcept = default;
AttentionLayer& AttentionLayer::operator=(AttentionLayer&&) noexcept = default;

const LayerConfig& AttentionLayer::config() const { return impl_->config; }

void AttentionLayer::forward(ConstTensor q, ConstTensor k, ConstTensor v,
                             const LayerOutputs& outputs, const LayerOptions& options,
                             Workspace* workspace) const {
  const Check check("AttentionLayer::forward");
  Impl::Forward f = impl_->check_forward(check, q, k, v, outputs);
  const int64_t bytes = layer_times(check, f.floats(), 4);

  std::optional<KeptMemory<Workspace>> kept;
  Workspace& w = workspace != nullptr ? *workspace : kept.emplace().get();
  if (bytes > w.size_bytes_) {
    w = Workspace();
    w.data_ = static_cast<float*>(
        ::operator new (static_cast<size_t>(bytes), std::align_val_t{kernels::kAlignment}));
    w.size_bytes_ = bytes;
  }
  f.use(w.data_);
  impl_->run_forward(check, f, q, k, v, outputs, options, {});
}

}  // namespace qkv
