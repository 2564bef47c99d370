// SPDX-License-Identifier: Apache-2.0
// Tier: benchmark. Samples of a call between samples of the roof.
#include "measure.h"

#include <algorithm>
#include <optional>

namespace qkv::bench {

Sampler::Sampler(const Run& run)
    : run_(run),
      clock_(run.work.is_compute() && run.work.num_threads == 1 ? thread_seconds : wall_seconds) {
  const double start = clock_();
  run_.call();
  calls_ = static_cast<int64_t>(std::clamp(1e-3 / std::max(clock_() - start, 1e-9), 1.0, 1e4));
}

double Sampler::sample() {
  const Work& work = run_.work;
  std::optional<Pin> pin;  // threads that the pool starts would stay on that core
  if (work.num_threads == 1) pin.emplace();
  if (work.is_compute()) {
    for (int i = 0; i < 3; ++i) roofs_.add(fma_peak_gflops(work.num_threads));
  } else {
    const double bytes = work.roof_bytes > 0 ? work.roof_bytes : work.bytes;
    roofs_.add(read_gbps(static_cast<int64_t>(bytes), work.num_threads));
  }
  for (int64_t i = 0; i <= calls_ / 8; ++i) run_.call();
  const double start = clock_();
  for (int64_t i = 0; i < calls_; ++i) run_.call();
  const double seconds = (clock_() - start) / static_cast<double>(calls_);
  rates_.add((work.is_compute() ? work.flop : work.bytes) / seconds * 1e-9);
  return seconds;
}

Result Sampler::result() const {
  const double amount = run_.work.is_compute() ? run_.work.flop : run_.work.bytes;
  Result r;
  r.rate = rates_.best(), r.roof = roofs_.best();
  r.best = r.rate / r.roof, r.median = rates_.median() / roofs_.median();
  r.best_us = amount / r.rate * 1e-3, r.median_us = amount / rates_.median() * 1e-3;
  r.samples = static_cast<int64_t>(rates_.samples.size());
  return r;
}

}  // namespace qkv::bench
