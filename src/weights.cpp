// SPDX-License-Identifier: Apache-2.0
// Tier: call. Layers from and to files: head counts from options, metadata and shapes, every size
// against the others.
#include "qkv/weights.h"

#include <fmt/format.h>

#include <charconv>
#include <cstring>
#include <utility>

#include "file_error.h"
#include "half.h"
#include "naming.h"
#include "strided.h"

namespace qkv {
namespace {

constexpr const char* kLoadCaller = "load_layer";
constexpr const char* kSaveCaller = "save_layer";
constexpr const char* kScaleKey = "qkv.scale";
constexpr const char* kSoftcapKey = "qkv.softcap";

/// Reads typed elements without assuming an aligned address.
template <class T, class Convert>
void append_row(const std::byte* first, int64_t count, int64_t step_bytes, float* out,
                Convert convert) {
  for (int64_t i = 0; i < count; ++i) {
    T element;
    std::memcpy(&element, first + i * step_bytes, sizeof(T));
    out[i] = convert(element);
  }
}

/// A whole number from the metadata: decimal digits only.
int64_t metadata_count(const SafetensorsFile& file, const std::string& key) {
  const auto it = file.metadata().find(key);
  if (it == file.metadata().end()) return 0;
  const std::string& text = it->second;
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value <= 0) {
    file_error(
        kLoadCaller, file.path(),
        fmt::format("metadata {} is {}, a whole number from 1 is wanted", key, in_quotes(text)));
  }
  return value;
}

double metadata_number(const SafetensorsFile& file, const std::string& text, const char* key) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    file_error(kLoadCaller, file.path(),
               fmt::format("metadata {} is {}, a number is wanted", key, in_quotes(text)));
  }
  return value;
}

/// A head count and where it came from, for errors.
struct HeadCount {
  int64_t value = 0;  // 0: unknown
  std::string text;   // "num_heads 12 (metadata)"
};

HeadCount head_count(const SafetensorsFile& file, const std::string& key, int64_t option) {
  if (option < 0) {
    throw Error(fmt::format("{}: {} must be at least 1, got {}", kLoadCaller, key, option));
  }
  const int64_t value = option > 0 ? option : metadata_count(file, key);
  return {value, fmt::format("{} {} ({})", key, value, option > 0 ? "given" : "metadata")};
}

/// Sizes from the shapes of the four weights; every one is checked against the others.
LayerConfig layer_sizes(const SafetensorsFile& file, const LayerSource& s,
                        const LoadLayerOptions& options) {
  const auto fail = [&](const std::string& text) { file_error(kLoadCaller, file.path(), text); };
  for (const ProjectionSource* part : {&s.q, &s.k, &s.v, &s.o}) {
    if (part->weight.count == 0 || part->weight.tensor->shape[1] == 0) {
      fail(rows_text(part->weight) + " is empty");
    }
    for (const RowsOf* rows : {&part->weight, &part->bias}) {
      if (rows->tensor != nullptr && !info(rows->tensor->dtype).is_float) {
        fail(fmt::format("{} is {}; weights must be f32, f64, f16 or bf16", rows_text(*rows),
                         name(rows->tensor->dtype)));
      }
    }
  }
  const HeadCount heads = head_count(file, "num_heads", options.num_heads);
  HeadCount kv_heads = head_count(file, "num_kv_heads", options.num_kv_heads);
  if (heads.value == 0) fail("does not say num_heads in its metadata; give it with --num-heads");

  LayerConfig c;
  c.num_heads = heads.value;
  if (s.q.weight.count % heads.value != 0) {
    fail(fmt::format("{} does not divide the {} rows of {}", heads.text, s.q.weight.count,
                     rows_text(s.q.weight)));
  }
  c.head_dim_qk = s.q.weight.count / heads.value;
  if (s.k.weight.count % c.head_dim_qk != 0) {
    fail(fmt::format("the {} rows of {} are not whole heads of head_dim_qk {} = {} rows of {} / {}",
                     s.k.weight.count, rows_text(s.k.weight), c.head_dim_qk, s.q.weight.count,
                     rows_text(s.q.weight), heads.text));
  }
  const int64_t heads_in_k = s.k.weight.count / c.head_dim_qk;
  if (kv_heads.value == 0) {
    kv_heads = {heads_in_k, fmt::format("num_kv_heads {} (from the shapes)", heads_in_k)};
  }
  c.num_kv_heads = kv_heads.value;
  if (c.num_kv_heads != heads_in_k) {
    fail(fmt::format("{} does not fit: {} and {} give head_dim_qk {}, so {} holds {} heads",
                     kv_heads.text, heads.text, rows_text(s.q.weight), c.head_dim_qk,
                     rows_text(s.k.weight), heads_in_k));
  }
  if (c.num_heads % c.num_kv_heads != 0) {
    fail(fmt::format("{} is not a multiple of {}, got {} and {}", heads.text, kv_heads.text,
                     rows_text(s.q.weight), rows_text(s.k.weight)));
  }
  if (s.v.weight.count % c.num_kv_heads != 0) {
    fail(fmt::format("{} does not divide the {} rows of {}", kv_heads.text, s.v.weight.count,
                     rows_text(s.v.weight)));
  }
  c.head_dim_v = s.v.weight.count / c.num_kv_heads;
  int64_t columns_o = 0;
  const bool overflows = __builtin_mul_overflow(c.num_heads, c.head_dim_v, &columns_o);
  if (overflows || columns_o != s.o.weight.tensor->shape[1]) {
    fail(fmt::format("{} must have num_heads * head_dim_v = {} * {} columns, got {} and {}",
                     rows_text(s.o.weight), c.num_heads, c.head_dim_v, rows_text(s.o.weight),
                     rows_text(s.v.weight)));
  }
  c.dim_q = s.q.weight.tensor->shape[1];
  c.dim_k = s.k.weight.tensor->shape[1];
  c.dim_v = s.v.weight.tensor->shape[1];
  c.dim_out = s.o.weight.count;
  c.bias_q = s.q.bias.tensor != nullptr;
  c.bias_k = s.k.bias.tensor != nullptr;
  c.bias_v = s.v.bias.tensor != nullptr;
  c.bias_o = s.o.bias.tensor != nullptr;
  return c;
}

