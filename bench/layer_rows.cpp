// SPDX-License-Identifier: Apache-2.0
// Tier: benchmark. Projections and layers of cases.h as fractions of the roof.
//   flop of a projection: 2 m k n; of a layer: its four projections and, per head,
//   2 visible pairs (head_dim_qk + head_dim_v); with the backward (-train) 3 and 3.5 times that.
//   Few rows: bytes of the weights, read bandwidth.
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "projection.h"
#include "reference.h"
#include "rows.h"

namespace qkv::bench {
namespace {

double dot(const float* x, const float* w, int64_t k) {
  double sum = 0;
  for (int64_t u = 0; u < k; ++u) sum += static_cast<double>(x[u]) * static_cast<double>(w[u]);
  return sum;
}

struct Linear {
  std::vector<float> w, bias;
  Projection projection;
  Buffer x, y;

  explicit Linear(const LinearCase& c)
      : w(normal(c.n * c.k, 1 / std::sqrt(static_cast<double>(c.k)))),
        bias(normal(c.n)),
        projection(w, bias, c.n, c.k),
        x(c.m * c.k * 4),
        y(c.m * c.n * 4) {
    fill_normal(x.floats(), c.m * c.k);
  }
};

Run prepare_linear(const LinearCase& c, int num_threads) {
  const auto a = std::make_shared<Linear>(c);
  const ProjectionJob job{&a->projection, 1, c.m, a->x.floats(), 0, c.k, a->y.floats(), 0, c.n};
  Run run;
  run.call = [a, job, num_threads] { project({&job, 1}, num_threads, nullptr); };
  run.call();
  for (int64_t t = 0; t < 200; ++t) {
    const int64_t i = t * 37 % c.m, j = t * 101 % c.n;
    const double want = dot(a->x.floats() + i * c.k, a->w.data() + j * c.k, c.k) +
                        static_cast<double>(a->bias[static_cast<size_t>(j)]);
    run.error = std::max(run.error, largest_error(a->y.floats() + i * c.n + j, {want}));
  }
  run.work.num_threads = num_threads;
  run.work.reach = reach_of(c.reach_avx512, c.reach_avx2);
  if (c.is_read_bound) {
    run.work.bytes = static_cast<double>(4 * c.n * c.k);
  } else {
    run.work.flop = static_cast<double>(2 * c.m * c.k * c.n);
  }
  return run;
}

LayerWeights random_weights(const LayerCase& c) {
  LayerWeights w;
  w.config = LayerConfig::gqa(c.num_heads, c.num_kv_heads, c.dim_k, c.dim_v, c.head_dim, c.head_dim,
                              c.dim_out);
  const auto weight = [](int64_t n, int64_t k) {
    return normal(n * k, 1 / std::sqrt(static_cast<double>(k)));
  };
  w.fc_q_weight = weight(c.num_heads * c.head_dim, c.dim_k),
  w.fc_q_bias = normal(c.num_heads * c.head_dim, 0.1);
  w.fc_k_weight = weight(c.num_kv_heads * c.head_dim, c.dim_k),
  w.fc_k_bias = normal(c.num_kv_heads * c.head_dim, 0.1);
  w.fc_v_weight = weight(c.num_kv_heads * c.head_dim, c.dim_v),
  w.fc_v_bias = normal(c.num_kv_heads * c.head_dim, 0.1);
  w.fc_o_weight = weight(c.dim_out, c.num_heads * c.head_dim), w.fc_o_bias = normal(c.dim_out, 0.1);
  return w;
}

// The last output row of batch entry 0, in double.
std::vector<double> last_row(const LayerCase& c, const LayerWeights& w, const float* q,
                             const float* k, const float* v) {
  const auto rows = [](const float* x, int64_t first, int64_t count,
                       const std::vector<float>& weight, const std::vector<float>& bias,
                       int64_t width) {
    std::vector<double> y;
    for (int64_t i = first; i < first + count; ++i)
      for (size_t j = 0; j < bias.size(); ++j)
        y.push_back(dot(x + i * width, weight.data() + static_cast<int64_t>(j) * width, width) +
                    static_cast<double>(bias[j]));
    return y;
  };
  std::vector<double> qs = rows(q, c.n_q - 1, 1, w.fc_q_weight, w.fc_q_bias, c.dim_k);
  std::vector<double> ks = rows(k, 0, c.n_kv, w.fc_k_weight, w.fc_k_bias, c.dim_k);
  std::vector<double> vs = rows(v, 0, c.n_kv, w.fc_v_weight, w.fc_v_bias, c.dim_v);
  const auto heads = [&](std::vector<double>& x, int64_t num_heads, int64_t tokens) {
    return Tensor(x.data(), {1, num_heads, tokens, c.head_dim},
                  {tokens * num_heads * c.head_dim, c.head_dim, num_heads * c.head_dim, 1});
  };
  const reference::Forward f =
      reference::forward(heads(qs, c.num_heads, 1), heads(ks, c.num_kv_heads, c.n_kv),
                         heads(vs, c.num_kv_heads, c.n_kv));
  std::vector<double> row;
  const int64_t width = c.num_heads * c.head_dim;
  for (int64_t j = 0; j < c.dim_out; ++j) {
    double sum = static_cast<double>(w.fc_o_bias[static_cast<size_t>(j)]);
    for (int64_t u = 0; u < width; ++u)
      sum += f.out[static_cast<size_t>(u)] *
             static_cast<double>(w.fc_o_weight[static_cast<size_t>(j * width + u)]);
    row.push_back(sum);
  }
  return row;
}

double visible_pairs(const LayerCase& c) {
  return static_cast<double>(mask_of(c.mask).count_visible({c.batch, c.num_heads, c.n_q, c.n_kv}));
}

// A layer with its inputs and output.
struct Layer {
  LayerWeights weights;
  AttentionLayer layer;
  std::vector<float> q, k, v, output;
  ConstTensor tq, tk, tv;
  Tensor toutput;
  LayerOptions options;

