// SPDX-License-Identifier: Apache-2.0
// Tier: benchmark. Samples of a call between samples of the roof, so that a machine whose speed
// swings is compared with itself. Best and median of each, and their ratios.
#pragma once
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>

#include "roof.h"

namespace qkv::bench {

/// What a call does. The roof is the FMA peak, or the read bandwidth where bytes are what counts
/// (flop 0); times num_threads.
struct Work {
  double flop = 0;
  double bytes = 0;
  double roof_bytes = 0;  // of the buffer that the read bandwidth is taken from; 0: bytes
  int num_threads = 1;    // 1: CPU time of this thread (compute), else wall time
  double reach = 0;       // the fraction that is meant to be reached; shown
};

inline constexpr int kSamples = 21;

/// The body of a benchmark with manual time and kSamples iterations. A sample is as many calls as
/// take 1 ms, after an eighth of them that is not timed. Counters: rate (GFLOP/s or GB/s) and roof,
/// the best of each; best and median, their ratios; best_us and median_us.
inline void sample(benchmark::State& state, const Work& work, const std::function<void()>& call) {
  const bool is_compute = work.flop > 0;
  const auto clock = is_compute && work.num_threads == 1 ? thread_seconds : wall_seconds;
  const double amount = is_compute ? work.flop : work.bytes;
  const auto roof_bytes = static_cast<int64_t>(work.roof_bytes > 0 ? work.roof_bytes : work.bytes);
  double start = clock();
  call();
  const double first = std::max(clock() - start, 1e-9);
  const auto calls = static_cast<int64_t>(std::clamp(1e-3 / first, 1.0, 1e4));
  Rates rates, roofs;
  for (auto _ : state) {
    for (int i = 0; i < (is_compute ? 3 : 1); ++i)
      roofs.add(is_compute ? fma_peak_gflops() : read_gbps(roof_bytes));
    for (int64_t i = 0; i <= calls / 8; ++i) call();
    start = clock();
    for (int64_t i = 0; i < calls; ++i) call();
    const double seconds = (clock() - start) / static_cast<double>(calls);
    rates.add(amount / seconds * 1e-9);
    state.SetIterationTime(seconds);
  }
  state.counters["rate"] = rates.best();
  state.counters["roof"] = roofs.best() * work.num_threads;
  state.counters["best"] = rates.best() / (roofs.best() * work.num_threads);
  state.counters["median"] = rates.median() / (roofs.median() * work.num_threads);
  state.counters["reach"] = work.reach;
  state.counters["best_us"] = amount / rates.best() * 1e-3;
  state.counters["median_us"] = amount / rates.median() * 1e-3;
}

/// Registers a benchmark that sample() runs.
inline void add_case(const std::string& name, const std::function<void(benchmark::State&)>& body) {
  benchmark::RegisterBenchmark(name.c_str(), body)
      ->UseManualTime()
      ->Iterations(kSamples)
      ->Unit(benchmark::kMicrosecond);
}

}  // namespace qkv::bench
