// SPDX-License-Identifier: Apache-2.0
// Tier: benchmark. The main function of attention_bench, backward_bench, decode_bench and layer_bench: the rows of a
// family (QKV_BENCH_FAMILY) under Google Benchmark. Counters: rate (GFLOP/s or GB/s) and roof, the best of each; best and
// median, the fractions of the roof; reach; best_us and median_us.
//
//   attention_bench [--benchmark_filter=causal]    QKV_ISA and QKV_BENCH_THREADS (default 1) in the environment
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <cstdlib>
#include <string>

#include "rows.h"

namespace qkv::bench {
namespace {

void measure(benchmark::State& state, const Row& row, int num_threads) {
  const Run run = row.prepare(num_threads);
  if (!run.is_correct())
    return state.SkipWithError(fmt::format("wrong result, error {}", run.error).c_str());
  Sampler sampler(run);
  for (auto _ : state) state.SetIterationTime(sampler.sample());
  const Result r = sampler.result();
  state.counters["rate"] = r.rate;
  state.counters["roof"] = r.roof;
  state.counters["best"] = r.best;
  state.counters["median"] = r.median;
  state.counters["reach"] = run.work.reach;
  state.counters["best_us"] = r.best_us;
  state.counters["median_us"] = r.median_us;
}

}  // namespace
}  // namespace qkv::bench

int main(int argc, char** argv) {
  using namespace qkv::bench;
  const char* variable = std::getenv("QKV_BENCH_THREADS");
  const int num_threads = variable != nullptr ? std::atoi(variable) : 1;
  const qkv::Info info = qkv::info();
  benchmark::AddCustomContext("isa", info.isa + " (" + info.isa_reason + ")");
  benchmark::AddCustomContext("cpu", info.cpu);
  benchmark::AddCustomContext("compiler", info.compiler);
  benchmark::AddCustomContext("qkv", info.version);
  for (const Row& row : all_rows()) {
    if (!row.name.starts_with(QKV_BENCH_FAMILY "/")) continue;
    benchmark::RegisterBenchmark(
        row.name.c_str(),
        [row, num_threads](benchmark::State& state) { measure(state, row, num_threads); })
        ->UseManualTime()
        ->Iterations(kSamples)
        ->Unit(benchmark::kMicrosecond);
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
