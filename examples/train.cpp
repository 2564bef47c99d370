// SPDX-License-Identifier: Apache-2.0
// Trains an MHA layer, an MQA layer and one with wider heads on one task, and compares what they cost
// and what they learn.
//
//   example_train [steps] [loss.svg]      default: 800 steps, no picture
//
// The task: each token of a random sequence carries four symbols. For every token, name the first
// symbol of the token before it, the second of the one before that, and so on. The layer reads
// symbols + place and its output is the logits, so what is learned is learned by the attention: each
// question needs another place (queries) and another part of what stands there (values, which MQA
// has one set of for all heads).
#include <fmt/format.h>
#include <qkv/qkv.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr int64_t kVocabulary = 16, kBack = 4, kLength = 32, kBatch = 32, kWidth = 64;
constexpr int64_t kHeads = 8;
constexpr int64_t kTokens = kBatch * kLength, kLogits = kBack * kVocabulary;
using Floats = std::vector<float>;

/// CPU time of this program: what a step costs also on a machine that does other work.
double seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

/// Adam (Kingma and Ba, arXiv:1412.6980) for one array of parameters.
class Adam {
 public:
  explicit Adam(Floats* parameters)
      : parameters_(parameters), mean_(parameters->size()), square_(parameters->size()) {}
  void step(const Floats& gradient, int64_t t) {
    constexpr float kRate = 3e-3f, kMean = 0.9f, kSquare = 0.99f, kTiny = 1e-8f;
    const float mean_scale = 1 / (1 - std::pow(kMean, static_cast<float>(t)));
    const float square_scale = 1 / (1 - std::pow(kSquare, static_cast<float>(t)));
    for (size_t i = 0; i < gradient.size(); ++i) {
      mean_[i] = kMean * mean_[i] + (1 - kMean) * gradient[i];
      square_[i] = kSquare * square_[i] + (1 - kSquare) * gradient[i] * gradient[i];
      (*parameters_)[i] -=
          kRate * mean_[i] * mean_scale / (std::sqrt(square_[i] * square_scale) + kTiny);
    }
  }

 private:
  Floats* parameters_;
  Floats mean_, square_;
};

struct Score {
  double loss = 0, right = 0;  // natural log; fraction of the symbols named
};

class Model {
 public:
  explicit Model(const qkv::LayerConfig& config)
      : symbol_(normal(kBack * kVocabulary * kWidth, 0.5)),
        place_(normal(kLength * kWidth, 1)),
        weights_(random_weights(config)),
        layer_(weights_),
        x_(kTokens * kWidth),
        logits_(kTokens * kLogits),
        dlogits_(kTokens * kLogits),
        dx_(kTokens * kWidth),
        dsymbol_(symbol_.size()),
        dplace_(place_.size()),
        dweights_(weights_) {
    for (Floats* p : {&symbol_, &place_}) optimisers_.emplace_back(p);
    for (Floats* p : arrays(weights_)) optimisers_.emplace_back(p);
  }

  Score train(const std::vector<int>& ids) {
    const Score score = forward(ids);
    qkv::LayerGradients gradients = qkv::LayerGradients::of(dweights_);
    gradients.q = gradients.k = gradients.v = view(dx_, kWidth);  // one x: the sum of all three
    layer_.backward(state_, view(dlogits_, kLogits), gradients);
    std::fill(dsymbol_.begin(), dsymbol_.end(), 0.0f);
    std::fill(dplace_.begin(), dplace_.end(), 0.0f);
    for (int64_t i = 0; i < kTokens; ++i) {
      for (int64_t d = 0; d < kWidth; ++d) {
        for (int64_t s = 0; s < kBack; ++s)
          dsymbol_[symbol_at(ids, i, s) + d] += dx_[i * kWidth + d];
        dplace_[i % kLength * kWidth + d] += dx_[i * kWidth + d];
      }
    }
    ++steps_;
    optimisers_[0].step(dsymbol_, steps_), optimisers_[1].step(dplace_, steps_);
    size_t next = 2;
    for (const Floats* gradient : arrays(dweights_)) optimisers_[next++].step(*gradient, steps_);
    layer_.set_weights(weights_);
    return score;
  }

