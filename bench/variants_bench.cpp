// SPDX-License-Identifier: Apache-2.0
// Tier: benchmark. What masks, score changes, element types and weights cost: useful flop per second of each variant as a
// fraction of a base case measured in turn with it (n 2048, d 64, 8 heads, one thread).
#include <fmt/format.h>

#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "qkv/qkv.h"
#include "roof.h"

namespace qkv::bench {
namespace {

constexpr int64_t kTop = 8, kLastRows = 32;
constexpr int64_t kHeads = 8, kN = 2048, kDim = 64, kSize = kHeads * kN * kDim;

struct Variant {
  std::string name, base;
  double reach;  // of the base
  Mask counted;  // visible pairs
  std::function<void()> call;
  Rates rates{};
};

template <class T>
ConstTensor view(const std::vector<T>& x, int64_t part) {
  return ConstTensor(static_cast<const void*>(x.data() + part * kSize), dtype_of<T>(),
                     std::vector<int64_t>{1, kHeads, kN, kDim});
}

}  // namespace

int run() {
  const Pin pin;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> x(3 * kSize), out(kSize), bias(kN * kN), additive(kN * kN),
      weights(kHeads * kN * kN);
  for (float& e : x) e = normal(random);
  std::vector<uint8_t> allow(kN * kN);
  for (int64_t i = 0; i < kN; ++i) {
    for (int64_t j = 0; j < kN; ++j) {
      const size_t at = static_cast<size_t>(i * kN + j);
      bias[at] = normal(random), allow[at] = j <= i;
      additive[at] = j <= i ? 0 : -std::numeric_limits<float>::infinity();
    }
  }
  std::vector<bf16_t> x_bf16, out_bf16(kSize);
  std::vector<f16_t> x_f16, out_f16(kSize);
  for (const float e : x) x_bf16.push_back(to_bf16(e)), x_f16.push_back(to_f16(e));
  const std::vector<double> slopes(kHeads, 0.1);
  std::vector<int64_t> ids(kN);
  for (int64_t i = 0; i < kN; ++i) ids[static_cast<size_t>(i)] = i / (kN / 4);
  const std::vector<int64_t> lengths = {kN - 100};

  const auto with = [](const Mask& mask) {
    AttentionOptions options;
    options.num_threads = 1, options.mask = mask;
    return options;
  };
  const auto f32 = [&](const AttentionOptions& options, bool want_weights = false) {
    return [&, options, want_weights] {
      AttentionOutputs outputs;
      outputs.out = Tensor(out.data(), {1, kHeads, kN, kDim});
      if (want_weights) outputs.weights = Tensor(weights.data(), {1, kHeads, kN, kN});
      attention(view(x, 0), view(x, 1), view(x, 2), outputs, options);
    };
  };
  const AttentionOptions full = with(Mask::full());
  std::vector<float> column_sums(kHeads * kN), entropy(kHeads * kN), top(kHeads * kN * kTop);
  std::vector<int64_t> top_keys(kHeads * kN * kTop), last_rows(kLastRows);
  for (int64_t r = 0; r < kLastRows; ++r) last_rows[static_cast<size_t>(r)] = kN - kLastRows + r;
  const auto form = [&](const Mask& mask, const AttentionOutputs& wanted) {
    return [&, options = with(mask), wanted] {
      AttentionOutputs outputs = wanted;
      outputs.out = Tensor(out.data(), {1, kHeads, kN, kDim});
      attention(view(x, 0), view(x, 1), view(x, 2), outputs, options);
    };
  };
  AttentionOutputs mean, rows, largest, sums, entropies;
  mean.mean_weights = Tensor(weights.data(), {1, kN, kN});
  rows.row_weights = Tensor(weights.data(), {1, kHeads, kLastRows, kN});
  rows.weight_rows = ConstTensor(last_rows.data(), {kLastRows});
  largest.top_weights = Tensor(top.data(), {1, kHeads, kN, kTop});
  largest.top_keys = Tensor(top_keys.data(), {1, kHeads, kN, kTop});
  sums.column_sums = Tensor(column_sums.data(), {1, kHeads, kN});
  entropies.entropy = Tensor(entropy.data(), {1, kHeads, kN});
  AttentionOptions softcap = full, alibi = full, biased = full, causal_additive = full,
                   dropout = full;
  softcap.softcap = 30, dropout.dropout = 0.1;
  alibi.alibi_slopes = ConstTensor(slopes.data(), {kHeads});
  biased.bias = ConstTensor(bias.data(), {kN, kN}),
  causal_additive.bias = ConstTensor(additive.data(), {kN, kN});
  const Mask causal = Mask::causal_bottom_right(), window = Mask::window(1023, 0),
             some = Mask::lengths(lengths);
  const Mask array = Mask::dense(ConstTensor(static_cast<const void*>(allow.data()), DType::boolean,
                                             std::vector<int64_t>{kN, kN}));
  const ConstTensor id(ids.data(), {kN});
  const Mask documents = Mask::documents(id, id);

  std::vector<Variant> variants = {
      {"full", "full", 1, Mask::full(), f32(full)},
      {"causal", "full", 0.9, causal, f32(with(causal))},
      {"causal, boolean array", "causal", 0.8, causal, f32(with(array))},
      {"causal, prepared boolean array", "causal", 0.8, causal, f32(with(array.prepared()))},
      {"causal, additive array", "causal", 0.8, causal, f32(causal_additive)},
      {"lengths", "full", 0.9, some, f32(with(some))},
      {"documents (4)", "full", 0.9, documents, f32(with(documents))},
      {"window 1024", "full", 0.9, window, f32(with(window))},
      {"softcap", "full", 0.75, Mask::full(), f32(softcap)},
      {"alibi", "full", 0.9, Mask::full(), f32(alibi)},
      {"bias", "full", 0.75, Mask::full(), f32(biased)},
      {"bf16", "full", 0.95, Mask::full(),
       [&] {
         AttentionOutputs outputs;
         outputs.out = Tensor(out_bf16.data(), {1, kHeads, kN, kDim});
         attention(view(x_bf16, 0), view(x_bf16, 1), view(x_bf16, 2), outputs, full);
       }},
      {"f16", "full", 0.95, Mask::full(),
       [&] {
         AttentionOutputs outputs;
         outputs.out = Tensor(out_f16.data(), {1, kHeads, kN, kDim});
         attention(view(x_f16, 0), view(x_f16, 1), view(x_f16, 2), outputs, full);
       }},
      {"with weights", "full", 1 / 2.2, Mask::full(), f32(full, true)},
      {"with mean weights", "full", 1 / 2.2, Mask::full(), form(Mask::full(), mean)},
      {"with weights of the last 32 rows", "full", 0.9, Mask::full(), form(Mask::full(), rows)},
      {"with the 8 largest weights", "full", 1 / 2.2, Mask::full(), form(Mask::full(), largest)},
      {"with column sums", "full", 1 / 2.2, Mask::full(), form(Mask::full(), sums)},
      {"with entropy", "full", 1 / 2.2, Mask::full(), form(Mask::full(), entropies)},
      {"entropy without out", "full", 0.9, Mask::full(),
       [&] { attention(view(x, 0), view(x, 1), view(x, 2), entropies, full); }},
      {"causal with column sums", "causal", 1 / 2.2, causal, form(causal, sums)},
      {"causal with entropy", "causal", 1 / 2.2, causal, form(causal, entropies)},
      {"dropout", "full", 0, Mask::full(), f32(dropout)},
  };
  const MaskShape shape{1, kHeads, kN, kN};
  Rates peaks;
  for (int round = 0; round < 6; ++round) {
    for (Variant& v : variants) {
      peaks.add(fma_peak_gflops());
      for (int i = 0; i < 2; ++i) {
        const double begin = thread_seconds();
        v.call();
        const double flop = 4.0 * kDim * static_cast<double>(v.counted.count_visible(shape));
        if (round > 0) v.rates.add(flop / (thread_seconds() - begin) * 1e-9);
      }
    }
  }
  const Info info = qkv::info();
  fmt::print("{}, {}, {}, qkv {}, one thread, n {} d {} heads {}, FMA peak {:.0f} GFLOP/s\n",
             info.cpu, info.isa, info.compiler, info.version, kN, kDim, kHeads, peaks.best());
  fmt::print("{:<32} {:>10} {:>8} {:>10} {:>8}\n", "variant", "GFLOP/s", "of peak", "of base",
             "reach");
  for (const Variant& v : variants) {
    double base = 0;
    for (const Variant& b : variants) base = b.name == v.base ? b.rates.best() : base;
    fmt::print("{:<32} {:>10.1f} {:>8.3f} {:>10.3f} {:>8.2f}\n", v.name, v.rates.best(),
               v.rates.best() / peaks.best(), v.rates.best() / base, v.reach);
  }
  return 0;
}

}  // namespace qkv::bench

int main() { return qkv::bench::run(); }
