// SPDX-License-Identifier: Apache-2.0
// Tier: benchmark. Layers and projections of cases.h as fractions of the roof of the same seconds.
// One output is compared with plain loops in double before anything is timed.
//   flop of a projection: 2 m k n; of a layer: its four projections and, per head,
//   2 visible pairs (head_dim_qk + head_dim_v); with the backward (-train) 3 and 3.5 times that.
//   Few rows: bytes of the weights, read bandwidth.
//
//   layer_bench [--benchmark_filter=lesson]    QKV_ISA and QKV_BENCH_THREADS (default 1)
#include <benchmark/benchmark.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "cases.h"
#include "projection.h"
#include "qkv/layer.h"
#include "qkv/runtime.h"
#include "reference.h"
#include "sample.h"

namespace qkv::bench {
namespace {

std::vector<float> normal(int64_t n, double deviation) {
  static std::mt19937_64 random(1);
  std::normal_distribution<float> distribution(0, static_cast<float>(deviation));
  std::vector<float> x(static_cast<size_t>(n));
  for (float& v : x) v = distribution(random);
  return x;
}

void require(bool ok, const std::string& name, double error) {
  if (ok) return;
  std::fprintf(stderr, "layer_bench: %s is wrong by %g\n", name.c_str(), error);
  std::exit(1);
}

// Threads of the environment.
int num_threads() {
  const char* text = std::getenv("QKV_BENCH_THREADS");
  return text != nullptr ? std::atoi(text) : 1;
}

bool is_avx2() { return std::string_view(roof_target()) == "AVX2"; }

double dot(const float* x, const float* w, int64_t k) {
  double sum = 0;
  for (int64_t u = 0; u < k; ++u) sum += static_cast<double>(x[u]) * static_cast<double>(w[u]);
  return sum;
}

void run_linear(benchmark::State& state, const LinearCase& c) {
  const std::vector<float> w = normal(c.n * c.k, 1 / std::sqrt(static_cast<double>(c.k)));
  const std::vector<float> bias = normal(c.n, 1);
  const Projection projection(w, bias, c.n, c.k);
  const Buffer x(c.m * c.k * 4), y(c.m * c.n * 4);
  const std::vector<float> values = normal(c.m * c.k, 1);
  std::copy(values.begin(), values.end(), x.floats());
  const ProjectionJob job{&projection, 1, c.m, x.floats(), 0, c.k, y.floats(), 0, c.n};
  const auto call = [&] { project({&job, 1}, num_threads(), nullptr); };
  call();
  double error = 0;
  for (int64_t t = 0; t < 200; ++t) {
    const int64_t i = t * 37 % c.m, j = t * 101 % c.n;
    const double want = dot(x.floats() + i * c.k, w.data() + j * c.k, c.k) +
                        static_cast<double>(bias[static_cast<size_t>(j)]);
    error = std::max(error, std::fabs(want - static_cast<double>(y.floats()[i * c.n + j])));
  }
  require(error < 1e-4, c.name, error);
  Work work;
  work.num_threads = num_threads();
  work.reach = is_avx2() ? c.reach_avx2 : c.reach_avx512;
  if (c.is_read_bound) {
    work.bytes = static_cast<double>(4 * c.n * c.k);
  } else {
    work.flop = static_cast<double>(2 * c.m * c.k * c.n);
  }
  sample(state, work, call);
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

double layer_flop(const LayerCase& c) {
  const double rows_q = static_cast<double>(c.batch * c.n_q),
               rows_kv = static_cast<double>(c.batch * c.n_kv);
  const double width = static_cast<double>(c.num_heads * c.head_dim),
               width_kv = static_cast<double>(c.num_kv_heads * c.head_dim);
  const double projections = rows_q * width * static_cast<double>(c.dim_k + c.dim_out) +
                             rows_kv * width_kv * static_cast<double>(c.dim_k + c.dim_v);
  const Mask mask = c.mask == CaseMask::causal ? Mask::causal_bottom_right() : Mask::full();
  const double pairs =
      static_cast<double>(mask.count_visible({c.batch, c.num_heads, c.n_q, c.n_kv}));
  return 2 * projections + 2 * pairs * static_cast<double>(2 * c.head_dim);
}

void run_layer(benchmark::State& state, const LayerCase& c, bool want_weights) {
  const LayerWeights w = random_weights(c);
  const AttentionLayer layer(w);
  const Buffer q(c.batch * c.n_q * c.dim_k * 4), k(c.batch * c.n_kv * c.dim_k * 4),
      v(c.batch * c.n_kv * c.dim_v * 4);
  const Buffer out(c.batch * c.n_q * c.dim_out * 4),
      weights(want_weights ? c.num_heads * c.batch * c.n_q * c.n_kv * 4 : 0);
  const auto fill = [](const Buffer& to, int64_t n) {
    const std::vector<float> x = normal(n, 1);
    std::copy(x.begin(), x.end(), to.floats());
  };
  fill(q, c.batch * c.n_q * c.dim_k), fill(k, c.batch * c.n_kv * c.dim_k),
      fill(v, c.batch * c.n_kv * c.dim_v);
  LayerOutputs to;
  to.output = Tensor(out.floats(), {c.batch, c.n_q, c.dim_out});
  if (want_weights) to.weights = Tensor(weights.floats(), {c.num_heads * c.batch, c.n_q, c.n_kv});
  LayerOptions options;
  options.num_threads = num_threads();
  if (c.mask == CaseMask::causal) options.mask = Mask::causal_bottom_right();
  const ConstTensor tq(q.floats(), {c.batch, c.n_q, c.dim_k}),
      tk(k.floats(), {c.batch, c.n_kv, c.dim_k}), tv(v.floats(), {c.batch, c.n_kv, c.dim_v});
  const auto call = [&] { layer.forward(tq, tk, tv, to, options); };
  call();
  const std::vector<double> want = last_row(c, w, q.floats(), k.floats(), v.floats());
  double error = 0;
  for (int64_t j = 0; j < c.dim_out; ++j)
    error =
        std::max(error, std::fabs(want[static_cast<size_t>(j)] -
                                  static_cast<double>(out.floats()[(c.n_q - 1) * c.dim_out + j])));
  require(error < 1e-4, c.name, error);
  Work work;
  work.num_threads = num_threads();
  work.reach = is_avx2() ? c.reach_avx2 : c.reach_avx512;
  work.flop = layer_flop(c);
  sample(state, work, call);
}

// Forward and backward, all gradients. Checked by what is linear: the output in fc_o, and in v with
// fc_v.bias; the scores in q and in k, with their biases.
void run_training(benchmark::State& state, const LayerCase& c) {
  const LayerWeights w = random_weights(c);
  const AttentionLayer layer(w);
  const auto buffer = [](int64_t n) { return normal(n, 1); };
  const int64_t rows_q = c.batch * c.n_q, rows_kv = c.batch * c.n_kv;
  std::vector<float> q = buffer(rows_q * c.dim_k), k = buffer(rows_kv * c.dim_k),
                     v = buffer(rows_kv * c.dim_v), doutput = buffer(rows_q * c.dim_out);
  std::vector<float> output(doutput.size()), dq(q.size()), dk(k.size()), dv(v.size());
  LayerWeights dw = w;
  const auto queries = [&](std::vector<float>& x, int64_t dim) {
    return Tensor(x.data(), {c.batch, c.n_q, dim});
  };
  const auto keys = [&](std::vector<float>& x, int64_t dim) {
    return Tensor(x.data(), {c.batch, c.n_kv, dim});
  };
  LayerGradients gradients = LayerGradients::of(dw);
  gradients.q = queries(dq, c.dim_k), gradients.k = keys(dk, c.dim_k);
  gradients.v = keys(dv, c.dim_v);
  LayerOptions options;
  options.num_threads = num_threads();
  if (c.mask == CaseMask::causal) options.mask = Mask::causal_bottom_right();
  AttentionLayer::State kept;
  const auto call = [&] {
    layer.forward_training(queries(q, c.dim_k), keys(k, c.dim_k), keys(v, c.dim_v),
                           {queries(output, c.dim_out), {}}, kept, options);
    layer.backward(kept, queries(doutput, c.dim_out), gradients);
  };
  call();
  const auto inner = [](const std::vector<float>& x, const std::vector<float>& y) {
    return dot(x.data(), y.data(), static_cast<int64_t>(x.size()));
  };
  double without_bias = inner(doutput, output);
  for (size_t e = 0; e < doutput.size(); ++e) {
    without_bias -= static_cast<double>(doutput[e]) *
                    static_cast<double>(w.fc_o_bias[e % static_cast<size_t>(c.dim_out)]);
  }
  const double through_o = inner(w.fc_o_weight, dw.fc_o_weight);
  const double through_v = inner(v, dv) + inner(w.fc_v_bias, dw.fc_v_bias);
  const double through_q = inner(q, dq) + inner(w.fc_q_bias, dw.fc_q_bias);
  const double through_k = inner(k, dk) + inner(w.fc_k_bias, dw.fc_k_bias);
  const double error =
      std::max({std::fabs(through_o - without_bias), std::fabs(through_v - without_bias),
                std::fabs(through_q - through_k)}) /
      std::sqrt(inner(doutput, doutput) * inner(output, output));
  require(error < 1e-5, c.name, error);
  Work work;
  work.num_threads = num_threads();
  work.reach = is_avx2() ? c.reach_avx2 : c.reach_avx512;
  const Mask mask = c.mask == CaseMask::causal ? Mask::causal_bottom_right() : Mask::full();
  const double heads =
      static_cast<double>(mask.count_visible({c.batch, c.num_heads, c.n_q, c.n_kv})) *
      static_cast<double>(4 * c.head_dim);
  work.flop = 3 * (layer_flop(c) - heads) + 3.5 * heads;
  sample(state, work, call);
}

}  // namespace
}  // namespace qkv::bench

int main(int argc, char** argv) {
  using namespace qkv::bench;
  benchmark::Initialize(&argc, argv);
  if (num_threads() == 1) pin_to_core(1);
  for (const LinearCase& c : kLinearCases)
    add_case(c.name, [&c](benchmark::State& state) { run_linear(state, c); });
  for (const LayerCase& c : kLayerCases) {
    add_case(c.name, [&c](benchmark::State& state) { run_layer(state, c, false); });
    add_case(std::string(c.name) + "-train",
             [&c](benchmark::State& state) { run_training(state, c); });
    if (c.reach_avx512 > 0) continue;  // in a small layer the weights show
    add_case(std::string(c.name) + "-weights",
             [&c](benchmark::State& state) { run_layer(state, c, true); });
  }
  const qkv::Info info = qkv::info();
  benchmark::AddCustomContext("isa", info.isa + " (" + info.isa_reason + ")");
  benchmark::AddCustomContext("cpu", info.cpu);
  benchmark::AddCustomContext("compiler", info.compiler);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
