// SPDX-License-Identifier: Apache-2.0
// Tier: benchmark. The roofs of cores: FMA peak and read bandwidth with the vectors of the
// instruction set in force. Compiled once per Highway target, so that a forced instruction set is
// compared with its own peak.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "roof.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>

HWY_BEFORE_NAMESPACE();
namespace qkv::bench {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

#undef QKV_ROOF_KEEP
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
#define QKV_ROOF_KEEP(v) asm volatile("" : : "r"(&(v)) : "memory")
#elif HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86
#define QKV_ROOF_KEEP(v) asm volatile("" : "+v"((v).raw))
#elif HWY_ARCH_X86
#define QKV_ROOF_KEEP(v) asm volatile("" : "+x"((v).raw))
#else
#define QKV_ROOF_KEEP(v) asm volatile("" : "+w"((v).raw))
#endif

// 12 chains cover 2 pipes x 4 to 5 cycles of latency and fit the 16 registers of AVX2 beside the
// two factors.
int64_t FmaChains(int64_t steps) {
  const D d;
  V a = hn::Set(d, 0.5f), b = hn::Set(d, 0.25f);
  QKV_ROOF_KEEP(a);
  QKV_ROOF_KEEP(b);
  // Every chain starts elsewhere: equal chains would be merged.
  V c0 = hn::Set(d, 0.0f);
  V c1 = hn::Set(d, 1.0f);
  V c2 = hn::Set(d, 2.0f);
  V c3 = hn::Set(d, 3.0f);
  V c4 = hn::Set(d, 4.0f);
  V c5 = hn::Set(d, 5.0f);
  V c6 = hn::Set(d, 6.0f);
  V c7 = hn::Set(d, 7.0f);
  V c8 = hn::Set(d, 8.0f);
  V c9 = hn::Set(d, 9.0f);
  V c10 = hn::Set(d, 10.0f);
  V c11 = hn::Set(d, 11.0f);
  for (int64_t i = 0; i < steps; ++i) {
    c0 = hn::MulAdd(a, b, c0), c1 = hn::MulAdd(a, b, c1), c2 = hn::MulAdd(a, b, c2);
    c3 = hn::MulAdd(a, b, c3), c4 = hn::MulAdd(a, b, c4), c5 = hn::MulAdd(a, b, c5);
    c6 = hn::MulAdd(a, b, c6), c7 = hn::MulAdd(a, b, c7), c8 = hn::MulAdd(a, b, c8);
    c9 = hn::MulAdd(a, b, c9), c10 = hn::MulAdd(a, b, c10), c11 = hn::MulAdd(a, b, c11);
    // Without fused multiply-add the product would leave the loop.
    QKV_ROOF_KEEP(a);
  }
  QKV_ROOF_KEEP(c0);
  QKV_ROOF_KEEP(c1);
  QKV_ROOF_KEEP(c2);
  QKV_ROOF_KEEP(c3);
  QKV_ROOF_KEEP(c4);
  QKV_ROOF_KEEP(c5);
  QKV_ROOF_KEEP(c6);
  QKV_ROOF_KEEP(c7);
  QKV_ROOF_KEEP(c8);
  QKV_ROOF_KEEP(c9);
  QKV_ROOF_KEEP(c10);
  QKV_ROOF_KEEP(c11);
  return steps * 12 * 2 * static_cast<int64_t>(hn::Lanes(d));
}

// Blocks of four streams side by side. n is a multiple of 4 * stream, stream of 2 vectors.
void ReadAll(const float* begin, int64_t n, int64_t stream) {
  const D d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (const float* block = begin; block != begin + n; block += 4 * stream) {
    for (int64_t i = 0; i < stream; i += 2 * lanes) {
      const float* p = block + i;
      V v0 = hn::Load(d, p), v1 = hn::Load(d, p + lanes);
      V v2 = hn::Load(d, p + stream), v3 = hn::Load(d, p + stream + lanes);
      V v4 = hn::Load(d, p + 2 * stream), v5 = hn::Load(d, p + 2 * stream + lanes);
      V v6 = hn::Load(d, p + 3 * stream), v7 = hn::Load(d, p + 3 * stream + lanes);
      QKV_ROOF_KEEP(v0);
      QKV_ROOF_KEEP(v1);
      QKV_ROOF_KEEP(v2);
      QKV_ROOF_KEEP(v3);
      QKV_ROOF_KEEP(v4);
      QKV_ROOF_KEEP(v5);
      QKV_ROOF_KEEP(v6);
      QKV_ROOF_KEEP(v7);
    }
  }
}

const char* Name() { return hwy::TargetName(HWY_TARGET); }
#undef QKV_ROOF_KEEP

}  // namespace HWY_NAMESPACE
}  // namespace qkv::bench
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <sched.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <numeric>
#include <thread>
#include <vector>

#include "roof.h"