  /// Loss and hits of a batch; fills the gradient of the loss with respect to the logits.
  Score forward(const std::vector<int>& ids) {
    for (int64_t i = 0; i < kTokens; ++i) {
      for (int64_t d = 0; d < kWidth; ++d) {
        x_[i * kWidth + d] = place_[i % kLength * kWidth + d];
        for (int64_t s = 0; s < kBack; ++s) x_[i * kWidth + d] += symbol_[symbol_at(ids, i, s) + d];
      }
    }
    const qkv::Tensor x = view(x_, kWidth);
    layer_.forward_training(x, x, x, {.output = view(logits_, kLogits), .weights = {}}, state_,
                            {.mask = qkv::Mask::causal_bottom_right(), .num_threads = 1});
    Score score;
    constexpr auto kCases = static_cast<double>(kBatch * (kLength - kBack) * kBack);
    std::fill(dlogits_.begin(), dlogits_.end(), 0.0f);
    for (int64_t i = 0; i < kTokens; ++i) {
      if (i % kLength < kBack) continue;
      for (int64_t back = 1; back <= kBack; ++back) {
        const int64_t at = i * kLogits + (back - 1) * kVocabulary;
        const float* logits = &logits_[at];
        const int target = ids[(i - back) * kBack + back - 1];
        const float* best = std::max_element(logits, logits + kVocabulary);
        double sum = 0;
        for (int64_t t = 0; t < kVocabulary; ++t) sum += std::exp(logits[t] - *best);
        for (int64_t t = 0; t < kVocabulary; ++t) {
          const double p = std::exp(logits[t] - *best) / sum;
          dlogits_[at + t] = static_cast<float>((p - (t == target ? 1 : 0)) / kCases);
        }
        score.loss += (std::log(sum) + *best - logits[target]) / kCases;
        score.right += (best - logits == target ? 1 : 0) / kCases;
      }
    }
    return score;
  }

 private:
  Floats normal(int64_t n, double deviation) {
    std::normal_distribution<float> distribution(0, static_cast<float>(deviation));
    Floats x(n);
    for (float& value : x) value = distribution(random_);
    return x;
  }
  qkv::LayerWeights random_weights(const qkv::LayerConfig& c) {
    qkv::LayerWeights w;
    w.config = c;
    const auto weight = [&](int64_t rows, int64_t columns) {
      return normal(rows * columns, 1 / std::sqrt(static_cast<double>(columns)));
    };
    const int64_t q = c.num_heads * c.head_dim_qk, k = c.num_kv_heads * c.head_dim_qk;
    const int64_t v = c.num_kv_heads * c.head_dim_v, merged = c.num_heads * c.head_dim_v;
    w.fc_q_weight = weight(q, c.dim_q), w.fc_q_bias = Floats(q);
    w.fc_k_weight = weight(k, c.dim_k), w.fc_k_bias = Floats(k);
    w.fc_v_weight = weight(v, c.dim_v), w.fc_v_bias = Floats(v);
    w.fc_o_weight = weight(c.dim_out, merged), w.fc_o_bias = Floats(c.dim_out);
    return w;
  }
  static std::vector<Floats*> arrays(qkv::LayerWeights& w) {
    return {&w.fc_q_weight, &w.fc_q_bias, &w.fc_k_weight, &w.fc_k_bias,
            &w.fc_v_weight, &w.fc_v_bias, &w.fc_o_weight, &w.fc_o_bias};
  }
  static qkv::Tensor view(Floats& x, int64_t width) { return {x.data(), {kBatch, kLength, width}}; }
  // Where the vector of symbol s of token i begins.
  static int64_t symbol_at(const std::vector<int>& ids, int64_t i, int64_t s) {
    return (s * kVocabulary + ids[i * kBack + s]) * kWidth;
  }

  std::mt19937 random_{1};  // the first member: the others start from it
  Floats symbol_, place_;
  qkv::LayerWeights weights_;
  qkv::AttentionLayer layer_;
  qkv::AttentionLayer::State state_;
  Floats x_, logits_, dlogits_, dx_, dsymbol_, dplace_;
  qkv::LayerWeights dweights_;
  std::vector<Adam> optimisers_;
  int64_t steps_ = 0;
};

/// kBack symbols of every token.
std::vector<int> random_batch(uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<int> ids(kTokens * kBack);
  for (int& id : ids) id = static_cast<int>(random() % kVocabulary);
  return ids;
}

/// A bar on a terminal, ten lines elsewhere, on stderr.
void show_progress(const char* name, int64_t step, int64_t steps, double loss) {
  static const bool is_terminal = isatty(STDERR_FILENO) != 0;
  if (is_terminal) {
    const auto filled = static_cast<size_t>(30 * step / steps);
    fmt::print(stderr, "\r{:8} [{:<30}] {:3} %  loss {:.3f} ", name, std::string(filled, '#'),
               100 * step / steps, loss);
    if (step == steps) fmt::print(stderr, "\n");
  } else if (step % std::max<int64_t>(steps / 10, 1) == 0 || step == steps) {
    fmt::print(stderr, "{:8} step {:4}  loss {:.3f}\n", name, step, loss);
  }
}

