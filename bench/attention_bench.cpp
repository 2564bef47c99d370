// SPDX-License-Identifier: Apache-2.0
// Tier: benchmark. attention() over the table of cases.h, as a fraction of the FMA peak that is measured between the
// samples. Useful flop only: 2 * visible pairs * (head_dim_qk + head_dim_v). One output row per head is checked against
// the reference before timing.
//
//   attention_bench [--benchmark_filter=causal]    QKV_ISA and QKV_BENCH_THREADS (default 1) in the environment
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

Mask mask_of(const AttentionCase& c) {
  switch (c.mask) {
    case CaseMask::causal:
      return Mask::causal_bottom_right();
    case CaseMask::window256:
      return Mask::window(255, 0);
    default:
      return Mask::full();
  }
}

// Largest error of a few rows against plain double sums.
double check(const AttentionCase& c, const Mask& mask, const float* q, const float* k,
             const float* v, const float* out) {
  const MaskShape shape{c.batch, c.num_heads, c.n_q, c.n_kv};
  double worst = 0;
  for (int64_t h = 0; h < c.num_heads; h += std::max<int64_t>(c.num_heads / 2, 1)) {
    const int64_t h_kv = h / (c.num_heads / c.num_kv_heads);
    for (const int64_t i : {int64_t{0}, c.n_q / 2, c.n_q - 1}) {
      const float* qi = q + (h * c.n_q + i) * c.head_dim;
      std::vector<double> s(static_cast<size_t>(c.n_kv), -INFINITY),
          sum(static_cast<size_t>(c.head_dim));
      double top = -INFINITY, total = 0;
      for (int64_t j = 0; j < c.n_kv; ++j) {
        if (!mask.visible(shape, 0, h, i, j)) continue;
        double dot = 0;
        for (int64_t d = 0; d < c.head_dim; ++d)
          dot += static_cast<double>(qi[d]) * k[(h_kv * c.n_kv + j) * c.head_dim + d];
        s[static_cast<size_t>(j)] = dot / std::sqrt(static_cast<double>(c.head_dim));
        top = std::max(top, s[static_cast<size_t>(j)]);
      }
      for (int64_t j = 0; j < c.n_kv; ++j) {
        const double p = std::exp(s[static_cast<size_t>(j)] - top);
        total += p;
        for (int64_t d = 0; d < c.head_dim; ++d)
          sum[static_cast<size_t>(d)] += p * v[(h_kv * c.n_kv + j) * c.head_dim + d];
      }
      for (int64_t d = 0; d < c.head_dim; ++d) {
        const double want = sum[static_cast<size_t>(d)] / total;
        worst = std::max(worst, std::abs(want - out[(h * c.n_q + i) * c.head_dim + d]));
      }
    }
  }
  return worst;
}

void run_case(benchmark::State& state, const AttentionCase& c) {
  const int64_t q_size = c.batch * c.num_heads * c.n_q * c.head_dim;
  const int64_t kv_size = c.batch * c.num_kv_heads * c.n_kv * c.head_dim;
  Buffer memory((2 * q_size + 2 * kv_size) * 4);
  float *q = memory.floats(), *k = q + q_size, *v = k + kv_size, *out = v + kv_size;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < q_size + 2 * kv_size; ++i) q[i] = normal(random);
  const char* threads = std::getenv("QKV_BENCH_THREADS");
  AttentionOptions options;
  options.mask = mask_of(c);
  options.num_threads = threads ? std::atoi(threads) : 1;
  const ConstTensor qt(q, {c.batch, c.num_heads, c.n_q, c.head_dim});
  const ConstTensor kt(k, {c.batch, c.num_kv_heads, c.n_kv, c.head_dim});
  const ConstTensor vt(v, {c.batch, c.num_kv_heads, c.n_kv, c.head_dim});
  AttentionOutputs outputs;
  outputs.out = Tensor(out, {c.batch, c.num_heads, c.n_q, c.head_dim});
  const auto call = [&] { attention(qt, kt, vt, outputs, options); };
  call();
  const double error = check(c, options.mask, q, k, v, out);
  if (!(error < 1e-4))
    return state.SkipWithError(fmt::format("wrong result, error {}", error).c_str());

  const double flop =
      4.0 * static_cast<double>(c.head_dim) *
      static_cast<double>(options.mask.count_visible({c.batch, c.num_heads, c.n_q, c.n_kv}));
  const int64_t calls = std::max<int64_t>(1, static_cast<int64_t>(2e8 / flop));
  const auto clock = options.num_threads == 1 ? thread_seconds : wall_seconds;
  Rates rates, peaks;
  for (auto _ : state) {
    peaks.add(fma_peak_gflops());
    const double begin = clock();
    for (int64_t i = 0; i < calls; ++i) call();
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
  for (const AttentionCase& c : kAttentionCases) {
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