  Layer(const LayerCase& c, int num_threads)
      : weights(random_weights(c)),
        layer(weights),
        q(normal(c.batch * c.n_q * c.dim_k)),
        k(normal(c.batch * c.n_kv * c.dim_k)),
        v(normal(c.batch * c.n_kv * c.dim_v)),
        output(static_cast<size_t>(c.batch * c.n_q * c.dim_out)),
        tq(q.data(), {c.batch, c.n_q, c.dim_k}),
        tk(k.data(), {c.batch, c.n_kv, c.dim_k}),
        tv(v.data(), {c.batch, c.n_kv, c.dim_v}),
        toutput(output.data(), {c.batch, c.n_q, c.dim_out}) {
    options.num_threads = num_threads, options.mask = mask_of(c.mask);
  }
};

Work layer_work(const LayerCase& c, int num_threads, bool with_backward) {
  const double rows_q = static_cast<double>(c.batch * c.n_q),
               rows_kv = static_cast<double>(c.batch * c.n_kv);
  const double width = static_cast<double>(c.num_heads * c.head_dim),
               width_kv = static_cast<double>(c.num_kv_heads * c.head_dim);
  const double projections = 2 * rows_q * width * static_cast<double>(c.dim_k + c.dim_out) +
                             2 * rows_kv * width_kv * static_cast<double>(c.dim_k + c.dim_v);
  const double heads = visible_pairs(c) * static_cast<double>(4 * c.head_dim);
  Work work;
  work.flop = with_backward ? 3 * projections + 3.5 * heads : projections + heads;
  work.num_threads = num_threads;
  work.reach = reach_of(c.reach_avx512, c.reach_avx2);
  return work;
}

Run prepare_layer(const LayerCase& c, int num_threads, bool want_weights) {
  const auto a = std::make_shared<Layer>(c, num_threads);
  const auto weights = std::make_shared<std::vector<float>>(
      static_cast<size_t>(want_weights ? c.num_heads * c.batch * c.n_q * c.n_kv : 0));
  LayerOutputs to;
  to.output = a->toutput;
  if (want_weights) to.weights = Tensor(weights->data(), {c.num_heads * c.batch, c.n_q, c.n_kv});
  Run run;
  run.call = [a, weights, to] { a->layer.forward(a->tq, a->tk, a->tv, to, a->options); };
  run.call();
  run.error = largest_error(a->output.data() + (c.n_q - 1) * c.dim_out,
                            last_row(c, a->weights, a->q.data(), a->k.data(), a->v.data()));
  run.work = layer_work(c, num_threads, false);
  return run;
}

// A layer with gradients of its inputs and parameters.
struct Training : Layer {
  std::vector<float> doutput, dq, dk, dv;
  LayerWeights dweights;
  LayerGradients gradients;
  AttentionLayer::State state;

