// SPDX-License-Identifier: Apache-2.0
// Tier: call. qkv._core.Layer: an AttentionLayer and its call; qkv/_layers.py holds the parameters.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings_args.h"
#include "bindings_attention.h"
#include "bindings_mask.h"
#include "qkv/layer.h"
#include "qkv/weights.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace qkv::python {
namespace {

constexpr const char* kCaller = "layer";

// Parameters in the order of the lesson.
struct Parameter {
  const char* name;
  std::vector<float> LayerWeights::*member;
};
constexpr Parameter kParameters[] = {
    {"fc_q.weight", &LayerWeights::fc_q_weight}, {"fc_q.bias", &LayerWeights::fc_q_bias},
    {"fc_k.weight", &LayerWeights::fc_k_weight}, {"fc_k.bias", &LayerWeights::fc_k_bias},
    {"fc_v.weight", &LayerWeights::fc_v_weight}, {"fc_v.bias", &LayerWeights::fc_v_bias},
    {"fc_o.weight", &LayerWeights::fc_o_weight}, {"fc_o.bias", &LayerWeights::fc_o_bias}};

// A layer and, if asked for, the values that it packed.
struct PyLayer {
  AttentionLayer layer;
  std::vector<std::vector<float>> values{};  // in the order of kParameters; empty: absent
};

PyLayer* make_layer(const nb::tuple& sizes, const nb::dict& state, bool keep_values) {
  LayerWeights w;
  LayerConfig& c = w.config;
  int64_t* const fields[] = {&c.num_heads, &c.num_kv_heads, &c.dim_q,      &c.dim_k,
                             &c.dim_v,     &c.head_dim_qk,  &c.head_dim_v, &c.dim_out};
  for (size_t i = 0; i < std::size(fields); ++i) *fields[i] = nb::cast<int64_t>(sizes[i]);
  for (const Parameter& p : kParameters) {
    if (!state.contains(p.name)) continue;
    Array array;
    array.open(nb::handle(state[p.name]).ptr(), kCaller, p.name);
    const ConstTensor& t = array.view();
    if (t.dtype != DType::f32 || !t.is_contiguous())
      throw Error(std::string(kCaller) + ": " + p.name + " must be float32 in C order");
    const auto* values = static_cast<const float*>(t.data);
    (w.*(p.member)).assign(values, values + t.num_elements());
  }
  c.bias_q = !w.fc_q_bias.empty(), c.bias_k = !w.fc_k_bias.empty();
  c.bias_v = !w.fc_v_bias.empty(), c.bias_o = !w.fc_o_bias.empty();
  nb::gil_scoped_release released;
  auto* made = new PyLayer{AttentionLayer(w)};
  if (keep_values)
    for (const Parameter& p : kParameters) made->values.push_back(std::move(w.*(p.member)));
  return made;
}

// True if these arrays (None = absent) still hold the packed values, bit for bit: torch counts no
// version for writes through .data.
bool holds(const PyLayer& layer, const nb::tuple& parameters) {
  for (size_t i = 0; i < std::size(kParameters); ++i) {
    const std::vector<float>& values = layer.values[i];
    Array array;
    array.open(nb::handle(parameters[i]).ptr(), kCaller, kParameters[i].name);
    const ConstTensor& t = array.view();
    if (static_cast<size_t>(t ? t.num_elements() : 0) != values.size()) return false;
    if (values.empty()) continue;
    if (t.dtype != DType::f32 || !t.is_contiguous() ||
        std::memcmp(t.data, values.data(), values.size() * sizeof(float)) != 0)
      return false;
  }
  return true;
}

// (num_heads, num_kv_heads, {lesson's name: array}) of a file.
nb::tuple load_layer_state(const std::string& path, const std::string& preset, int64_t num_heads,
                           int64_t num_kv_heads, const std::string& prefix) {
  LoadLayerOptions options;
  options.naming = naming_from_name(preset);
  options.num_heads = num_heads, options.num_kv_heads = num_kv_heads, options.prefix = prefix;
  const LayerWeights w = [&] {
    nb::gil_scoped_release released;
    return load_layer(path, options);
  }();
  const LayerConfig& c = w.config;
  if (c.scale || c.softcap != 0)
    throw Error("load_layer: " + path +
                " has a scale or softcap of its own, which qkv.GQA has not");
  nb::dict state;
  for (const Parameter& p : kParameters) {
    const std::vector<float>& values = w.*(p.member);
    if (values.empty()) continue;
    const auto n = static_cast<int64_t>(values.size());
    const int64_t rows = p.name[3] == 'q'   ? c.num_heads * c.head_dim_qk
                         : p.name[3] == 'k' ? c.num_kv_heads * c.head_dim_qk
                         : p.name[3] == 'v' ? c.num_kv_heads * c.head_dim_v
                                            : c.dim_out;
    const int64_t shape[] = {rows, n / rows};
    const bool is_bias = n == rows && std::string_view(p.name).ends_with("bias");
    Tensor view;
    Ref array = make_numpy(DType::f32, {shape, is_bias ? size_t{1} : size_t{2}}, &view);
    std::copy(values.begin(), values.end(), static_cast<float*>(view.data));
    state[p.name] = nb::steal(array.release());
  }
  return nb::make_tuple(c.num_heads, c.num_kv_heads, state);
}

nb::object forward(const PyLayer& self, nb::handle q_object, nb::handle k_object,
                   nb::handle v_object, nb::handle mask, bool need_weights,
                   nb::handle num_threads) {
  const AttentionLayer& layer = self.layer;
  Array q, k, v, bias;
  q.open(q_object.ptr(), kCaller, "q");
  k.open(k_object.ptr(), kCaller, "k");
  v.open(v_object.ptr(), kCaller, "v");
  for (Array* array : {&q, &k, &v}) array->make_rows_contiguous();
  // An additive mask (the lesson's) is a bias; a boolean array or a qkv.Mask is a mask.
  OptionArguments::Values values{};
  if (!mask.is_none()) {
    PyObject** slot = &values.mask;
    if (!as_mask(mask.ptr())) {
      bias.open(mask.ptr(), kCaller, "mask");
      if (info(bias.view().dtype).is_float) slot = &values.bias;
    }
    *slot = mask.ptr();
  }
  if (!num_threads.is_none()) values.num_threads = num_threads.ptr();
  OptionArguments arguments(values, kCaller);
  LayerOptions options;
  options.mask = arguments.options.mask, options.bias = arguments.options.bias;
  options.num_threads = arguments.options.num_threads;

  const ConstTensor &tq = q.view(), &tk = k.view();
  if (tq.rank != 3 || tk.rank != 3 || v.view().rank != 3) {
    throw Error(std::string(kCaller) + ": q, k and v need 3 axes [batch, tokens, dim], got q " +
                shape_text(tq) + ", k " + shape_text(tk) + " and v " + shape_text(v.view()));
  }
  const LayerConfig& c = layer.config();
  LayerOutputs outputs;
  const int64_t output_shape[] = {tq.shape[0], tq.shape[1], c.dim_out};
  Ref output = make_array(q.kind(), DType::f32, output_shape, &outputs.output), weights;
  if (need_weights) {
    const int64_t shape[] = {c.num_heads * tq.shape[0], tq.shape[1], tk.shape[1]};
    weights = make_array(q.kind(), DType::f32, shape, &outputs.weights);
  }
  const double rows = static_cast<double>(tq.shape[0] * tq.shape[1]);
  const double flop = 2 * rows * static_cast<double>(c.num_parameters()) +
                      2 * rows * static_cast<double>(tk.shape[1] * c.num_heads) *
                          static_cast<double>(c.head_dim_qk + c.head_dim_v);
  run_released(flop, &options.executor, [&] { layer.forward(tq, tk, v.view(), outputs, options); });
  output = finish_array(q.kind(), std::move(output));
  if (!need_weights) return nb::steal(output.release());
  weights = finish_array(q.kind(), std::move(weights));
  return nb::make_tuple(nb::steal(weights.release()), nb::steal(output.release()));
}

}  // namespace

void bind_layer(nb::module_& module) {
  module.def("load_layer", &load_layer_state, "path"_a, "preset"_a, "num_heads"_a, "num_kv_heads"_a,
             "prefix"_a);
  nb::class_<PyLayer>(module, "Layer")
      .def(nb::new_(&make_layer), "sizes"_a, "state"_a, "keep_values"_a = false)
      .def("holds", &holds, "parameters"_a)
      .def("__call__", &forward, "q"_a.none(), "k"_a.none(), "v"_a.none(), "mask"_a.none(),
           "need_weights"_a, "num_threads"_a.none());
}

}  // namespace qkv::python
