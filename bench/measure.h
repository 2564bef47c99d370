// SPDX-License-Identifier: Apache-2.0
// Tier: benchmark. Samples of a call between samples of the roof, so that a machine whose speed
// swings is compared with itself.
#pragma once
#include <cstdint>
#include <functional>

#include "roof.h"

namespace qkv::bench {

/// What a call does. The roof is the FMA peak, or the read bandwidth where bytes are what counts
/// (flop 0), of num_threads threads at once.
struct Work {
  double flop = 0;
  double bytes = 0;
  double roof_bytes = 0;  // of the buffer that the read bandwidth is taken from; 0: bytes
  int num_threads = 1;    // 1: CPU time of this thread (compute), else wall time
  double reach = 0;       // the fraction of the roof that is meant to be reached; shown
  bool is_compute() const { return flop > 0; }
};

/// Something to measure: its inputs live in `call`, which ran once, with this result.
struct Run {
  Work work;
  std::function<void()> call;
  double error = 0;     // against the reference
  double bound = 1e-4;  // of a correct result
  bool is_correct() const { return error < bound; }
};

/// Rates in GFLOP/s or GB/s; fractions of the roof: best over best and median over median.
struct Result {
  double rate = 0, roof = 0;  // the best of each
  double best = 0, median = 0;
  double best_us = 0, median_us = 0;
  int64_t samples = 0;
};

/// More samples than this tell nothing new.
inline constexpr int kSamples = 21;

class Sampler {
 public:
  explicit Sampler(const Run& run);
  /// Seconds of a call, the mean of as many as take 1 ms, after an eighth of them that is not timed.
  double sample();
  Result result() const;

 private:
  const Run& run_;
  double (*clock_)();
  int64_t calls_;
  Rates rates_, roofs_;
};

}  // namespace qkv::bench
