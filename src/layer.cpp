// SPDX-License-Identifier: Apache-2.0
// Tier: call. AttentionLayer: checks every argument, projects q, k and v into a workspace, attends
// on views of it, projects the heads' outputs. Nothing is written before all checks have passed.
#include "qkv/layer.h"

#include <fmt/format.h>

#include <new>
#include <utility>

#include "call.h"
#include "check.h"
#include "projection.h"

namespace qkv {
namespace {

const Check kCheck("AttentionLayer::forward");

int64_t times(int64_t a, int64_t b) {
  int64_t product;
  if (__builtin_mul_overflow(a, b, &product)) {
    kCheck.refuse("the sizes are too large for this machine");
  }
  return product;
}

struct Sizes {
  int64_t batch, n_q, n_kv;
};

// columns: of the weight [columns, width] that t meets.
void check_input(const ConstTensor& t, const char* what, int64_t width, int64_t columns) {
  if (t.rank != 3) {
    kCheck.refuse(
        fmt::format("{0} needs 3 axes [batch, tokens, dim_{0}], got {1}", what, shape_text(t)));
  }
  if (t.shape[2] != width) {
    kCheck.refuse(fmt::format("dim_{0} differs, got {0} {1} and fc_{0}.weight [{2}, {3}]", what,
                              shape_text(t), columns, width));
  }
  if (t.dtype != DType::f32)
    kCheck.refuse(fmt::format("{} must be f32, got {}", what, name(t.dtype)));
  kCheck.layout(t, what);
}

Sizes check_inputs(const LayerConfig& c, const ConstTensor& q, const ConstTensor& k,
                   const ConstTensor& v) {
  check_input(q, "q", c.dim_q, c.num_heads * c.head_dim_qk);
  check_input(k, "k", c.dim_k, c.num_kv_heads * c.head_dim_qk);
  check_input(v, "v", c.dim_v, c.num_kv_heads * c.head_dim_v);
  if (q.shape[0] != k.shape[0] || q.shape[0] != v.shape[0]) {
    kCheck.refuse(fmt::format("batch differs, got q {}, k {} and v {}", shape_text(q),
                              shape_text(k), shape_text(v)));
  }
  if (k.shape[1] != v.shape[1]) {
    kCheck.refuse(
        fmt::format("n_kv of k and v differ, got k {} and v {}", shape_text(k), shape_text(v)));
  }
  return {q.shape[0], q.shape[1], k.shape[1]};
}

void check_outputs(const LayerConfig& c, const Sizes& n, const LayerOutputs& outputs) {
  if (outputs.output) {
    kCheck.output(outputs.output, "outputs.output", {n.batch, n.n_q, c.dim_out}, DType::f32);
    kCheck.layout(outputs.output, "outputs.output");
  }
  if (outputs.weights) {
    kCheck.output(outputs.weights, "outputs.weights", {times(c.num_heads, n.batch), n.n_q, n.n_kv},
                  DType::f32);
    kCheck.layout(outputs.weights, "outputs.weights");
  }
}

// Where the heads of one projected tensor lie in the workspace.
struct Heads {
  int64_t floats = 0;  // in all, a multiple of the alignment
  int64_t batch_stride, head_stride, row_stride;
  int64_t y_head = 0, y_head_stride = 0;  // of a ProjectionJob
  float* data = nullptr;

  Tensor view(int64_t batch, int64_t num_heads, int64_t tokens, int64_t dim) const {
    return {data, {batch, num_heads, tokens, dim}, {batch_stride, head_stride, row_stride, 1}};
  }
};

constexpr int64_t kAlignFloats = kernels::kAlignment / 4;

int64_t aligned(int64_t n) { return (n + kAlignFloats - 1) / kAlignFloats * kAlignFloats; }

// Token-major rows [batch, tokens, num_heads * dim]: what a projection reads, and writes where
// heads are not whole vectors.
Heads token_major(int64_t batch, int64_t tokens, int64_t num_heads, int64_t dim) {
  Heads h;
  h.row_stride = num_heads * dim;
  // Rows a multiple of 1 KB apart fall into few sets of the cache (Zen 5, n 512, 8 heads, d 128:
  // attention at 0.72 of the FMA peak, 0.80 with one more cache line per row).
  if (h.row_stride % 256 == 0) h.row_stride += 16;
  h.head_stride = dim;
  h.batch_stride = times(tokens, h.row_stride);
  h.floats = aligned(times(batch, h.batch_stride));
  return h;
}

// [num_heads, batch, tokens, dim]: each head's rows in one piece, which attention reads fastest
// (Zen 5: as fast as separate tensors).
Heads head_major(int64_t batch, int64_t tokens, int64_t num_heads, int64_t dim) {
  Heads h;
  h.row_stride = dim;
  h.batch_stride = times(tokens, dim);
  h.head_stride = times(batch, h.batch_stride);
  h.floats = aligned(times(num_heads, h.head_stride));
  h.y_head = dim, h.y_head_stride = h.head_stride;
  return h;
}

ProjectionJob job(const Projection& projection, const ConstTensor& x, const Heads& to) {
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

// Batch entries whose rows follow each other become one group of rows: larger tiles.
void join_groups(ProjectionJob* j) {
  const bool x_follows = j->rows == 1 || j->x_group_stride == j->rows * j->x_row_stride;
  const bool y_follows = j->rows == 1 || j->y_group_stride == j->rows * j->y_row_stride;
  if (j->groups <= 1 || !x_follows || !y_follows) return;
  if (j->rows == 1) j->x_row_stride = j->x_group_stride, j->y_row_stride = j->y_group_stride;
  j->rows = times(j->rows, j->groups), j->groups = 1;
}

}  // namespace

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

struct AttentionLayer::Impl {
  LayerConfig config;
  Projection q, k, v, o;

