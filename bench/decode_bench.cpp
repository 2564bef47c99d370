// SPDX-License-Identifier: Apache-2.0
// Tier: benchmark. attention() with few queries against long caches, over the table of cases.h: bytes of K and V per second
// as a fraction of the plain read bandwidth measured between the samples (or of the FMA peak). Several caches are used in
// turn, so that K and V come from memory. One row of every case is checked against plain double sums before timing.
//
//   decode_bench [--benchmark_filter=group4]    QKV_ISA and QKV_BENCH_THREADS (default 1) in the environment
#include <fmt/format.h>

#include <cmath>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "cases.h"
#include "qkv/qkv.h"
#include "sample.h"

namespace qkv::bench {
namespace {

constexpr int64_t kRotatingBytes = 256 << 20;

// Caches of one case with the same shape, queries and the output.
class Caches {
 public:
  explicit Caches(const DecodeCase& c)
      : c_(c),
        dtype_(c.kv_dtype),
        kv_bytes_(c.batch * c.num_kv_heads * c.n_kv * c.head_dim * size_bytes(dtype_)),
        count_(std::max<int64_t>(2, kRotatingBytes / (2 * kv_bytes_))),
        memory_(count_ * 2 * kv_bytes_),
        q_(static_cast<size_t>(c.batch * c.num_heads * c.n_q * c.head_dim)),
        out_(q_.size()) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (float& x : q_) x = normal(random);
    std::vector<float> numbers(4099);  // a prime: rows differ
    for (float& x : numbers) x = normal(random);
    const int64_t n = count_ * 2 * kv_bytes_ / size_bytes(dtype_);
    for (int64_t i = 0; i < n; ++i) store(i, numbers[static_cast<size_t>(i % 4099)]);
  }

  int64_t bytes() const { return 2 * kv_bytes_; }
  void attend(const AttentionOptions& options) {
    at_ = (at_ + 1) % count_;
    attention(queries(), keys(), values(), {.out = out()}, options);
  }
  // Largest error of the last row of the cache that attend() used last.
  double error() const {
    const int64_t h_kv = c_.num_kv_heads - 1;
    const int64_t row = (c_.batch * c_.num_heads - 1) * c_.n_q + c_.n_q - 1;
    const int64_t first = ((c_.batch - 1) * c_.num_kv_heads + h_kv) * c_.n_kv * c_.head_dim;
    const double scale = 1 / std::sqrt(static_cast<double>(c_.head_dim));
    std::vector<double> sum(static_cast<size_t>(c_.head_dim));
    double total = 0, worst = 0;
    for (int64_t j = 0; j < c_.n_kv; ++j) {
      double s = 0;
      for (int64_t d = 0; d < c_.head_dim; ++d)
        s += static_cast<double>(q_[static_cast<size_t>(row * c_.head_dim + d)]) *
             load(keys(), first + j * c_.head_dim + d);
      const double p = std::exp(scale * s);
      total += p;
      for (int64_t d = 0; d < c_.head_dim; ++d)
        sum[static_cast<size_t>(d)] += p * load(values(), first + j * c_.head_dim + d);
    }
    for (int64_t d = 0; d < c_.head_dim; ++d)
      worst = std::max(worst, std::abs(sum[static_cast<size_t>(d)] / total -
                                       out_[static_cast<size_t>(row * c_.head_dim + d)]));
    return worst;
  }

 private:
  char* data(int64_t part) const {
    return static_cast<char*>(memory_.data()) + (2 * at_ + part) * kv_bytes_;
  }
  ConstTensor kv(int64_t part) const {
    return ConstTensor(data(part), dtype_,
                       std::vector<int64_t>{c_.batch, c_.num_kv_heads, c_.n_kv, c_.head_dim});
  }
  ConstTensor keys() const { return kv(0); }
  ConstTensor values() const { return kv(1); }
  ConstTensor queries() const {
    return ConstTensor(q_.data(), {c_.batch, c_.num_heads, c_.n_q, c_.head_dim});
  }
  Tensor out() { return Tensor(out_.data(), {c_.batch, c_.num_heads, c_.n_q, c_.head_dim}); }

  void store(int64_t i, float x) {
    void* p = memory_.data();
    switch (dtype_) {
      case DType::bf16:
        static_cast<bf16_t*>(p)[i] = to_bf16(x);
        break;
      case DType::f16:
        static_cast<f16_t*>(p)[i] = to_f16(x);
        break;
      default:
        static_cast<float*>(p)[i] = x;
    }
  }
  static double load(const ConstTensor& t, int64_t i) {
    switch (t.dtype) {
      case DType::bf16:
        return static_cast<double>(to_float(static_cast<const bf16_t*>(t.data)[i]));
      case DType::f16:
        return static_cast<double>(to_float(static_cast<const f16_t*>(t.data)[i]));
      default:
        return static_cast<double>(static_cast<const float*>(t.data)[i]);
    }
  }

  const DecodeCase& c_;
  const DType dtype_;
  const int64_t kv_bytes_, count_;
  int64_t at_ = 0;
  Buffer memory_;
  std::vector<float> q_, out_;
};

void run_case(benchmark::State& state, const DecodeCase& c, int threads) {
  Caches caches(c);
  AttentionOptions options;
  options.num_threads = threads;
  caches.attend(options);
  const double error = caches.error();
  if (!(error < 1e-4))
    return state.SkipWithError(fmt::format("wrong result, error {}", error).c_str());
  Work work;
  work.bytes = static_cast<double>(caches.bytes());
  work.roof_bytes = static_cast<double>(kRotatingBytes);
  if (c.is_compute_bound)
    work.flop = 4.0 * static_cast<double>(c.batch * c.num_heads * c.n_q * c.n_kv * c.head_dim);
  work.num_threads = threads;
  work.reach = c.reach;
  sample(state, work, [&] { caches.attend(options); });
}

}  // namespace
}  // namespace qkv::bench

int main(int argc, char** argv) {
  using namespace qkv::bench;
  const char* variable = std::getenv("QKV_BENCH_THREADS");
  const int threads = variable ? std::atoi(variable) : 1;
  if (threads == 1) pin_to_core(1);  // threads of the pool would stay on that core
  const qkv::Info info = qkv::info();
  benchmark::AddCustomContext("isa", info.isa);
  benchmark::AddCustomContext("cpu", info.cpu);
  benchmark::AddCustomContext("compiler", info.compiler);
  benchmark::AddCustomContext("qkv", info.version);
  for (const DecodeCase& c : kDecodeCases)
    add_case(c.name, [&c, threads](benchmark::State& state) { run_case(state, c, threads); });
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
