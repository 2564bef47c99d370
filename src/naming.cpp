// SPDX-License-Identifier: Apache-2.0
// Tier: call. The table of namings, and the search for a layer by it.
#include "naming.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <set>
#include <utility>
#include <vector>

#include "file_error.h"

namespace qkv {
namespace {

/// Names without the prefix; empty: this naming has no such tensor. A fused tensor holds the rows
/// of q, k and v in this order.
struct NamingRow {
  Naming naming;
  std::string_view name;
  std::array<std::string_view, 3> weights;  // q, k, v
  std::array<std::string_view, 3> biases;
  std::string_view fused_weight, fused_bias;
  std::string_view o_weight, o_bias;
  bool is_fused_in_thirds;                  // k and v have as many rows as q
  std::array<std::string_view, 2> refused;  // parameters that the layer does not have
  std::string_view refused_reason;
};

constexpr std::array<NamingRow, 4> kNamings = {{
    {Naming::lesson,
     "lesson",
     {"fc_q.weight", "fc_k.weight", "fc_v.weight"},
     {"fc_q.bias", "fc_k.bias", "fc_v.bias"},
     "",
     "",
     "fc_o.weight",
     "fc_o.bias",
     false,
     {},
     ""},
    {Naming::torch,
     "torch",
     {"q_proj_weight", "k_proj_weight", "v_proj_weight"},
     {},
     "in_proj_weight",
     "in_proj_bias",
     "out_proj.weight",
     "out_proj.bias",
     true,
     {"bias_k", "bias_v"},
     "adds one learned key and value to every sequence (add_bias_kv), which this layer does not "
     "have"},
    {Naming::bert,
     "bert",
     {"self.query.weight", "self.key.weight", "self.value.weight"},
     {"self.query.bias", "self.key.bias", "self.value.bias"},
     "",
     "",
     "output.dense.weight",
     "output.dense.bias",
     false,
     {},
     ""},
    {Naming::llama,
     "llama",
     {"q_proj.weight", "k_proj.weight", "v_proj.weight"},
     {"q_proj.bias", "k_proj.bias", "v_proj.bias"},
     "qkv_proj.weight",
     "qkv_proj.bias",
     "o_proj.weight",
     "o_proj.bias",
     false,
     {},
     ""},
}};

constexpr size_t kMaxListed = 8;  // names in an error text
constexpr std::string_view kAutomatic = "auto";

/// A layer that the file seems to hold: at least one of its q, k, v weights is there.
struct Candidate {
  size_t row;  // of kNamings
  std::string prefix;
  auto operator<=>(const Candidate&) const = default;
};

template <class Range>
std::string list_text(const Range& texts) {
  std::vector<std::string> shown;
  for (const auto& text : texts) {
    if (shown.size() == kMaxListed) break;
    shown.push_back(text);
  }
  const size_t rest = texts.size() - shown.size();
  return fmt::format("{}{}", fmt::join(shown, ", "),
                     rest > 0 ? fmt::format(" and {} more", rest) : "");
}

std::string names_text(const NamingRow& row) {
  std::string text = fmt::format("{} ({}", row.name, fmt::join(row.weights, " "));
  if (!row.fused_weight.empty()) text += fmt::format(" or {}", row.fused_weight);
  return text + fmt::format(", {})", row.o_weight);
}

std::set<Candidate> find_candidates(const SafetensorsFile& file) {
  std::set<Candidate> found;
  for (const TensorInfo& tensor : file.tensors()) {
    const std::string_view name = tensor.name;
    for (size_t r = 0; r < kNamings.size(); ++r) {
      const auto& w = kNamings[r].weights;
      for (const std::string_view suffix : {w[0], w[1], w[2], kNamings[r].fused_weight}) {
        if (suffix.empty() || !name.ends_with(suffix)) continue;
        const std::string_view prefix = name.substr(0, name.size() - suffix.size());
        if (prefix.empty() || prefix.back() == '.') found.insert({r, std::string(prefix)});
      }
    }
  }
  return found;
}

/// Those that the caller means. With a prefix: the exact one, else all under it. Without: in each
/// naming the layer that has no prefix, else all.
std::set<Candidate> choose(const std::set<Candidate>& all, std::string prefix) {
  if (!prefix.empty() && prefix.back() != '.') prefix += '.';
  std::set<Candidate> exact, under;
  for (const Candidate& c : all) {
    if (c.prefix == prefix) {
      exact.insert(c);
    } else if (c.prefix.starts_with(prefix) && all.count({c.row, prefix}) == 0) {
      under.insert(c);
    }
  }
  if (!prefix.empty()) return exact.empty() ? under : exact;
  exact.merge(under);
  return exact;
}

/// Collects the tensors of one candidate.
class Collector {
 public:
  Collector(const SafetensorsFile& file, const Candidate& candidate, std::string_view caller)
      : file_(file), row_(kNamings[candidate.row]), prefix_(candidate.prefix), caller_(caller) {}