  Training(const LayerCase& c, int num_threads)
      : Layer(c, num_threads),
        doutput(normal(c.batch * c.n_q * c.dim_out)),
        dq(q.size()),
        dk(k.size()),
        dv(v.size()),
        dweights(weights),
        gradients(LayerGradients::of(dweights)) {
    gradients.q = Tensor(dq.data(), {c.batch, c.n_q, c.dim_k});
    gradients.k = Tensor(dk.data(), {c.batch, c.n_kv, c.dim_k});
    gradients.v = Tensor(dv.data(), {c.batch, c.n_kv, c.dim_v});
  }

  // Of what is linear: the output in fc_o, and in v with fc_v.bias; the scores in q and in k, with
  // their biases.
  double error() const {
    const auto inner = [](const std::vector<float>& x, const std::vector<float>& y) {
      return dot(x.data(), y.data(), static_cast<int64_t>(x.size()));
    };
    double without_bias = inner(doutput, output);
    for (size_t e = 0; e < doutput.size(); ++e) {
      without_bias -= static_cast<double>(doutput[e]) *
                      static_cast<double>(weights.fc_o_bias[e % weights.fc_o_bias.size()]);
    }
    const double through_o = inner(weights.fc_o_weight, dweights.fc_o_weight);
    const double through_v = inner(v, dv) + inner(weights.fc_v_bias, dweights.fc_v_bias);
    const double through_q = inner(q, dq) + inner(weights.fc_q_bias, dweights.fc_q_bias);
    const double through_k = inner(k, dk) + inner(weights.fc_k_bias, dweights.fc_k_bias);
    return std::max({std::fabs(through_o - without_bias), std::fabs(through_v - without_bias),
                     std::fabs(through_q - through_k)}) /
           std::sqrt(inner(doutput, doutput) * inner(output, output));
  }
};

// Forward and backward, all gradients.
Run prepare_training(const LayerCase& c, int num_threads) {
  const auto a = std::make_shared<Training>(c, num_threads);
  Run run;
  run.call = [a, shape = std::vector<int64_t>{c.batch, c.n_q, c.dim_out}] {
    a->layer.forward_training(a->tq, a->tk, a->tv, {a->toutput, {}}, a->state, a->options);
    a->layer.backward(a->state, ConstTensor(a->doutput.data(), DType::f32, shape), a->gradients);
  };
  run.call();
  run.error = a->error();
  run.bound = 1e-5;
  run.work = layer_work(c, num_threads, true);
  return run;
}

}  // namespace

std::vector<Row> layer_rows() {
  std::vector<Row> rows;
  for (const LinearCase& c : kLinearCases)
    rows.push_back({std::string("layer/") + c.name, [&c](int n) { return prepare_linear(c, n); }});
  for (const LayerCase& c : kLayerCases) {
    const std::string name = std::string("layer/") + c.name;
    rows.push_back({name, [&c](int n) { return prepare_layer(c, n, false); }});
    rows.push_back({name + "-train", [&c](int n) { return prepare_training(c, n); }});
    if (c.reach_avx512 > 0) continue;  // in a small layer the weights show
    rows.push_back({name + "-weights", [&c](int n) { return prepare_layer(c, n, true); }});
  }
  return rows;
}

}  // namespace qkv::bench
