// SPDX-License-Identifier: Apache-2.0
// Tier: call. qkv._core.Layer: an AttentionLayer and its call; qkv/_layers.py holds the parameters. And
// the layer of a torch module, on the parameters that torch holds.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings_args.h"
#include "bindings_attention.h"
#include "bindings_function.h"
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

// (num_heads, num_kv_heads, dim_q, dim_k, dim_v, head_dim_qk, head_dim_v, dim_out)
LayerConfig config_of(PyObject* sizes) {
  LayerConfig c;
  int64_t* const fields[] = {&c.num_heads, &c.num_kv_heads, &c.dim_q,      &c.dim_k,
                             &c.dim_v,     &c.head_dim_qk,  &c.head_dim_v, &c.dim_out};
  for (size_t i = 0; i < std::size(fields); ++i)
    *fields[i] = to_int(PyTuple_GET_ITEM(sizes, static_cast<Py_ssize_t>(i)), 0);
  return c;
}

AttentionLayer* make_layer(const nb::tuple& sizes, const nb::dict& state) {
  LayerWeights w;
  w.config = config_of(sizes.ptr());
  LayerConfig& c = w.config;
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

// layer(q, k, v, mask, need_weights, num_threads); mask and num_threads: nullptr if not given.
PyObject* forward(const AttentionLayer& layer, PyObject* const (&inputs)[3], PyObject* mask,
                  bool need_weights, PyObject* num_threads, Array::Access access) {
  Array q, k, v, bias;
  q.open(inputs[0], kCaller, "q", access);
  k.open(inputs[1], kCaller, "k", access);
  v.open(inputs[2], kCaller, "v", access);
  for (Array* array : {&q, &k, &v}) array->make_rows_contiguous();
  // An additive mask (the lesson's) is a bias; a boolean array or a qkv.Mask is a mask.
  OptionArguments::Values values{};
  if (mask) {
    PyObject** slot = &values.mask;
    if (!as_mask(mask)) {
      bias.open(mask, kCaller, "mask");
      if (info(bias.view().dtype).is_float) slot = &values.bias;
    }
    *slot = mask;
  }
  values.num_threads = num_threads;
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
  if (!need_weights) return output.release();
  weights = finish_array(q.kind(), std::move(weights));
  Ref tuple = Ref::checked(PyTuple_New(2));
  PyTuple_SET_ITEM(tuple.get(), 0, weights.release());
  PyTuple_SET_ITEM(tuple.get(), 1, output.release());
  return tuple.release();
}

PyObject* or_null(PyObject* object) { return object == Py_None ? nullptr : object; }

nb::object call_layer(const AttentionLayer& layer, nb::handle q, nb::handle k, nb::handle v,
                      nb::handle mask, bool need_weights, nb::handle num_threads) {
  return nb::steal(forward(layer, {q.ptr(), k.ptr(), v.ptr()}, or_null(mask.ptr()), need_weights,
                           or_null(num_threads.ptr()), Array::Access::read));
}

// One parameter of a torch module, read in place. False: not a plain float32 tensor in C order.
bool open_parameter(PyObject* parameters, PyObject* key, PyTypeObject* tensor,
                    PyTypeObject* parameter, const char* name, Array* array) {
  PyObject* value = PyDict_GetItemWithError(parameters, key);
  if (!value && PyErr_Occurred()) throw PythonError();
  if (!value || value == Py_None) return true;
  if (Py_TYPE(value) != tensor && Py_TYPE(value) != parameter) return false;
  array->keep(value);  // another thread may take it out of the dict
  array->open(value, kCaller, name, Array::Access::read_detached);
  return array->view().dtype == DType::f32 && array->view().is_contiguous();
}

// layer_on_parameters(sizes, parameters, types, q, k, v, mask, need_weights): the layer whose parameters
// are in four dicts {"weight", "bias"} of fc_q, fc_k, fc_v and fc_o, used where they are; types: the plain
// tensor and parameter classes. None if a parameter is something else or another element type.
// Gradients are the caller's concern. A plain C function: nothing else of a small call costs as much
// as a general binding layer.
PyObject* layer_on_parameters(PyObject* const* args, Py_ssize_t num_args, PyObject*) {
  if (num_args != 8 || !PyTuple_Check(args[0]) || PyTuple_GET_SIZE(args[0]) != 8 ||
      !PyTuple_Check(args[1]) || PyTuple_GET_SIZE(args[1]) != 4 || !PyTuple_Check(args[2]) ||
      PyTuple_GET_SIZE(args[2]) != 2) {
    PyErr_SetString(PyExc_TypeError, "layer_on_parameters: unknown arguments");
    throw PythonError();
  }
  static PyObject* const weight_key = PyUnicode_InternFromString("weight");
  static PyObject* const bias_key = PyUnicode_InternFromString("bias");
  LayerParameters p;
  p.config = config_of(args[0]);
  struct Part {
    const char *weight_name, *bias_name;
    ConstTensor *weight, *bias;
    bool* has_bias;
  } const parts[] = {{"fc_q.weight", "fc_q.bias", &p.fc_q_weight, &p.fc_q_bias, &p.config.bias_q},
                     {"fc_k.weight", "fc_k.bias", &p.fc_k_weight, &p.fc_k_bias, &p.config.bias_k},
                     {"fc_v.weight", "fc_v.bias", &p.fc_v_weight, &p.fc_v_bias, &p.config.bias_v},
                     {"fc_o.weight", "fc_o.bias", &p.fc_o_weight, &p.fc_o_bias, &p.config.bias_o}};
  auto* const tensor = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(args[2], 0));
  auto* const parameter = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(args[2], 1));
  Array arrays[8];
  for (size_t i = 0; i < 4; ++i) {
    PyObject* dict = PyTuple_GET_ITEM(args[1], static_cast<Py_ssize_t>(i));
    if (!PyDict_Check(dict)) Py_RETURN_NONE;
    const Part& part = parts[i];
    Array &weight = arrays[2 * i], &bias = arrays[2 * i + 1];
    if (!open_parameter(dict, weight_key, tensor, parameter, part.weight_name, &weight) ||
        !weight || !open_parameter(dict, bias_key, tensor, parameter, part.bias_name, &bias))
      Py_RETURN_NONE;
    *part.weight = weight.view(), *part.bias = bias.view();
    *part.has_bias = static_cast<bool>(bias);
  }
  return forward(AttentionLayer(p), {args[3], args[4], args[5]}, or_null(args[6]),
                 args[7] == Py_True, nullptr, Array::Access::read_detached);
}

PyMethodDef g_methods[] = {
    method<layer_on_parameters>("layer_on_parameters",
                                "A layer on the parameters of a torch module."),
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void bind_layer(nb::module_& module) {
  module.def("load_layer", &load_layer_state, "path"_a, "preset"_a, "num_heads"_a, "num_kv_heads"_a,
             "prefix"_a);
  if (PyModule_AddFunctions(module.ptr(), g_methods) != 0) throw PythonError();
  nb::class_<AttentionLayer>(module, "Layer")
      .def(nb::new_(&make_layer), "sizes"_a, "state"_a)
      .def("__call__", &call_layer, "q"_a.none(), "k"_a.none(), "v"_a.none(), "mask"_a.none(),
           "need_weights"_a, "num_threads"_a.none());
}

}  // namespace qkv::python