  LayerSource collect() const {
    for (const std::string_view name : row_.refused) {
      if (find(name) != nullptr) fail(fmt::format("{} {}", name, row_.refused_reason));
    }
    LayerSource layer;
    layer.naming = row_.naming;
    layer.prefix = prefix_;
    layer.o.weight = whole_weight(row_.o_weight);
    layer.o.bias = whole_bias(row_.o_bias, layer.o.weight);
    ProjectionSource* const parts[] = {&layer.q, &layer.k, &layer.v};
    if (find(row_.fused_weight) != nullptr) {
      for (const std::string_view name : row_.weights) refuse_both(name, row_.fused_weight);
      split_fused_weight(layer.o.weight, parts);
    } else {
      for (size_t p = 0; p < 3; ++p) parts[p]->weight = whole_weight(row_.weights[p]);
    }
    if (find(row_.fused_bias) != nullptr) {
      for (const std::string_view name : row_.biases) refuse_both(name, row_.fused_bias);
      split_fused_bias(parts);
    } else if (!row_.biases[0].empty()) {
      for (size_t p = 0; p < 3; ++p) parts[p]->bias = whole_bias(row_.biases[p], parts[p]->weight);
    }
    return layer;
  }

 private:
  [[noreturn]] void fail(const std::string& text) const {
    file_error(caller_, file_.path(),
               fmt::format("{} layer {}: {}", row_.name, in_quotes(prefix_), text));
  }

  const TensorInfo* find(std::string_view name) const {
    return name.empty() ? nullptr : file_.find(prefix_ + std::string(name));
  }

  void refuse_both(std::string_view name, std::string_view fused) const {
    if (find(name) != nullptr) fail(fmt::format("has both {} and {}", name, fused));
  }

  RowsOf whole(const TensorInfo* tensor, size_t rank) const {
    if (tensor->shape.size() != rank) {
      fail(fmt::format("{} {} must have {}", tensor->name, shape_text(tensor->shape),
                       rank == 1 ? "1 axis" : "2 axes, [out, in]"));
    }
    return {tensor, 0, tensor->shape[0]};
  }

  RowsOf whole_weight(std::string_view name) const {
    const TensorInfo* tensor = find(name);
    if (tensor == nullptr) fail(fmt::format("{} is missing", name));
    return whole(tensor, 2);
  }

  RowsOf whole_bias(std::string_view name, const RowsOf& weight) const {
    const TensorInfo* tensor = find(name);
    if (tensor == nullptr) return {};
    const RowsOf bias = whole(tensor, 1);
    if (bias.count != weight.count) {
      fail(fmt::format("{} does not fit {}: one number per row is wanted", rows_text(bias),
                       rows_text(weight)));
    }
    return bias;
  }

  /// q has as many rows as the output projection has columns; k and v share the rest.
  void split_fused_weight(const RowsOf& o, ProjectionSource* const (&parts)[3]) const {
    const RowsOf fused = whole_weight(row_.fused_weight);
    const int64_t rows_q = o.tensor->shape[1];
    const int64_t rows_kv = (fused.count - rows_q) / 2;
    const bool fits = fused.count > rows_q && (fused.count - rows_q) % 2 == 0 &&
                      (!row_.is_fused_in_thirds || rows_kv == rows_q);
    if (!fits) {
      fail(fmt::format("{} cannot be split into q, k and v: {} says that q has {} rows{}",
                       rows_text(fused), rows_text(o), rows_q,
                       row_.is_fused_in_thirds ? ", and k and v as many" : ""));
    }
    parts[0]->weight = {fused.tensor, 0, rows_q};
    parts[1]->weight = {fused.tensor, rows_q, rows_kv};
    parts[2]->weight = {fused.tensor, rows_q + rows_kv, rows_kv};
  }

