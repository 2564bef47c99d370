// SPDX-License-Identifier: Apache-2.0
// Tier: command line. qkv run: a layer on an input file.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <memory>

#include "flags.h"
#include "layer_input.h"
#include "mask_flag.h"
#include "output.h"
#include "progress.h"
#include "qkv/qkv.h"
#include "verb.h"

namespace qkv::cli {
namespace {

namespace fs = std::filesystem;

struct RunOptions {
  std::string weights, input, output;
  std::vector<std::string> masks;
  std::string naming = "auto", prefix;
  int64_t num_heads = 0, num_kv_heads = 0, num_threads = 0;
  bool no_weights = false, progress = false, json = false;
};

// Found out before the work, not after it.
void check_output(const RunOptions& o) {
  std::error_code failed;
  const fs::path path(o.output);
  if (fs::is_directory(path, failed)) {
    throw Error(fmt::format("{}: is a folder; give --output the name of a file", o.output));
  }
  const fs::path folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
  if (!fs::is_directory(folder, failed)) {
    throw Error(fmt::format("{}: the folder {} does not exist; make it or choose another --output",
                            o.output, folder.string()));
  }
  if (access(folder.c_str(), W_OK) != 0) {
    throw Error(fmt::format("{}: the folder {} cannot be written; choose another --output",
                            o.output, folder.string()));
  }
  for (const std::string& read : {o.weights, o.input}) {
    if (fs::equivalent(path, read, failed)) {
      throw Error(fmt::format("{}: is also read; choose another --output", o.output));
    }
  }
}

// Says which flag an error of the library is about, and what to do.
template <class Work>
auto for_flag(const char* flag, const char* advice, Work work) {
  try {
    return work();
  } catch (const Error& e) {
    throw Error(fmt::format("{}: {}{}{}", flag, e.what(), *advice ? "; " : "", advice));
  }
}

int64_t product(std::initializer_list<int64_t> extents) {
  int64_t n = 1;
  for (int64_t e : extents) {
    if (__builtin_mul_overflow(n, e, &n))
      throw Error("the weights do not fit 64 bits; use --no-weights");
  }
  return n;
}

int64_t count_nan(const std::vector<float>& values) {
  int64_t n = 0;
  for (float v : values) n += std::isnan(v);
  return n;
}

std::string kind_of(const LayerConfig& c) {
  return c.num_kv_heads == c.num_heads ? "MHA" : c.num_kv_heads == 1 ? "MQA" : "GQA";
}

int run(const RunOptions& o) {
  const int num_threads = checked_threads(o.num_threads);
  const Mask flag = parse_masks(o.masks);
  check_output(o);
  LoadLayerOptions load;
  load.naming = for_flag("--names", "", [&] { return naming_from_name(o.naming); });
  load.prefix = o.prefix;
  load.num_heads = o.num_heads;
  load.num_kv_heads = o.num_kv_heads;
  const LayerWeights weights =
      for_flag("--weights", "give the safetensors file of a layer, see 'qkv inspect'",
               [&] { return load_layer(o.weights, load); });
  const LayerConfig& c = weights.config;
  const LayerInput input = for_flag("--input", "", [&] { return read_layer_input(o.input, c); });
  const int64_t batch = input.q.shape[0], n_q = input.q.shape[1], n_kv = input.k.shape[1];
  flag.check(input.mask_shape(c), "--mask");  // before anything is allocated

  const AttentionLayer layer(weights);
  std::vector<float> output(static_cast<size_t>(product({batch, n_q, c.dim_out})));
  std::vector<float> attention;
  LayerOutputs outputs;
  outputs.output = Tensor(output.data(), {batch, n_q, c.dim_out});
  if (!o.no_weights) {
    attention.resize(static_cast<size_t>(product({c.num_heads, batch, n_q, n_kv})));
    outputs.weights = Tensor(attention.data(), {c.num_heads * batch, n_q, n_kv});
  }
  LayerOptions options;
  options.mask = flag & input.mask;
  options.bias = input.bias;
  options.num_threads = num_threads;
  std::unique_ptr<Progress> bar;
  if (o.progress) {
    bar = std::make_unique<Progress>();
    options.executor = bar.get();
  }
  const auto begin = std::chrono::steady_clock::now();
  layer.forward(input.q, input.k, input.v, outputs, options);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (bar) bar->finish();

  std::vector<NamedTensor> tensors;
  if (!o.no_weights) tensors.push_back({"attention", outputs.weights});
  tensors.push_back({"output", outputs.output});
  for_flag("--output", "make room or choose another path", [&] {
    save_safetensors(o.output, tensors,
                     {{"num_heads", std::to_string(c.num_heads)},
                      {"num_kv_heads", std::to_string(c.num_kv_heads)}});
  });

  const int64_t nan_count = count_nan(output);
  std::string mask_text = flag.is_full() && !input.mask_text.empty() ? "" : flag.name();
  if (!input.mask_text.empty()) {
    mask_text += (mask_text.empty() ? "" : " and the ") + input.mask_text;
  }
  const int threads = num_threads > 0 ? num_threads : default_num_threads();
  if (o.json) {
    Json json;
    json["layer"] = {{"kind", kind_of(c)},
                     {"num_heads", c.num_heads},
                     {"num_kv_heads", c.num_kv_heads},
                     {"dim_q", c.dim_q},
                     {"dim_k", c.dim_k},
                     {"dim_v", c.dim_v},
                     {"head_dim_qk", c.head_dim_qk},
                     {"head_dim_v", c.head_dim_v},
                     {"dim_out", c.dim_out},
                     {"num_parameters", c.num_parameters()}};
    json["batch"] = batch;
    json["n_q"] = n_q;
    json["n_kv"] = n_kv;
    json["mask"] = mask_text;
    json["notes"] = input.notes;
    json["num_threads"] = threads;
    json["seconds"] = seconds;
    json["nan_count"] = nan_count;
    json["path"] = o.output;
    if (!o.no_weights) json["attention"] = {c.num_heads * batch, n_q, n_kv};
    json["output"] = {batch, n_q, c.dim_out};
    print_json(json);
    return kOk;
  }
  fmt::print(
      "layer   {}: num_heads {}, num_kv_heads {}, head_dim_qk {}, head_dim_v {}, {} parameters\n",
      kind_of(c), c.num_heads, c.num_kv_heads, c.head_dim_qk, c.head_dim_v, c.num_parameters());
  fmt::print("input   q {}, k {}, v {}\n", shape_text(input.q), shape_text(input.k),
             shape_text(input.v));
  for (const std::string& note : input.notes) fmt::print("        {}\n", note);
  fmt::print("mask    {}\n", mask_text);
  fmt::print("time    {}, {} thread{}\n", seconds_text(seconds), threads, threads == 1 ? "" : "s");
  fmt::print("wrote   {}: {}output {}\n", o.output,
             o.no_weights ? "" : fmt::format("attention {}, ", shape_text(outputs.weights)),
             shape_text(outputs.output));
  if (nan_count > 0) {
    fmt::print("note    output holds {} NaN: a key or query that is visible holds NaN or Inf\n",
               nan_count);
  }
  return kOk;
}

}  // namespace

const Verb kRun = {
    "run", "run a layer on an input file", [](CLI::App& app) -> std::function<int()> {
      const auto o = std::make_shared<RunOptions>();
      app.add_option("--weights", o->weights, "the layer (safetensors)")
          ->required()
          ->type_name("FILE");
      app.add_option("--input", o->input,
                     "q, k, v, or x for self-attention; and mask (safetensors)")
          ->required()
          ->type_name("FILE");
      app.add_option("--output", o->output, "where attention and output are written")
          ->required()
          ->type_name("FILE");
      app.add_option("--mask", o->masks, "which keys a query sees; see below")
          ->type_name("MASK")
          ->allow_extra_args(false)
          ->take_all();
      app.add_option("--names", o->naming,
                     "naming of the weights: auto, lesson, torch, bert, llama")
          ->type_name("NAMES");
      app.add_option("--prefix", o->prefix, "start of the names, if the file holds several layers")
          ->type_name("TEXT");
      add_size(app, "--num-heads", &o->num_heads, 1, "if the file's metadata does not say it");
      add_size(app, "--num-kv-heads", &o->num_kv_heads, 1,
               "1 = MQA, num_heads = MHA, between = GQA");
      add_size(app, "--num-threads,--threads", &o->num_threads, 1,
               "default: the cores of this process");
      app.add_flag("--no-weights", o->no_weights, "do not build or write the attention weights");
      app.add_flag("--progress", o->progress, "show a bar on stderr");
      app.add_flag("--json", o->json, "print JSON");
      app.footer(
          "\nComputes output = fc_o(softmax(q k^T / sqrt(head_dim_qk) + mask) v) and writes, in "
          "f32,\n"
          "  attention  [num_heads * batch, n_q, n_kv], index h * batch + b\n"
          "  output     [batch, n_q, dim_out]\n"
          "A tensor mask in the input is added to the scores (-inf hides a key), or, if it is\n"
          "boolean, true = attend; it applies together with --mask. A query that sees no key gets\n"
          "weights 0 and the output fc_o.bias. An absent k is taken from x or q, an absent v from\n"
          "x or k. Files appear whole or not at all.\n\n" +
          mask_help() +
          "\nExample:\n  qkv run --weights examples/data/layer0_weights.safetensors \\\n"
          "          --input examples/data/layer0_input.safetensors --output out.safetensors\n");
      return [o] { return run(*o); };
    }};

}  // namespace qkv::cli
