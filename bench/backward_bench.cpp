// SPDX-License-Identifier: Apache-2.0
// Tier: benchmark. attention_backward() over the table of cases.h, as a fraction of the FMA peak that is measured between
// the samples. Useful flop only: visible pairs * (6 * head_dim_qk + 4 * head_dim_v). Some rows of dq are checked against
// plain double sums before timing.
//
//   backward_bench [--benchmark_filter=causal]    QKV_ISA and QKV_BENCH_THREADS (default 1) in the environment
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <cmath>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "cases.h"
#include "qkv/qkv.h"
#include "roof.h"

namespace qkv::bench {
namespace {

// Inputs, results and gradients of a case, one behind the other.
struct Arrays {
  const BackwardCase& c;
  Buffer memory;
  float *q, *k, *v, *dout, *bias, *out, *dq, *dk, *dv, *dbias, *lse;

  explicit Arrays(const BackwardCase& row) : c(row), memory(4 * place(nullptr)) {
    place(memory.floats());
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (float* x = q; x < out; ++x) *x = normal(random);
  }
  int64_t place(float* at) {
    int64_t total = 0;
    const auto take = [&](int64_t n) {
      float* p = at ? at + total : nullptr;
      total += n;
      return p;
    };
    const int64_t q_rows = c.batch * c.num_heads * c.n, kv_rows = c.batch * c.num_kv_heads * c.n;
    const int64_t scores = c.with_bias ? c.num_heads * c.n * c.n : 0;
    q = take(q_rows * c.head_dim_qk), k = take(kv_rows * c.head_dim_qk);
    v = take(kv_rows * c.head_dim_v), dout = take(q_rows * c.head_dim_v), bias = take(scores);
    out = take(q_rows * c.head_dim_v), dq = take(q_rows * c.head_dim_qk);
    dk = take(kv_rows * c.head_dim_qk), dv = take(kv_rows * c.head_dim_v), dbias = take(scores);
    lse = take(q_rows);
    return total;
  }
  Tensor queries(float* p, int64_t dim) const {
    return Tensor(p, {c.batch, c.num_heads, c.n, dim});
  }
  Tensor keys(float* p, int64_t dim) const {
    return Tensor(p, {c.batch, c.num_kv_heads, c.n, dim});
  }
  Tensor scores(float* p) const { return Tensor(p, {1, c.num_heads, c.n, c.n}); }
};

// Largest error of dq in a few rows of batch entry 0, from lse.
double check(const Arrays& a, const AttentionOptions& options) {
  const BackwardCase& c = a.c;
  const MaskShape shape{c.batch, c.num_heads, c.n, c.n};
  const double scale = 1 / std::sqrt(static_cast<double>(c.head_dim_qk));
  double worst = 0;
  for (int64_t h = 0; h < c.num_heads; h += std::max<int64_t>(c.num_heads / 2, 1)) {
    const int64_t h_kv = h / (c.num_heads / c.num_kv_heads);
    for (const int64_t i : {int64_t{0}, c.n / 2, c.n - 1}) {
      const int64_t row = h * c.n + i;
      const auto dot = [](const float* x, const float* y, int64_t n) {
        double sum = 0;
        for (int64_t d = 0; d < n; ++d) sum += static_cast<double>(x[d]) * y[d];
        return sum;
      };
      const float* dout = a.dout + row * c.head_dim_v;
      const double delta = dot(a.out + row * c.head_dim_v, dout, c.head_dim_v);
      std::vector<double> dq(static_cast<size_t>(c.head_dim_qk));
      for (int64_t j = 0; j < c.n; ++j) {
        if (!options.mask.visible(shape, 0, h, i, j)) continue;
        const float* k = a.k + (h_kv * c.n + j) * c.head_dim_qk;
        const float* v = a.v + (h_kv * c.n + j) * c.head_dim_v;
        double s = scale * dot(a.q + row * c.head_dim_qk, k, c.head_dim_qk);
        if (c.with_bias) s += a.bias[row * c.n + j];
        const double ds = std::exp(s - a.lse[row]) * (dot(dout, v, c.head_dim_v) - delta);
        for (int64_t d = 0; d < c.head_dim_qk; ++d) dq[static_cast<size_t>(d)] += scale * ds * k[d];
      }
      for (int64_t d = 0; d < c.head_dim_qk; ++d)
        worst =
            std::max(worst, std::abs(dq[static_cast<size_t>(d)] - a.dq[row * c.head_dim_qk + d]));
    }
  }
  return worst;
}

void run_case(benchmark::State& state, const BackwardCase& c) {
  const Arrays a(c);
  const char* threads = std::getenv("QKV_BENCH_THREADS");
  AttentionOptions options;
  if (c.mask == CaseMask::causal) options.mask = Mask::causal_bottom_right();
  if (c.with_bias) options.bias = a.scores(a.bias);
  options.num_threads = threads ? std::atoi(threads) : 1;
  BackwardInputs inputs;
  inputs.q = a.queries(a.q, c.head_dim_qk), inputs.k = a.keys(a.k, c.head_dim_qk);
  inputs.v = a.keys(a.v, c.head_dim_v), inputs.dout = a.queries(a.dout, c.head_dim_v);
  inputs.out = a.queries(a.out, c.head_dim_v);
  inputs.lse = Tensor(a.lse, {c.batch, c.num_heads, c.n});
  BackwardOutputs outputs;
  outputs.dq = a.queries(a.dq, c.head_dim_qk), outputs.dk = a.keys(a.dk, c.head_dim_qk);
  outputs.dv = a.keys(a.dv, c.head_dim_v);
  if (c.with_bias) outputs.dbias = a.scores(a.dbias);
  AttentionOutputs forward;
  forward.out = a.queries(a.out, c.head_dim_v),
  forward.lse = Tensor(a.lse, {c.batch, c.num_heads, c.n});
  attention(inputs.q, inputs.k, inputs.v, forward, options);
  attention_backward(inputs, outputs, options);
  const double error = check(a, options);
  if (!(error < 1e-4))
    return state.SkipWithError(fmt::format("wrong result, error {}", error).c_str());
  if (c.with_dropout) options.dropout = 0.1;
  attention(inputs.q, inputs.k, inputs.v, forward, options);

  const double flop =
      static_cast<double>(6 * c.head_dim_qk + 4 * c.head_dim_v) *
      static_cast<double>(options.mask.count_visible({c.batch, c.num_heads, c.n, c.n}));
  const int64_t calls = std::max<int64_t>(1, static_cast<int64_t>(2e8 / flop));
  const auto clock = options.num_threads == 1 ? thread_seconds : wall_seconds;
  Rates rates, peaks;
  for (auto _ : state) {
    peaks.add(fma_peak_gflops());
    const double begin = clock();
    for (int64_t i = 0; i < calls; ++i) attention_backward(inputs, outputs, options);
    const double seconds = (clock() - begin) / static_cast<double>(calls);
    rates.add(flop / seconds * 1e-9);
    state.SetIterationTime(seconds);
  }
  const double peak = peaks.best() * options.num_threads;
  const bool avx2 = std::string(roof_target()) == "AVX2";
  state.counters["GFLOPs"] = rates.best();
  state.counters["peak"] = peak;
  state.counters["best"] = rates.best() / peak;
  state.counters["median"] = rates.median() / (peaks.median() * options.num_threads);
  state.counters["reach"] = avx2 ? c.reach_avx2 : c.reach_avx512;
  state.counters["best_us"] = flop / rates.best() * 1e-3;
}

}  // namespace
}  // namespace qkv::bench

int main(int argc, char** argv) {
  using namespace qkv::bench;
  const char* threads = std::getenv("QKV_BENCH_THREADS");
  if (!threads || std::atoi(threads) == 1)
    pin_to_core(1);  // threads of the pool would stay on that core
  const qkv::Info info = qkv::info();
  benchmark::AddCustomContext("isa", info.isa);
  benchmark::AddCustomContext("cpu", info.cpu);
  benchmark::AddCustomContext("compiler", info.compiler);
  benchmark::AddCustomContext("qkv", info.version);
  for (const BackwardCase& c : kBackwardCases) {
    benchmark::RegisterBenchmark(c.name, [&c](benchmark::State& state) { run_case(state, c); })
        ->UseManualTime()
        ->Unit(benchmark::kMicrosecond)
        ->Iterations(25);
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