  void split_fused_bias(ProjectionSource* const (&parts)[3]) const {
    const RowsOf fused = whole(find(row_.fused_bias), 1);
    int64_t begin = 0;
    for (ProjectionSource* part : parts) {
      part->bias = {fused.tensor, begin, part->weight.count};
      begin += part->weight.count;
    }
    if (begin != fused.count) {
      fail(fmt::format("{} does not fit {}, {} and {}: one number per row is wanted",
                       rows_text(fused), rows_text(parts[0]->weight), rows_text(parts[1]->weight),
                       rows_text(parts[2]->weight)));
    }
  }

  const SafetensorsFile& file_;
  const NamingRow& row_;
  const std::string& prefix_;
  std::string_view caller_;
};

std::string tensor_names_text(const SafetensorsFile& file) {
  if (file.tensors().empty()) return "the file has no tensors";
  std::vector<std::string> names;
  for (const TensorInfo& tensor : file.tensors()) names.push_back(in_quotes(tensor.name));
  return "the file has " + list_text(names);
}

}  // namespace

std::string rows_text(const RowsOf& rows) {
  std::string text = rows.tensor->name + " " + shape_text(rows.tensor->shape);
  if (rows.count != rows.tensor->shape[0]) {
    text += fmt::format(" rows [{}, {})", rows.begin, rows.begin + rows.count);
  }
  return printable(text);
}

Naming naming_from_name(std::string_view name) {
  if (name == kAutomatic) return Naming::automatic;
  std::string known(kAutomatic);
  for (const NamingRow& row : kNamings) {
    if (row.name == name) return row.naming;
    known += " ";
    known += row.name;
  }
  throw Error("naming_from_name: unknown naming " + in_quotes(name) + ", known are " + known);
}

std::string_view name(Naming naming) {
  for (const NamingRow& row : kNamings) {
    if (row.naming == naming) return row.name;
  }
  return kAutomatic;
}

std::vector<LayerName> list_layers(const SafetensorsFile& file) {
  std::vector<LayerName> layers;
  for (const Candidate& c : find_candidates(file)) {
    layers.push_back({kNamings[c.row].naming, c.prefix});
  }
  return layers;
}

LayerSource find_layer(const SafetensorsFile& file, Naming naming, const std::string& prefix,
                       std::string_view caller) {
  std::set<Candidate> all = find_candidates(file);
  if (naming != Naming::automatic) {
    std::erase_if(all, [&](const Candidate& c) { return kNamings[c.row].naming != naming; });
  }
  if (all.empty()) {
    std::vector<std::string> wanted;
    for (const NamingRow& row : kNamings) {
      if (naming == Naming::automatic || row.naming == naming) wanted.push_back(names_text(row));
    }
    file_error(caller, file.path(),
               fmt::format("holds no layer, looked for {}; {}", fmt::join(wanted, ", "),
                           tensor_names_text(file)));
  }
  const auto layers_text = [](const std::set<Candidate>& layers) {
    std::vector<std::string> texts;
    for (const Candidate& c : layers) {
      texts.push_back(fmt::format("{} {}", kNamings[c.row].name, in_quotes(c.prefix)));
    }
    return list_text(texts);
  };
  const std::set<Candidate> chosen = choose(all, prefix);
  if (chosen.empty()) {
    file_error(caller, file.path(),
               fmt::format("holds no layer under the prefix {}; it has {}", in_quotes(prefix),
                           layers_text(all)));
  }
  if (chosen.size() > 1) {
    file_error(caller, file.path(),
               fmt::format("holds {} layers: {}; choose one with --prefix or --names",
                           chosen.size(), layers_text(chosen)));
  }
  return Collector(file, *chosen.begin(), caller).collect();
}

}  // namespace qkv