struct Curve {
  std::string name, colour;
  std::vector<double> loss;
};

/// Loss over steps, one line per layer.
std::string picture(const std::vector<Curve>& curves) {
  constexpr double kLeft = 50, kTop = 20, kPlotWidth = 560, kPlotHeight = 280;
  const double top = std::ceil(std::log(static_cast<double>(kVocabulary)) + 0.5);
  const auto y = [&](double loss) {
    return kTop + kPlotHeight * (1 - std::clamp(loss / top, 0.0, 1.0));
  };
  std::string svg =
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 640 340\" "
      "font-family=\"sans-serif\" "
      "font-size=\"12\">\n<rect width=\"640\" height=\"340\" fill=\"white\"/>\n";
  for (int tick = 0; tick <= static_cast<int>(top); ++tick) {
    svg += fmt::format(
        "<path d=\"M{0} {1:.1f}H{2}\" stroke=\"#ddd\"/>\n<text x=\"{3}\" y=\"{4:.1f}\" "
        "text-anchor=\"end\">{5}</text>\n",
        kLeft, y(tick), kLeft + kPlotWidth, kLeft - 8, y(tick) + 4, tick);
  }
  const size_t steps = curves[0].loss.size();
  svg += fmt::format(
      "<text x=\"{}\" y=\"{}\">loss (natural log; guessing: {:.2f})</text>\n"
      "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">step {}</text>\n",
      kLeft + 8, kTop - 6, std::log(static_cast<double>(kVocabulary)), kLeft + kPlotWidth,
      kTop + kPlotHeight + 18, steps);
  double legend = kTop + 20;
  for (const Curve& curve : curves) {
    std::string points;
    for (size_t s = 0; s < steps; ++s) {
      const double x = kLeft + kPlotWidth * static_cast<double>(s + 1) / static_cast<double>(steps);
      points += fmt::format("{:.1f},{:.1f} ", x, y(curve.loss[s]));
    }
    svg += fmt::format(
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"1.5\"/>\n"
        "<text x=\"{}\" y=\"{}\" fill=\"{}\" text-anchor=\"end\">{}</text>\n",
        points, curve.colour, kLeft + kPlotWidth - 8, legend, curve.colour, curve.name);
    legend += 18;
  }
  return svg + "</svg>\n";
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t steps = argc > 1 ? std::atoll(argv[1]) : 800;
  if (steps < 1 || argc > 3) {
    fmt::print(stderr, "usage: example_train [steps >= 1] [loss.svg]\n");
    return 2;
  }
  const struct {
    const char *name, *colour;
    qkv::LayerConfig config;
  } layers[] = {
      {"MHA", "#1f77b4", qkv::LayerConfig::mha(kHeads, kWidth, kWidth, 8, 8, kLogits)},
      {"MQA", "#d62728", qkv::LayerConfig::mqa(kHeads, kWidth, kWidth, 8, 8, kLogits)},
      {"MQA-wide", "#2ca02c", qkv::LayerConfig::mqa(kHeads, kWidth, kWidth, 16, 16, kLogits)},
  };
  std::vector<Curve> curves;
  fmt::print(
      "layer     head_dim  parameters  KV cache, bytes per token  ms per step   loss  right\n");
  for (const auto& layer : layers) {
    Model model(layer.config);
    curves.push_back({layer.name, layer.colour, {}});
    double time = 0;
    for (int64_t step = 1; step <= steps; ++step) {
      const std::vector<int> ids = random_batch(static_cast<uint64_t>(step));
      const double begin = seconds();
      curves.back().loss.push_back(model.train(ids).loss);
      time += seconds() - begin;
      show_progress(layer.name, step, steps, curves.back().loss.back());
    }
    Score fresh;  // sequences that were not trained on
    for (uint64_t seed = 1; seed <= 8; ++seed) {
      const Score score = model.forward(random_batch(seed << 40));
      fresh.loss += score.loss / 8, fresh.right += score.right / 8;
    }
    fmt::print("{:8}  {:8}  {:10}  {:25}  {:11.2f}  {:5.3f}  {:3.0f} %\n", layer.name,
               layer.config.head_dim_v, layer.config.num_parameters(),
               layer.config.kv_bytes_per_token(qkv::DType::f32),
               1e3 * time / static_cast<double>(steps), fresh.loss, 100 * fresh.right);
  }
  if (argc == 3) {
    std::ofstream file(argv[2]);
    file << picture(curves);
    if (!file.flush()) {
      fmt::print(stderr, "{} cannot be written\n", argv[2]);
      return 2;
    }
  }
}
