// SPDX-License-Identifier: Apache-2.0
// Tier: call. qkv._core.Layer: an AttentionLayer and its call; qkv/_layers.py holds the parameters.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings_args.h"
#include "bindings_attention.h"
#include "bindings_mask.h"
#include "qkv/layer.h"

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

AttentionLayer* make_layer(const nb::tuple& sizes, const nb::dict& state) {
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
  return new AttentionLayer(w);
}

nb::object forward(const AttentionLayer& layer, nb::handle q_object, nb::handle k_object,
                   nb::handle v_object, nb::handle mask, bool need_weights,
                   nb::handle num_threads) {
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
  nb::class_<AttentionLayer>(module, "Layer")
      .def(nb::new_(&make_layer), "sizes"_a, "state"_a)
      .def("__call__", &forward, "q"_a.none(), "k"_a.none(), "v"_a.none(), "mask"_a.none(),
           "need_weights"_a, "num_threads"_a.none())
      .def("num_parameters",
           [](const AttentionLayer& layer) { return layer.config().num_parameters(); });
}

}  // namespace qkv::python