std::vector<float> read_rows(const SafetensorsFile& file, const RowsOf& rows) {
  if (rows.tensor == nullptr) return {};
  std::vector<int64_t> shape = rows.tensor->shape;
  shape[0] = rows.count;
  const int64_t row_bytes = (shape.size() == 2 ? shape[1] : 1) * size_bytes(rows.tensor->dtype);
  const auto* first =
      static_cast<const std::byte*>(file.data(*rows.tensor)) + rows.begin * row_bytes;
  return to_f32(ConstTensor(first, rows.tensor->dtype, shape));
}

}  // namespace

std::vector<float> to_f32(ConstTensor tensor) {
  if (!tensor || (tensor.data == nullptr && tensor.num_elements() != 0)) {
    throw Error("to_f32: there is no data");
  }
  if (!info(tensor.dtype).is_float) {
    throw Error(fmt::format("to_f32: the dtype must be f32, f64, f16 or bf16, got {} {}",
                            name(tensor.dtype), shape_text(tensor)));
  }
  std::vector<float> values(static_cast<size_t>(tensor.num_elements()));
  float* out = values.data();
  for_each_row(tensor, [&](const std::byte* first, int64_t count, int64_t step_bytes) {
    switch (tensor.dtype) {
      case DType::f64:
        append_row<double>(first, count, step_bytes, out,
                           [](double x) { return static_cast<float>(x); });
        break;
      case DType::bf16:
        append_row<uint16_t>(first, count, step_bytes, out, half::from_bf16);
        break;
      case DType::f16:
        append_row<uint16_t>(first, count, step_bytes, out, half::from_f16);
        break;
      default:
        append_row<float>(first, count, step_bytes, out, [](float x) { return x; });
        break;
    }
    out += count;
  });
  return values;
}

LayerWeights load_layer(const std::string& path, const LoadLayerOptions& options) {
  return load_layer(SafetensorsFile::open(path), options);
}

LayerWeights load_layer(const SafetensorsFile& file, const LoadLayerOptions& options) {
  const LayerSource source = find_layer(file, options.naming, options.prefix, kLoadCaller);
  LayerWeights w;
  w.config = layer_sizes(file, source, options);
  if (const auto it = file.metadata().find(kScaleKey); it != file.metadata().end()) {
    w.config.scale = metadata_number(file, it->second, kScaleKey);
  }
  if (const auto it = file.metadata().find(kSoftcapKey); it != file.metadata().end()) {
    w.config.softcap = metadata_number(file, it->second, kSoftcapKey);
  }
  w.config.check((std::string(kLoadCaller) + ": " + printable(file.path())).c_str());
  w.fc_q_weight = read_rows(file, source.q.weight);
  w.fc_q_bias = read_rows(file, source.q.bias);
  w.fc_k_weight = read_rows(file, source.k.weight);
  w.fc_k_bias = read_rows(file, source.k.bias);
  w.fc_v_weight = read_rows(file, source.v.weight);
  w.fc_v_bias = read_rows(file, source.v.bias);
  w.fc_o_weight = read_rows(file, source.o.weight);
  w.fc_o_bias = read_rows(file, source.o.bias);
  return w;
}

void save_layer(const std::string& path, const LayerWeights& w) {
  w.check(kSaveCaller);
  const LayerConfig& c = w.config;
  std::vector<NamedTensor> tensors;
  const auto add = [&](const char* name, const std::vector<float>& weight,
                       const std::vector<float>& bias, int64_t columns) {
    const auto rows = static_cast<int64_t>(weight.size()) / columns;
    tensors.push_back({std::string(name) + ".weight", {weight.data(), {rows, columns}}});
    if (!bias.empty()) tensors.push_back({std::string(name) + ".bias", {bias.data(), {rows}}});
  };
  add("fc_q", w.fc_q_weight, w.fc_q_bias, c.dim_q);
  add("fc_k", w.fc_k_weight, w.fc_k_bias, c.dim_k);
  add("fc_v", w.fc_v_weight, w.fc_v_bias, c.dim_v);
  add("fc_o", w.fc_o_weight, w.fc_o_bias, c.num_heads * c.head_dim_v);
  std::map<std::string, std::string> metadata = {{"num_heads", std::to_string(c.num_heads)},
                                                 {"num_kv_heads", std::to_string(c.num_kv_heads)}};
  if (c.scale) metadata[kScaleKey] = fmt::format("{}", *c.scale);
  if (c.softcap != 0) metadata[kSoftcapKey] = fmt::format("{}", c.softcap);
  save_safetensors(path, tensors, metadata);
}

}  // namespace qkv
