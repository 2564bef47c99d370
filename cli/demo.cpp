// SPDX-License-Identifier: Apache-2.0
// Tier: command line. qkv demo: the lesson. The MHA and MQA modules on its sizes, with its mask,
// and what differs.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <memory>
#include <random>

#include "output.h"
#include "qkv/qkv.h"
#include "verb.h"

namespace qkv::cli {
namespace {

constexpr int64_t kBatch = 10, kNumHeads = 8, kNQ = 2, kNKv = 4;
constexpr int64_t kDimK = 128, kDimV = 64, kHeadDim = 16, kDimOut = 8;

// Random numbers that are the same everywhere: only the engine is fixed by the standard, the
// distributions are not.
class Random {
 public:
  float uniform(double bound) {
    return static_cast<float>(bound * (2.0 * static_cast<double>(engine_()) / 4294967295.0 - 1.0));
  }
  std::vector<float> values(int64_t n, double bound) {
    std::vector<float> v(static_cast<size_t>(n));
    for (float& x : v) x = uniform(bound);
    return v;
  }

 private:
  std::mt19937 engine_{7};
};

// As torch.nn.Linear starts: weight and bias uniform within 1 / sqrt(inputs).
LayerWeights random_weights(const LayerConfig& c, Random& random) {
  LayerWeights w;
  w.config = c;
  const auto linear = [&random](int64_t out, int64_t in, std::vector<float>& weight,
                                std::vector<float>& bias) {
    const double bound = 1 / std::sqrt(static_cast<double>(in));
    weight = random.values(out * in, bound);
    bias = random.values(out, bound);
  };
  linear(c.num_heads * c.head_dim_qk, c.dim_q, w.fc_q_weight, w.fc_q_bias);
  linear(c.num_kv_heads * c.head_dim_qk, c.dim_k, w.fc_k_weight, w.fc_k_bias);
  linear(c.num_kv_heads * c.head_dim_v, c.dim_v, w.fc_v_weight, w.fc_v_bias);
  linear(c.dim_out, c.num_heads * c.head_dim_v, w.fc_o_weight, w.fc_o_bias);
  return w;
}

struct Inputs {
  std::vector<float> q, k, v;
  std::vector<float> mask;  // [batch, n_q, n_kv], additive
};

Inputs make_inputs(Random& random) {
  Inputs x;
  x.q = random.values(kBatch * kNQ * kDimK, std::sqrt(3.0));  // variance 1
  x.k = random.values(kBatch * kNKv * kDimK, std::sqrt(3.0));
  x.v = random.values(kBatch * kNKv * kDimV, std::sqrt(3.0));
  for (int64_t b = 0; b < kBatch; ++b) {
    for (int64_t i = 0; i < kNQ; ++i) {
      for (int64_t j = 0; j < kNKv; ++j) x.mask.push_back(j >= i ? -INFINITY : 0.0F);  // torch.triu
    }
  }
  return x;
}

struct Module {
  std::string name;
  LayerConfig config;
  LayerWeights weights;
  std::vector<float> attention, output;
  std::string shapes;  // of both