namespace qkv::bench {
HWY_EXPORT(FmaChains);
HWY_EXPORT(ReadAll);
HWY_EXPORT(Name);

namespace {
double clock_seconds(clockid_t id) {
  timespec t;
  clock_gettime(id, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}
}  // namespace

double thread_seconds() { return clock_seconds(CLOCK_THREAD_CPUTIME_ID); }
double wall_seconds() { return clock_seconds(CLOCK_MONOTONIC); }

Pin::Pin() {
  CPU_ZERO(&before_);
  if (sched_getaffinity(0, sizeof before_, &before_) != 0) return;
  size_t last = CPU_SETSIZE;
  while (last > 0 && !CPU_ISSET(last - 1, &before_)) --last;
  cpu_set_t one;
  CPU_ZERO(&one);
  if (last > 0) CPU_SET(last - 1, &one);
  sched_setaffinity(0, sizeof one, &one);
}

Pin::~Pin() { sched_setaffinity(0, sizeof before_, &before_); }

namespace {

// Runs work(thread) on num_threads threads, this one included, that start at the same moment.
// Seconds until the last one is done.
double together(int num_threads, const std::function<void(int)>& work) {
  std::atomic<int> num_waiting{0};
  const auto start = [&](int thread) {
    ++num_waiting;
    while (num_waiting.load() < num_threads) std::this_thread::yield();
    work(thread);
  };
  std::vector<std::thread> others;
  for (int t = 1; t < num_threads; ++t) others.emplace_back(start, t);
  while (num_waiting.load() < num_threads - 1) std::this_thread::yield();
  const double begin = wall_seconds();
  start(0);
  for (std::thread& thread : others) thread.join();
  return wall_seconds() - begin;
}

}  // namespace

double fma_peak_gflops(int num_threads) {
  // 6 cycles per step on two pipes; the clock of thread_seconds has a resolution of well below a
  // microsecond.
  constexpr int64_t kSteps = 100000;
  std::vector<double> rates(static_cast<size_t>(num_threads));
  together(num_threads, [&](int thread) {
    const double start = thread_seconds();
    const int64_t flop = HWY_DYNAMIC_DISPATCH(FmaChains)(kSteps);
    rates[static_cast<size_t>(thread)] =
        static_cast<double>(flop) / (thread_seconds() - start) * 1e-9;
  });
  return std::accumulate(rates.begin(), rates.end(), 0.0);
}

double read_gbps(int64_t bytes, int num_threads) {
  static std::unique_ptr<Buffer> buffer;
  static int64_t held = 0;
  constexpr int64_t kStep = 16 << 10;  // the block of ReadAll
  constexpr int64_t kEnough = int64_t{64} << 20;
  const int64_t part = bytes / num_threads / kStep * kStep;
  if (part <= 0) return 0;
  if (held < part * num_threads || held > bytes) {
    buffer = std::make_unique<Buffer>(bytes);
    held = bytes;
  }
  // DRAM likes streams a page apart (Zen 5: 48 GB/s, 43 in address order), the caches do not (L2:
  // 142 and 270).
  const int64_t stream = part > (int64_t{4} << 20) ? kStep / 16 : kStep / 16 / 32;
  const auto read = [&](int thread) {
    HWY_DYNAMIC_DISPATCH(ReadAll)(buffer->floats() + thread * (part / 4), part / 4, stream);
  };
  if (bytes < kEnough) together(num_threads, read);  // what fits a cache is there
  const int64_t passes = std::max<int64_t>(1, kEnough / bytes);
  const double seconds = together(num_threads, [&](int thread) {
    for (int64_t i = 0; i < passes; ++i) read(thread);
  });
  return static_cast<double>(part * num_threads * passes) / seconds * 1e-9;
}

const char* roof_target() { return HWY_DYNAMIC_DISPATCH(Name)(); }

Buffer::Buffer(int64_t bytes) {
  constexpr size_t kHuge = size_t{2} << 20;
  mapped_bytes_ = static_cast<size_t>(std::max<int64_t>(bytes, 1)) + kHuge;
  mapped_ =
      mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped_ == MAP_FAILED) throw std::bad_alloc();
  const auto address = (reinterpret_cast<uintptr_t>(mapped_) + kHuge - 1) & ~(kHuge - 1);
  data_ = reinterpret_cast<void*>(address);
  const size_t usable = mapped_bytes_ - (address - reinterpret_cast<uintptr_t>(mapped_));
  madvise(data_, usable, MADV_HUGEPAGE);
  // Touched: an untouched page is the shared zero page, which stays in the cache.
  std::memset(data_, 1, usable);
  std::memset(data_, 0, usable);
}

Buffer::~Buffer() { munmap(mapped_, mapped_bytes_); }

double Rates::quantile(double q) const {
  std::vector<double> sorted = samples;
  std::sort(sorted.begin(), sorted.end());
  return sorted[static_cast<size_t>(q * static_cast<double>(sorted.size() - 1))];
}

}  // namespace qkv::bench
#endif
