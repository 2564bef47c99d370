// SPDX-License-Identifier: Apache-2.0
// Tier: call. AttentionLayer's training: a forward that keeps what the backward needs, the backward
// (through fc_o, the heads' attention, fc_q, fc_k and fc_v, then the parameters), and other weights.
// Nothing is written before all checks have passed.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "backward.h"
#include "layer_impl.h"
#include "projection_gradient.h"

namespace qkv {
namespace {

// One of the four projections: its gradients, as the caller wants them.
struct Part {
  const char* name;
  int64_t rows, columns;
  bool has_bias;
  const Tensor& weight;
  const Tensor& bias;

  bool is_wanted() const { return weight || bias; }
};

std::array<Part, 4> parts_of(const LayerConfig& c, const LayerGradients& g) {
  return {{{"fc_q", c.num_heads * c.head_dim_qk, c.dim_q, c.bias_q, g.fc_q_weight, g.fc_q_bias},
           {"fc_k", c.num_kv_heads * c.head_dim_qk, c.dim_k, c.bias_k, g.fc_k_weight, g.fc_k_bias},
           {"fc_v", c.num_kv_heads * c.head_dim_v, c.dim_v, c.bias_v, g.fc_v_weight, g.fc_v_bias},
           {"fc_o", c.dim_out, c.num_heads * c.head_dim_v, c.bias_o, g.fc_o_weight, g.fc_o_bias}}};
}

void check_parameters(const Check& check, const std::array<Part, 4>& parts) {
  for (const Part& part : parts) {
    const std::string weight = fmt::format("gradients.{}_weight", part.name);
    const std::string bias = fmt::format("gradients.{}_bias", part.name);
    if (part.weight) {
      check.output(part.weight, weight.c_str(), {part.rows, part.columns}, DType::f32);
      check.layout(part.weight, weight.c_str());
    }
    if (!part.bias) continue;
    if (!part.has_bias)
      check.refuse(fmt::format("{} is wanted but the layer has no {}.bias", bias, part.name));
    check.output(part.bias, bias.c_str(), {part.rows}, DType::f32);
    check.layout(part.bias, bias.c_str());
  }
}

bool is_same_view(const Tensor& a, const Tensor& b) {
  return a.data == b.data && std::equal(a.shape, a.shape + 3, b.shape) &&
         std::equal(a.stride, a.stride + 3, b.stride);
}

// The gradients of q, k and v. Two at one address must be one view.
void check_inputs(const Check& check, const ConstTensor (&inputs)[3], const Tensor* const (&g)[3]) {
  constexpr const char* kNames[] = {"gradients.q", "gradients.k", "gradients.v"};
  for (int t = 0; t < 3; ++t) {
    if (!*g[t]) continue;
    const int64_t* n = inputs[t].shape;
    check.output(*g[t], kNames[t], {n[0], n[1], n[2]}, DType::f32);
    check.layout(*g[t], kNames[t]);
    for (int other = 0; other < t; ++other) {
      if (!*g[other] || g[other]->data != g[t]->data || g[t]->num_elements() == 0) continue;
      if (!is_same_view(*g[other], *g[t])) {
        check.refuse(fmt::format("{} and {} begin at the same address but differ, got {} and {}",
                                 kNames[other], kNames[t], shape_text(*g[other]),
                                 shape_text(*g[t])));
      }
    }
  }
}

// x: rows of heads; y: the gradient of an input.
ProjectionJob input_job(const Projection& transposed, const LayerHeads& x, const Tensor& y) {
  ProjectionJob j;
  j.projection = &transposed;
  j.groups = y.shape[0], j.rows = y.shape[1];
  j.x = x.data, j.x_group_stride = x.batch_stride, j.x_row_stride = x.row_stride;
  j.y = static_cast<float*>(y.data), j.y_group_stride = y.stride[0], j.y_row_stride = y.stride[1];
  join_groups(&j);
  return j;
}

void set_dy(ProjectionGradientJob* j, const LayerHeads& dy) {
  j->dy = dy.data, j->dy_group_stride = dy.batch_stride, j->dy_row_stride = dy.row_stride;
}

ProjectionGradientJob parameter_job(const Part& part, int64_t groups, int64_t rows, bool adds) {
  ProjectionGradientJob j;
  j.n = part.rows, j.k = part.columns, j.groups = groups, j.rows = rows, j.adds = adds;
  j.dw = static_cast<float*>(part.weight.data), j.dw_row_stride = part.weight.stride[0];
  j.dbias = static_cast<float*>(part.bias.data);
  return j;
}

void check_same(const LayerConfig& a, const LayerConfig& b) {
  const auto sizes = [](const LayerConfig& c) {
    return std::array<int64_t, 12>{c.num_heads, c.num_kv_heads, c.dim_q,      c.dim_k,
                                   c.dim_v,     c.head_dim_qk,  c.head_dim_v, c.dim_out,
                                   c.bias_q,    c.bias_k,       c.bias_v,     c.bias_o};
  };
  constexpr const char* kNames[] = {"num_heads", "num_kv_heads", "dim_q",      "dim_k",
                                    "dim_v",     "head_dim_qk",  "head_dim_v", "dim_out",
                                    "bias_q",    "bias_k",       "bias_v",     "bias_o"};
  for (size_t i = 0; i < 12; ++i) {
    if (sizes(a)[i] == sizes(b)[i]) continue;
    Check("AttentionLayer::set_weights")
        .refuse(fmt::format("{} differs, the layer has {}, got {}", kNames[i], sizes(a)[i],
                            sizes(b)[i]));
  }
}

}  // namespace

LayerGradients LayerGradients::of(LayerWeights& into) {
  into.check("LayerGradients::of");
  const LayerConfig& c = into.config;
  LayerGradients g;
  const auto weight = [](std::vector<float>& w, int64_t rows, int64_t columns) {
    return Tensor(w.data(), {rows, columns});
  };
  const auto bias = [](std::vector<float>& b) {
    return b.empty() ? Tensor() : Tensor(b.data(), {static_cast<int64_t>(b.size())});
  };
  g.fc_q_weight = weight(into.fc_q_weight, c.num_heads * c.head_dim_qk, c.dim_q);
  g.fc_k_weight = weight(into.fc_k_weight, c.num_kv_heads * c.head_dim_qk, c.dim_k);
  g.fc_v_weight = weight(into.fc_v_weight, c.num_kv_heads * c.head_dim_v, c.dim_v);
  g.fc_o_weight = weight(into.fc_o_weight, c.dim_out, c.num_heads * c.head_dim_v);
  g.fc_q_bias = bias(into.fc_q_bias), g.fc_k_bias = bias(into.fc_k_bias);
  g.fc_v_bias = bias(into.fc_v_bias), g.fc_o_bias = bias(into.fc_o_bias);
  return g;
}

AttentionLayer::State::State() = default;
AttentionLayer::State::~State() = default;
AttentionLayer::State::State(State&&) noexcept = default;
AttentionLayer::State& AttentionLayer::State::operator=(State&&) noexcept = default;

const AttentionLayer::Impl::Transposed& AttentionLayer::Impl::transposed() const {
  const std::lock_guard lock(mutex_);
  if (!transposed_) {
    transposed_ = std::make_unique<Transposed>(
        Transposed{q.transposed(), k.transposed(), v.transposed(), o.transposed()});
  } else if (transposed_serial_ != serial) {
    q.transpose_into(&transposed_->q), k.transpose_into(&transposed_->k);
    v.transpose_into(&transposed_->v), o.transpose_into(&transposed_->o);
  }
  transposed_serial_ = serial;
  return *transposed_;
}

void AttentionLayer::set_weights(const LayerWeights& weights) {
  impl_->refuse_in_place(Check("AttentionLayer::set_weights"));
  weights.check("AttentionLayer::set_weights");
  check_same(impl_->config, weights.config);
  impl_->set(weights);
}

void AttentionLayer::forward_training(ConstTensor q, ConstTensor k, ConstTensor v,
                                      const LayerOutputs& outputs, State& state,
                                      const LayerOptions& options) const {
  const Check check("AttentionLayer::forward_training");
  impl_->refuse_in_place(check);
  const LayerConfig& c = impl_->config;
  Impl::Forward f = impl_->check_forward(check, q, k, v, outputs);
  const LayerSizes& n = f.sizes;
  const int64_t rows = layer_times(check, layer_times(check, n.batch, c.num_heads), n.n_q);
  const int64_t bytes = layer_times(check, f.floats() + rows, 4);
  if (!state.impl_) state.impl_ = std::make_unique<State::Impl>();
  State::Impl& s = *state.impl_;
  s.serial = 0;  // what is refused from here on leaves an empty state
  f.use(static_cast<float*>(s.forward_memory.reserve(std::max<int64_t>(bytes, 1))));
  s.lse = Tensor(f.q.data + f.floats(), {n.batch, c.num_heads, n.n_q});
  impl_->run_forward(check, f, q, k, v, outputs, options, s.lse);
  s.q = q, s.k = k, s.v = v, s.options = options, s.heads = f;
  s.serial = impl_->serial;
}

void AttentionLayer::backward(State& state, ConstTensor doutput, const LayerGradients& g) const {
  const Check check("AttentionLayer::backward");
  if (!state.impl_ || state.impl_->serial == 0)
    check.refuse("the state holds no call of forward_training()");
  State::Impl& s = *state.impl_;
  if (s.serial != impl_->serial) {
    check.refuse(
        "the state is of another layer, or set_weights() was called after its forward_training()");
  }
  const LayerConfig& c = impl_->config;
  const Impl::Forward& f = s.heads;
  const LayerSizes& n = f.sizes;
  check.shape(doutput, "doutput", {n.batch, n.n_q, c.dim_out}, DType::f32);
  check.layout(doutput, "doutput");
  const Tensor* const inputs[3] = {&g.q, &g.k, &g.v};
  check_inputs(check, {s.q, s.k, s.v}, inputs);
  const std::array<Part, 4> parts = parts_of(c, g);
  check_parameters(check, parts);

  // Memory: the gradients of the heads' outputs, and of the projected q, k and v.
  const Impl::Transposed& back = impl_->transposed();
  LayerHeads dout = heads_of(check, back.o, n.batch, n.n_q, c.num_heads, c.head_dim_v);
  LayerHeads d[3] = {token_major(check, n.batch, n.n_q, c.num_heads, c.head_dim_qk),
                     token_major(check, n.batch, n.n_kv, c.num_kv_heads, c.head_dim_qk),
                     token_major(check, n.batch, n.n_kv, c.num_kv_heads, c.head_dim_v)};
  const int64_t floats = dout.floats + d[0].floats + d[1].floats + d[2].floats;
  dout.data = static_cast<float*>(
      s.backward_memory.reserve(std::max<int64_t>(layer_times(check, floats, 4), 1)));
  d[0].data = dout.data + dout.floats, d[1].data = d[0].data + d[0].floats;
  d[2].data = d[1].data + d[1].floats;

  const AttentionOptions options = impl_->attention_options(s.options);
  BackwardCall call{};
  call.call = check.call(f.q.view(n.batch, c.num_heads, n.n_q, c.head_dim_qk),
                         f.k.view(n.batch, c.num_kv_heads, n.n_kv, c.head_dim_qk),
                         f.v.view(n.batch, c.num_kv_heads, n.n_kv, c.head_dim_v), options);
  bool wanted[3];
  for (size_t t = 0; t < 3; ++t) wanted[t] = *inputs[t] || parts[t].is_wanted();
  if (wanted[0]) call.outputs.dq = d[0].view(n.batch, c.num_heads, n.n_q, c.head_dim_qk);
  if (wanted[1]) call.outputs.dk = d[1].view(n.batch, c.num_kv_heads, n.n_kv, c.head_dim_qk);
  if (wanted[2]) call.outputs.dv = d[2].view(n.batch, c.num_kv_heads, n.n_kv, c.head_dim_v);
  if (wanted[0] || wanted[1] || wanted[2]) {
    ProjectionJob first;
    first.projection = &back.o;
    first.groups = n.batch, first.rows = n.n_q;
    first.x = static_cast<const float*>(doutput.data);
    first.x_group_stride = doutput.stride[0], first.x_row_stride = doutput.stride[1];
    first.y = dout.data, first.y_group_stride = dout.batch_stride;
    first.y_row_stride = dout.row_stride;
    first.y_head = dout.y_head, first.y_head_stride = dout.y_head_stride;
    join_groups(&first);
    project({&first, 1}, options.num_threads, options.executor);
    call.out = f.o.view(n.batch, c.num_heads, n.n_q, c.head_dim_v);
    call.lse = s.lse;
    call.dout = dout.view(n.batch, c.num_heads, n.n_q, c.head_dim_v);
    run(call);
  }

  // Inputs. Those that share their memory are added one after the other.
  const Projection* const transposed[3] = {&back.q, &back.k, &back.v};
  ProjectionJob together[kMaxProjectionJobs];
  size_t num_together = 0;
  for (size_t t = 0; t < 3; ++t) {
    if (!*inputs[t]) continue;
    ProjectionJob j = input_job(*transposed[t], d[t], *inputs[t]);
    j.adds = g.inputs == GradientWrite::add;
    bool is_shared = false;
    for (size_t before = 0; before < t; ++before)
      is_shared = is_shared || (*inputs[before] && inputs[before]->data == inputs[t]->data);
    if (is_shared) {
      project({together, num_together}, options.num_threads, options.executor);
      num_together = 0;
      j.adds = true;
    }
    together[num_together++] = j;
  }
  project({together, num_together}, options.num_threads, options.executor);

  ProjectionGradientJob jobs[4];
  size_t num_jobs = 0;
  const bool adds = g.parameters == GradientWrite::add;
  const ConstTensor* const x[3] = {&s.q, &s.k, &s.v};
  for (size_t t = 0; t < 3; ++t) {
    if (!parts[t].is_wanted()) continue;
    ProjectionGradientJob& j = jobs[num_jobs++];
    j = parameter_job(parts[t], n.batch, x[t]->shape[1], adds);
    set_dy(&j, d[t]);
    j.x = static_cast<const float*>(x[t]->data);
    j.x_group_stride = x[t]->stride[0], j.x_row_stride = x[t]->stride[1];
  }
  if (parts[3].is_wanted()) {
    ProjectionGradientJob& j = jobs[num_jobs++];
    j = parameter_job(parts[3], n.batch, n.n_q, adds);
    j.dy = static_cast<const float*>(doutput.data);
    j.dy_group_stride = doutput.stride[0], j.dy_row_stride = doutput.stride[1];
    j.x = f.o.data, j.x_group_stride = f.o.batch_stride, j.x_row_stride = f.o.row_stride;
  }
  project_gradients({jobs, num_jobs}, options.num_threads, options.executor);
}

}  // namespace qkv
