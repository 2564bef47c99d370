// SPDX-License-Identifier: Apache-2.0
// Tier: benchmark. What cores can do at most: FMA peak and read bandwidth, taken in the same seconds
// as a measurement.
#pragma once
#include <sched.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace qkv::bench {

/// CPU time of this thread: what other processes do on the core does not count. For compute-bound
/// work on one thread.
double thread_seconds();
/// Monotonic wall time: for threads and for DRAM.
double wall_seconds();
/// Keeps this thread on one core, the last of those it may use, while the object lives.
class Pin {
 public:
  Pin();
  ~Pin();
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;

 private:
  cpu_set_t before_;
};

/// f32 fused multiply-adds of independent register chains in the widest vectors of the instruction
/// set in force (Highway's chosen target: set_isa, QKV_ISA), 2 flop each, on num_threads threads at
/// once: the sum of their rates. About 0.2 ms; a sample, so take the best of several. A set without
/// fused multiply-add counts a multiply and an add.
double fma_peak_gflops(int num_threads = 1);
/// Bytes per second of plain vector loads over a buffer of this many bytes (wall time), each of
/// num_threads threads reading its part. A buffer that fits a cache is read once before, then often
/// enough for 64 MB. Parts are rounded down to 16 KB; 0 for less. The buffer is kept until a call
/// with another size.
double read_gbps(int64_t bytes, int num_threads = 1);
/// Highway's name of the target that the two functions above use.
const char* roof_target();

/// Zeroed memory aligned to 2 MiB with huge pages asked for: what a benchmark works on. Freed with
/// the object.
class Buffer {
 public:
  explicit Buffer(int64_t bytes);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  float* floats() const { return static_cast<float*>(data_); }
  void* data() const { return data_; }

 private:
  void* data_;
  size_t mapped_bytes_;
  void* mapped_;
};

/// Samples of a rate. Best and median of at least one sample.
struct Rates {
  std::vector<double> samples;
  void add(double rate) { samples.push_back(rate); }
  double best() const { return quantile(1); }
  double median() const { return quantile(0.5); }
  double quantile(double q) const;
};

}  // namespace qkv::bench
