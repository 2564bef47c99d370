// SPDX-License-Identifier: Apache-2.0
// Tier: command line. qkv inspect: what is in a safetensors or npy file, and whether it is a layer.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>

#include "flags.h"
#include "output.h"
#include "qkv/weights.h"
#include "verb.h"

namespace qkv::cli {
namespace {

struct InspectOptions {
  std::string file;
  int64_t num_heads = 0, num_kv_heads = 0;
  bool no_values = false, json = false;
};

// Over the values that are not NaN.
struct Statistics {
  double least = std::numeric_limits<double>::infinity();
  double greatest = -std::numeric_limits<double>::infinity();
  double sum = 0;
  int64_t count = 0;
  int64_t nan_count = 0;

  void add(double value) {
    if (std::isnan(value)) {
      ++nan_count;
      return;
    }
    least = std::min(least, value);
    greatest = std::max(greatest, value);
    sum += value;
    ++count;
  }
  double mean() const { return sum / static_cast<double>(count); }
};

template <class T>
double as_double(T value) {
  return static_cast<double>(value);
}
double as_double(bf16_t value) { return to_float(value); }
double as_double(f16_t value) { return to_float(value); }

// The data of a file may start at any address, so elements are copied out one by one.
template <class T>
Statistics statistics(const void* data, int64_t n) {
  Statistics s;
  const char* bytes = static_cast<const char*>(data);
  for (int64_t i = 0; i < n; ++i) {
    T value;
    std::memcpy(&value, bytes + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    s.add(as_double(value));
  }
  return s;
}

Statistics statistics(DType dtype, const void* data, int64_t n) {
  switch (dtype) {
    case DType::f32:
      return statistics<float>(data, n);
    case DType::f64:
      return statistics<double>(data, n);
    case DType::bf16:
      return statistics<bf16_t>(data, n);
    case DType::f16:
      return statistics<f16_t>(data, n);
    case DType::i8:
      return statistics<int8_t>(data, n);
    case DType::u8:
      return statistics<uint8_t>(data, n);
    case DType::i16:
      return statistics<int16_t>(data, n);
    case DType::u16:
      return statistics<uint16_t>(data, n);
    case DType::i32:
      return statistics<int32_t>(data, n);
    case DType::u32:
      return statistics<uint32_t>(data, n);
    case DType::i64:
      return statistics<int64_t>(data, n);
    case DType::u64:
      return statistics<uint64_t>(data, n);
    case DType::boolean:
      return statistics<uint8_t>(data, n);
  }
  return {};
}

struct Entry {
  TensorInfo tensor;
  std::optional<Statistics> values;
  int64_t size_bytes() const { return tensor.end_bytes - tensor.begin_bytes; }
};

Entry make_entry(const TensorInfo& tensor, const void* data, bool no_values) {
  Entry entry{tensor, std::nullopt};
  if (!no_values)
    entry.values = statistics(tensor.dtype, data, entry.size_bytes() / size_bytes(tensor.dtype));
  return entry;
}

// A layer of the file: its sizes, or why they are not known.
struct Recognised {
  LayerName name;
  std::optional<LayerConfig> config;
  std::string reason;
};

std::vector<Recognised> recognise(const SafetensorsFile& file, const InspectOptions& o) {
  std::vector<Recognised> layers;
  for (const LayerName& layer : list_layers(file)) {
    Recognised found{layer, std::nullopt, "not read"};
    if (!o.no_values) {
      LoadLayerOptions options;
      options.naming = layer.naming;
      options.prefix = layer.prefix;
      options.num_heads = o.num_heads;
      options.num_kv_heads = o.num_kv_heads;
      try {
        found.config = load_layer(file, options).config;
      } catch (const Error& e) {
        found.reason = e.what();
      }
    }
    layers.push_back(found);
  }
  return layers;
}

Json layer_json(const Recognised& layer) {
  Json json = {{"naming", name(layer.name.naming)}, {"prefix", layer.name.prefix}};
  if (!layer.config) {
    json["reason"] = layer.reason;
    return json;
  }
  const LayerConfig& c = *layer.config;
  json.update({{"num_heads", c.num_heads},
               {"num_kv_heads", c.num_kv_heads},
               {"dim_q", c.dim_q},
               {"dim_k", c.dim_k},
               {"dim_v", c.dim_v},
               {"head_dim_qk", c.head_dim_qk},
               {"head_dim_v", c.head_dim_v},
               {"dim_out", c.dim_out},
               {"num_parameters", c.num_parameters()}});
  return json;
}

void print_layer(const Recognised& layer) {
  const std::string prefix = layer.name.prefix.empty() ? "" : " " + one_line(layer.name.prefix);
  fmt::print("layer{}, {} naming: ", prefix, name(layer.name.naming));
  if (!layer.config) {
    fmt::print("{}\n", layer.reason);
    return;
  }
  const LayerConfig& c = *layer.config;
  fmt::print(
      "num_heads {}, num_kv_heads {}, dim_q {}, dim_k {}, dim_v {}, head_dim_qk {}, "
      "head_dim_v {}, dim_out {}, {} parameters\n",
      c.num_heads, c.num_kv_heads, c.dim_q, c.dim_k, c.dim_v, c.head_dim_qk, c.head_dim_v,
      c.dim_out, c.num_parameters());
}

std::string number(double value) { return fmt::format("{:.4g}", value); }

void print_entries(const std::vector<Entry>& entries, bool no_values) {
  std::vector<std::string> header{"name", "dtype", "shape", "bytes"};
  if (!no_values) header.insert(header.end(), {"min", "max", "mean", "NaN"});
  Table table(header);
  for (const Entry& e : entries) {
    std::vector<std::string> row{e.tensor.name, std::string(name(e.tensor.dtype)),
                                 shape_text(e.tensor.shape), fmt::to_string(e.size_bytes())};
    if (e.values && e.values->count > 0) {
      row.insert(row.end(),
                 {number(e.values->least), number(e.values->greatest), number(e.values->mean())});
    } else if (e.values) {
      row.insert(row.end(), {"-", "-", "-"});
    }
    if (e.values) row.push_back(fmt::to_string(e.values->nan_count));
    table.add(row);
  }
  fmt::print("{}", table.text());
}

Json entries_json(const std::vector<Entry>& entries) {
  Json tensors = Json::array();
  for (const Entry& e : entries) {
    Json row = {{"name", e.tensor.name},
                {"dtype", name(e.tensor.dtype)},
                {"shape", e.tensor.shape},
                {"begin_bytes", e.tensor.begin_bytes},
                {"end_bytes", e.tensor.end_bytes}};
    if (e.values) {
      const bool any = e.values->count > 0;
      row["min"] = any ? json_number(e.values->least) : Json(nullptr);
      row["max"] = any ? json_number(e.values->greatest) : Json(nullptr);
      row["mean"] = any ? json_number(e.values->mean()) : Json(nullptr);
      row["nan_count"] = e.values->nan_count;
    }
    tensors.push_back(row);
  }
  return tensors;
}

int inspect_safetensors(const InspectOptions& o) {
  const SafetensorsFile file = SafetensorsFile::open(o.file);
  std::vector<Entry> entries;
  int64_t total_bytes = 0;
  for (const TensorInfo& tensor : file.tensors()) {
    entries.push_back(make_entry(tensor, file.data(tensor), o.no_values));
    total_bytes += entries.back().size_bytes();
  }
  const std::vector<Recognised> layers = recognise(file, o);
  if (o.json) {
    Json json = {{"path", o.file}, {"format", "safetensors"}, {"metadata", file.metadata()}};
    json["tensors"] = entries_json(entries);
    json["layers"] = Json::array();
    for (const Recognised& layer : layers) json["layers"].push_back(layer_json(layer));
    print_json(json);
    return kOk;
  }
  fmt::print("{}: safetensors, {} tensor{}, {} bytes of data\n", o.file, entries.size(),
             entries.size() == 1 ? "" : "s", total_bytes);
  for (const auto& [key, value] : file.metadata()) {
    fmt::print("metadata {} = {}\n", one_line(key), one_line(value));
  }
  if (!entries.empty()) print_entries(entries, o.no_values);
  for (const Recognised& layer : layers) print_layer(layer);
  return kOk;
}

int inspect_npy(const InspectOptions& o) {
  const NpyFile file = NpyFile::open(o.file);
  const std::vector<Entry> entries{make_entry(file.info(), file.tensor().data, o.no_values)};
  if (o.json) {
    Json json = {{"path", o.file}, {"format", "npy"}, {"fortran_order", file.fortran_order()}};
    json["tensors"] = entries_json(entries);
    print_json(json);
    return kOk;
  }
  fmt::print("{}: npy, {} order\n", o.file, file.fortran_order() ? "Fortran" : "C");
  print_entries(entries, o.no_values);
  return kOk;
}

int run(const InspectOptions& o) {
  const bool is_npy = o.file.size() > 4 && o.file.compare(o.file.size() - 4, 4, ".npy") == 0;
  return is_npy ? inspect_npy(o) : inspect_safetensors(o);
}

}  // namespace

const Verb kInspect = {
    "inspect", "what is in a safetensors or npy file, and whether it is a layer",
    [](CLI::App& app) -> std::function<int()> {
      const auto o = std::make_shared<InspectOptions>();
      app.add_option("file", o->file, "name.safetensors or name.npy")
          ->required()
          ->type_name("FILE");
      add_size(app, "--num-heads", &o->num_heads, 1,
               "of the layer, if the metadata does not say it");
      add_size(app, "--num-kv-heads", &o->num_kv_heads, 1, "likewise");
      app.add_flag("--no-values", o->no_values,
                   "only the header: no min, max, mean, NaN (for big files)");
      app.add_flag("--json", o->json, "print JSON");
      app.footer(
          "\nLists every tensor with its element type, shape, bytes, least, greatest and mean "
          "value and its\n"
          "number of NaN; says which naming of a layer the names follow (lesson, torch, bert, "
          "llama) and\n"
          "the sizes that the shapes give. The file is checked in full, as run does.\n\n"
          "Example:\n  qkv inspect examples/data/layer0_weights.safetensors\n");
      return [o] { return run(*o); };
    }};

}  // namespace qkv::cli
