// SPDX-License-Identifier: Apache-2.0
// Tier: benchmark. What a call of the pool costs: an empty region, and two tasks of 50 us on two threads,
// hot and after a pause of 2 ms in which the workers fall asleep. "extra" is the time beyond one task.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "thread_pool.h"

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void nothing(void*, int64_t) {}
void work_50_us(void*, int64_t) {
  for (const auto start = Clock::now(); seconds_since(start) < 50e-6;) {
  }
}

void BM_EmptyRegion(benchmark::State& state) {
  qkv::ThreadPool pool;
  const int num_threads = static_cast<int>(state.range(0));
  for (auto _ : state) pool.run(num_threads, num_threads, nothing, nullptr);
}
BENCHMARK(BM_EmptyRegion)->Arg(1)->Arg(2)->Arg(4)->ArgName("threads")->UseRealTime();

void BM_TwoTasks(benchmark::State& state) {
  qkv::ThreadPool pool;
  const bool has_pause = state.range(0) != 0;
  std::vector<double> extra;
  for (int i = 0; i < 20; i++) pool.run(2, 2, work_50_us, nullptr);
  for (auto _ : state) {
    if (has_pause) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    const auto start = Clock::now();
    pool.run(2, 2, work_50_us, nullptr);
    const double time = seconds_since(start);
    state.SetIterationTime(time);
    extra.push_back(time - 50e-6);
  }
  std::nth_element(extra.begin(), extra.begin() + extra.size() / 2, extra.end());
  state.counters["median_extra_us"] = extra[extra.size() / 2] * 1e6;
}
BENCHMARK(BM_TwoTasks)->Arg(0)->Arg(1)->ArgName("pause")->UseManualTime()->Iterations(1000);

}  // namespace

BENCHMARK_MAIN();
