// SPDX-License-Identifier: Apache-2.0
// A real attention layer on real sentences: layer 0 of all-MiniLM-L6-v2 on a padded batch of four.
// Prints, for each sentence and head, the token that is attended to most, and writes weights and
// output.
//
//   example_minilm [DATA_FOLDER [OUTPUT.safetensors]]
#include <fmt/format.h>
#include <qkv/qkv.h>

#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace {

struct Sentence {
  std::string text;
  std::vector<std::string> tokens;  // without the padding
};

std::vector<Sentence> read_sentences(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw qkv::Error(path + ": cannot be read");
  const auto json = nlohmann::json::parse(file);
  std::vector<Sentence> sentences;
  for (size_t b = 0; b < json.at("sentences").size(); ++b) {
    Sentence s{json["sentences"][b], {}};
    for (size_t i = 0; i < json.at("tokens")[b].size(); ++i) {
      if (json.at("attention_mask")[b][i] == 1) s.tokens.push_back(json["tokens"][b][i]);
    }
    sentences.push_back(s);
  }
  return sentences;
}

bool is_word(const std::string& token) { return token != "[CLS]" && token != "[SEP]"; }

struct Pick {
  size_t query = 0, key = 0;
  double weight = -1;
};

// Weights of one head and sentence; row i, key j at data[i * stride + j].
struct Head {
  const float* data;
  int64_t stride;
  const std::vector<std::string>* tokens;

  double weight(size_t i, size_t j) const {
    return data[static_cast<int64_t>(i) * stride + static_cast<int64_t>(j)];
  }

  // The key with the greatest weight, averaged over the queries.
  Pick most_attended() const {
    Pick best;
    for (size_t j = 0; j < tokens->size(); ++j) {
      double sum = 0;
      for (size_t i = 0; i < tokens->size(); ++i) sum += weight(i, j);
      const double mean = sum / static_cast<double>(tokens->size());
      if (mean > best.weight) best = {0, j, mean};
    }
    return best;
  }

  // The two different words of which the first attends to the second most.
  Pick strongest_pair() const {
    Pick best;
    for (size_t i = 0; i < tokens->size(); ++i) {
      for (size_t j = 0; j < tokens->size(); ++j) {
        if (i == j || !is_word((*tokens)[i]) || !is_word((*tokens)[j])) continue;
        if (weight(i, j) > best.weight) best = {i, j, weight(i, j)};
      }
    }
    return best;
  }
};

void print_sentence(const Sentence& s, const float* weights, int64_t b, const qkv::Tensor& shape,
                    int64_t num_heads) {
  const int64_t batch = shape.shape[0] / num_heads;
  fmt::print("\n{}\n  head  attends most to      words: strongest pair\n", s.text);
  for (int64_t h = 0; h < num_heads; ++h) {
    // Head-major: matrix h * batch + b.
    const Head head{weights + (h * batch + b) * shape.stride[0], shape.stride[1], &s.tokens};
    const Pick top = head.most_attended();
    const Pick pair = head.strongest_pair();
    fmt::print("  {:>4}  {:<12} {:.2f}     {} -> {} {:.2f}\n", h, s.tokens[top.key], top.weight,
               s.tokens[pair.query], s.tokens[pair.key], pair.weight);
  }
}

int run(const std::string& folder, const std::string& output_path) {
  const std::vector<Sentence> sentences = read_sentences(folder + "/tokens.json");
  const auto input = qkv::SafetensorsFile::open(folder + "/layer0_input.safetensors");
  const qkv::AttentionLayer layer(qkv::load_layer(folder + "/layer0_weights.safetensors"));
  const qkv::LayerConfig& c = layer.config();
  const qkv::ConstTensor q = input.tensor("q"), k = input.tensor("k"), v = input.tensor("v");
  const int64_t batch = q.shape[0], n_q = q.shape[1], n_kv = k.shape[1];

  std::vector<float> output(static_cast<size_t>(batch * n_q * c.dim_out));
  std::vector<float> weights(static_cast<size_t>(c.num_heads * batch * n_q * n_kv));
  const qkv::LayerOutputs outputs{.output = {output.data(), {batch, n_q, c.dim_out}},
                                  .weights = {weights.data(), {c.num_heads * batch, n_q, n_kv}}};
  const auto begin = std::chrono::steady_clock::now();
  layer.forward(q, k, v, outputs, {.bias = input.tensor("mask")});
  const double ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();

  fmt::print(
      "all-MiniLM-L6-v2, layer 0: {} heads on {} sentences, {} tokens with padding, {:.2f} ms\n",
      c.num_heads, batch, n_q, ms);
  for (int64_t b = 0; b < batch; ++b) {
    print_sentence(sentences.at(static_cast<size_t>(b)), weights.data(), b, outputs.weights,
                   c.num_heads);
  }
  qkv::save_safetensors(output_path, {{"attention", outputs.weights}, {"output", outputs.output}});
  fmt::print("\nwrote {}: attention {}, output {}\n", output_path, qkv::shape_text(outputs.weights),
             qkv::shape_text(outputs.output));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc > 1 ? argv[1] : "examples/data",
               argc > 2 ? argv[2] : "minilm_output.safetensors");
  } catch (const std::exception& e) {
    fmt::print(stderr, "example_minilm: {}\n", e.what());
    return 2;
  }
}