  explicit Impl(const LayerWeights& w)
      : config(w.config),
        q(w.fc_q_weight, w.fc_q_bias, config.num_heads * config.head_dim_qk, config.dim_q),
        k(w.fc_k_weight, w.fc_k_bias, config.num_kv_heads * config.head_dim_qk, config.dim_k),
        v(w.fc_v_weight, w.fc_v_bias, config.num_kv_heads * config.head_dim_v, config.dim_v),
        o(w.fc_o_weight, w.fc_o_bias, config.dim_out, config.num_heads * config.head_dim_v) {}
};

namespace {
const LayerWeights& checked(const LayerWeights& weights) {
  weights.check("AttentionLayer");
  return weights;
}
}  // namespace

AttentionLayer::AttentionLayer(const LayerWeights& weights)
    : impl_(std::make_unique<Impl>(checked(weights))) {}
AttentionLayer::~AttentionLayer() = default;
AttentionLayer::AttentionLayer(AttentionLayer&&) noexcept = default;
AttentionLayer& AttentionLayer::operator=(AttentionLayer&&) noexcept = default;

const LayerConfig& AttentionLayer::config() const { return impl_->config; }

void AttentionLayer::forward(ConstTensor q, ConstTensor k, ConstTensor v,
                             const LayerOutputs& outputs, const LayerOptions& options,
                             Workspace* workspace) const {
  const LayerConfig& c = impl_->config;
  const Sizes n = check_inputs(c, q, k, v);
  check_outputs(c, n, outputs);

  const auto place = [&](int64_t tokens, int64_t num_heads, int64_t dim, int64_t block) {
    return dim % block == 0 ? head_major(n.batch, tokens, num_heads, dim)
                            : token_major(n.batch, tokens, num_heads, dim);
  };
  Heads hq = place(n.n_q, c.num_heads, c.head_dim_qk, impl_->q.block());
  Heads hk = place(n.n_kv, c.num_kv_heads, c.head_dim_qk, impl_->k.block());
  Heads hv = place(n.n_kv, c.num_kv_heads, c.head_dim_v, impl_->v.block());
  Heads ho = token_major(n.batch, n.n_q, c.num_heads, c.head_dim_v);
  const int64_t bytes = times(hq.floats + hk.floats + hv.floats + ho.floats, 4);

  // An executor may run another call of this thread's inside this one: that call gets memory of its
  // own.
  thread_local Workspace kept;
  Workspace own;
  Workspace& w = workspace != nullptr ? *workspace : kept.is_busy_ ? own : kept;
  if (bytes > w.size_bytes_) {
    w = Workspace();
    w.data_ = static_cast<float*>(
        ::operator new (static_cast<size_t>(bytes), std::align_val_t{kernels::kAlignment}));
    w.size_bytes_ = bytes;
  }
  struct Busy {
    bool* flag;
    explicit Busy(bool* f) : flag(f) { *flag = true; }
    ~Busy() { *flag = false; }
  } busy(&w.is_busy_);
  hq.data = w.data_;
  hk.data = hq.data + hq.floats;
  hv.data = hk.data + hk.floats;
  ho.data = hv.data + hv.floats;

  AttentionOptions attention_options;
  attention_options.mask = options.mask;
  attention_options.bias = options.bias;
  attention_options.scale = c.scale;
  attention_options.softcap = c.softcap;
  attention_options.num_threads = options.num_threads;
  attention_options.executor = options.executor;
  Call call =
      kCheck.call(hq.view(n.batch, c.num_heads, n.n_q, c.head_dim_qk),
                  hk.view(n.batch, c.num_kv_heads, n.n_kv, c.head_dim_qk),
                  hv.view(n.batch, c.num_kv_heads, n.n_kv, c.head_dim_v), attention_options);
  if (outputs.output) call.out = ho.view(n.batch, c.num_heads, n.n_q, c.head_dim_v);
  if (const Tensor& t = outputs.weights) {
    call.weights = Tensor(static_cast<float*>(t.data), {n.batch, c.num_heads, n.n_q, n.n_kv},
                          {t.stride[0], n.batch * t.stride[0], t.stride[1], 1});
  }
  if (!outputs.output && !outputs.weights) return;

  ProjectionJob jobs[] = {job(impl_->q, q, hq), job(impl_->k, k, hk), job(impl_->v, v, hv)};
  for (ProjectionJob& j : jobs) join_groups(&j);
  project(jobs, options.num_threads, options.executor);
  run(call);
  if (!outputs.output) return;
  const Tensor& output = outputs.output;
  ProjectionJob last;
  last.projection = &impl_->o;
  last.groups = n.batch, last.rows = n.n_q;
  last.x = ho.data, last.x_group_stride = ho.batch_stride, last.x_row_stride = ho.row_stride;
  last.y = static_cast<float*>(output.data);
  last.y_group_stride = output.stride[0], last.y_row_stride = output.stride[1];
  join_groups(&last);
  project({&last, 1}, options.num_threads, options.executor);
}

}  // namespace qkv