  bool row_0_is_bias() const {
    for (int64_t b = 0; b < kBatch; ++b) {
      const float* row = output.data() + b * kNQ * kDimOut;
      if (!std::equal(row, row + kDimOut, weights.fc_o_bias.data())) return false;
    }
    return true;
  }
  bool row_0_weighs_nothing() const {
    for (int64_t hb = 0; hb < kNumHeads * kBatch; ++hb) {
      const float* row = attention.data() + hb * kNQ * kNKv;
      if (std::any_of(row, row + kNKv, [](float w) { return w != 0; })) return false;
    }
    return true;
  }
  bool is_finite() const {
    const auto finite = [](float x) { return std::isfinite(x); };
    return std::all_of(attention.begin(), attention.end(), finite) &&
           std::all_of(output.begin(), output.end(), finite);
  }
};

Module run_module(const std::string& name, const LayerConfig& config, const Inputs& x,
                  Random& random) {
  Module m{name, config, random_weights(config, random), {}, {}, {}};
  m.attention.resize(static_cast<size_t>(kNumHeads * kBatch * kNQ * kNKv));
  m.output.resize(static_cast<size_t>(kBatch * kNQ * kDimOut));
  LayerOutputs outputs;
  outputs.output = Tensor(m.output.data(), {kBatch, kNQ, kDimOut});
  outputs.weights = Tensor(m.attention.data(), {kNumHeads * kBatch, kNQ, kNKv});
  LayerOptions options;
  options.bias = ConstTensor(x.mask.data(), {kBatch, kNQ, kNKv});
  AttentionLayer(m.weights).forward(
      ConstTensor(x.q.data(), {kBatch, kNQ, kDimK}), ConstTensor(x.k.data(), {kBatch, kNKv, kDimK}),
      ConstTensor(x.v.data(), {kBatch, kNKv, kDimV}), outputs, options);
  m.shapes = qkv::shape_text(outputs.weights) + " " + qkv::shape_text(outputs.output);
  return m;
}

// "128*128+128 + 128*16+16 + 64*16+16 + 128*8+8"
std::string parameter_sum(const LayerConfig& c) {
  const auto linear = [](int64_t in, int64_t out) { return fmt::format("{}*{}+{}", in, out, out); };
  return linear(c.dim_q, c.num_heads * c.head_dim_qk) + " + " +
         linear(c.dim_k, c.num_kv_heads * c.head_dim_qk) + " + " +
         linear(c.dim_v, c.num_kv_heads * c.head_dim_v) + " + " +
         linear(c.num_heads * c.head_dim_v, c.dim_out);
}

std::string row_text(const float* row, int64_t n) {
  std::string text;
  for (int64_t i = 0; i < n; ++i) text += fmt::format("{:>8.4f}", row[i]);
  return text;
}

void print_mask_lesson(const Module& m) {
  fmt::print("  {}  weights of head 0  row 0 {}\n", m.name, row_text(m.attention.data(), kNKv));
  fmt::print("                           row 1 {}\n", row_text(m.attention.data() + kNKv, kNKv));
  fmt::print("       output             row 0 {}\n", row_text(m.output.data(), kDimOut));
  fmt::print("       fc_o.bias                {}\n", row_text(m.weights.fc_o_bias.data(), kDimOut));
}

void print_path(const Module& mha, const Module& mqa) {
  Table table({"Step", mha.name, mqa.name});
  const auto row = [&](const char* step, auto shape) {
    table.add(
        {step, qkv::cli::shape_text(shape(mha.config)), qkv::cli::shape_text(shape(mqa.config))});
  };
  using Shape = std::vector<int64_t>;
  row("q = fc_q(q)", [](const LayerConfig& c) {
    return Shape{kBatch, kNQ, c.num_heads * c.head_dim_qk};
  });
  row("k = fc_k(k)", [](const LayerConfig& c) {
    return Shape{kBatch, kNKv, c.num_kv_heads * c.head_dim_qk};
  });
  row("v = fc_v(v)", [](const LayerConfig& c) {
    return Shape{kBatch, kNKv, c.num_kv_heads * c.head_dim_v};
  });
  row("split q into heads", [](const LayerConfig& c) {
    return Shape{kBatch, c.num_heads, kNQ, c.head_dim_qk};
  });
  row("split k into heads", [](const LayerConfig& c) {
    return Shape{kBatch, c.num_kv_heads, kNKv, c.head_dim_qk};
  });
  row("split v into heads", [](const LayerConfig& c) {
    return Shape{kBatch, c.num_kv_heads, kNKv, c.head_dim_v};
  });
  row("softmax(q k^T / sqrt(16) + mask)", [](const LayerConfig& c) {
    return Shape{c.num_heads * kBatch, kNQ, kNKv};
  });
  row("weights v, heads merged", [](const LayerConfig& c) {
    return Shape{kBatch, kNQ, c.num_heads * c.head_dim_v};
  });
  row("output = fc_o(...)", [](const LayerConfig& c) { return Shape{kBatch, kNQ, c.dim_out}; });
  fmt::print("{}", table.text());
}

void print_differences(const Module& mha, const Module& mqa) {
  const auto kv_bytes = [](const Module& m) {
    return fmt::to_string(m.config.kv_bytes_per_token(DType::f32));
  };
  Table table({"What differs", mha.name, mqa.name});
  table.left_from(1);
  table.add({"KV heads", fmt::to_string(mha.config.num_kv_heads),
             fmt::to_string(mqa.config.num_kv_heads)});
  table.add({"parameters", fmt::to_string(mha.config.num_parameters()),
             fmt::to_string(mqa.config.num_parameters())});
  table.add({"KV cache, bytes per token (f32)", kv_bytes(mha), kv_bytes(mqa)});
  table.add({"use it when", "quality comes first: training, encoders,",
             "generation reads the cache at every token:"});
  table.add({"", "short contexts", "long contexts, large batches"});
  fmt::print("{}", table.text());
}

Json module_json(const Module& m) {
  return {{"name", m.name},
          {"num_heads", m.config.num_heads},
          {"num_kv_heads", m.config.num_kv_heads},
          {"attention", {kNumHeads * kBatch, kNQ, kNKv}},
          {"output", {kBatch, kNQ, kDimOut}},
          {"num_parameters", m.config.num_parameters()},
          {"parameters", parameter_sum(m.config)},
          {"kv_bytes_per_token", m.config.kv_bytes_per_token(DType::f32)},
          {"row_0_is_bias", m.row_0_is_bias()}};
}

int run(bool json) {
  Random random;
  const Inputs x = make_inputs(random);
  const Module mha = run_module(
      "MHA", LayerConfig::mha(kNumHeads, kDimK, kDimV, kHeadDim, kHeadDim, kDimOut), x, random);
  const Module mqa = run_module(
      "MQA", LayerConfig::mqa(kNumHeads, kDimK, kDimV, kHeadDim, kHeadDim, kDimOut), x, random);
  bool ok = true;
  for (const Module* m : {&mha, &mqa}) {
    ok = ok && m->is_finite() && m->row_0_is_bias() && m->row_0_weighs_nothing();
  }
  if (json) {
    print_json({{"modules", {module_json(mha), module_json(mqa)}}, {"ok", ok}});
    return ok ? kOk : kCheckFailed;
  }
  fmt::print(
      "Multi-head attention (MHA) and multi-query attention (MQA)\n"
      "batch {}, {} heads, n_q {}, n_kv {}, dim_k {}, dim_v {}, head_dim_qk {}, head_dim_v {}, "
      "dim_out {}\n\n",
      kBatch, kNumHeads, kNQ, kNKv, kDimK, kDimV, kHeadDim, kHeadDim, kDimOut);
  fmt::print("Shapes of weights and output\n");
  for (const Module* m : {&mha, &mqa}) fmt::print("  {}  {}\n", m->name, m->shapes);
  fmt::print("\nParameters (fc_q + fc_k + fc_v + fc_o)\n");
  for (const Module* m : {&mha, &mqa}) {
    fmt::print("  {}  {} = {}\n", m->name, parameter_sum(m->config), m->config.num_parameters());
  }
  fmt::print("\n");
  print_path(mha, mqa);
  fmt::print(
      "\nThe mask: -inf where torch.triu(torch.ones(2, 4)) is 1, so query i sees the keys j < i.\n"
      "  query 0  ....   sees no key\n"
      "  query 1  x...\n"
      "Row 0 would be NaN in PyTorch. Here its weights are 0 and its output is fc_o.bias:\n");
  print_mask_lesson(mha);
  print_mask_lesson(mqa);
  fmt::print(
      "The usual causal mask keeps the diagonal: torch.triu(ones, diagonal=1), here "
      "causal-top-left.\n\n");
  print_differences(mha, mqa);
  fmt::print(
      "Between the two lies GQA: 1 < num_kv_heads < num_heads; qkv plan puts the three side by "
      "side.\n");
  if (!ok) fmt::print("\nCHECK FAILED: a value is not finite, or row 0 is not fc_o.bias\n");
  return ok ? kOk : kCheckFailed;
}

}  // namespace

const Verb kDemo = {
    "demo", "the lesson: MHA and MQA side by side, shapes, parameters, mask",
    [](CLI::App& app) -> std::function<int()> {
      const auto json = std::make_shared<bool>(false);
      app.add_flag("--json", *json, "print JSON");
      app.footer(
          "\nRuns both modules on batch 10, 8 heads, 2 queries, 4 keys with random weights and "
          "prints the shapes\n"
          "of weights and output, the parameter counts, what the mask does and when to use which. "
          "Exit code\n"
          "1 if a value is not finite or a row that sees no key is not fc_o.bias.\n\n"
          "Example:\n  qkv demo\n");
      return [json] { return run(*json); };
    }};

}  // namespace qkv::cli
