// SPDX-License-Identifier: Apache-2.0
// Tier: call. qkv.attention_backward, and the form of it that qkv.torch calls.
#include "bindings_args.h"
#include "bindings_attention.h"
#include "bindings_function.h"

namespace qkv::python {
namespace {

constexpr const char* kCaller = "attention_backward";

struct Wants {
  bool bias, sinks;
};

Ref like(const ArrayKind& kind, const ConstTensor& t, DType dtype, Tensor* view) {
  return make_array(kind, dtype, {t.shape, static_cast<size_t>(t.rank)}, view);
}

// (dq, dk, dv, dbias, dsinks); what is not wanted stays empty.
std::array<Ref, 5> gradients(PyObject* const (&inputs)[7], const OptionArguments::Values& values,
                             const Wants* wants) {
  constexpr const char* kNames[] = {"q", "k", "v", "out", "lse", "dout", "dlse"};
  Array arrays[7];
  for (int i = 0; i < 7; ++i) {
    arrays[i].open(inputs[i], kCaller, kNames[i]);
    if (i != 4 && i != 6) arrays[i].make_rows_contiguous();
  }
  OptionArguments arguments(values, kCaller);
  const BackwardInputs in{arrays[0].view(), arrays[1].view(), arrays[2].view(), arrays[3].view(),
                          arrays[4].view(), arrays[5].view(), arrays[6].view()};
  if (in.q.rank != 4 || in.k.rank != 4 || in.v.rank != 4) {
    throw Error(std::string(kCaller) +
                ": q, k and v need 4 axes [batch, heads, tokens, dim], got q " + shape_text(in.q) +
                ", k " + shape_text(in.k) + " and v " + shape_text(in.v));
  }
  const ArrayKind& kind = arrays[0].kind();
  const DType arithmetic = in.q.dtype == DType::f64 ? DType::f64 : DType::f32;
  BackwardOutputs out;
  std::array<Ref, 5> results;
  results[0] = like(kind, in.q, in.q.dtype, &out.dq);
  results[1] = like(kind, in.k, in.k.dtype, &out.dk);
  results[2] = like(kind, in.v, in.v.dtype, &out.dv);
  const AttentionOptions& options = arguments.options;
  if (options.bias && (!wants || wants->bias)) {
    const size_t missing = static_cast<size_t>(options.bias.rank - arguments.bias_rank());
    results[3] = make_array(
        kind, arithmetic,
        {options.bias.shape + missing, static_cast<size_t>(arguments.bias_rank())}, &out.dbias);
    out.dbias = Tensor(out.dbias.data, arithmetic,
                       {options.bias.shape, static_cast<size_t>(options.bias.rank)});
  }
  if (options.sinks && (!wants || wants->sinks))
    results[4] = like(kind, options.sinks, arithmetic, &out.dsinks);
  const double pairs = static_cast<double>(in.q.shape[0] * in.q.shape[1]) *
                       static_cast<double>(in.q.shape[2]) * static_cast<double>(in.k.shape[2]);
  run_released(5 * pairs * static_cast<double>(in.q.shape[3] + in.v.shape[3]),
               &arguments.options.executor, [&] { attention_backward(in, out, options); });
  for (Ref& result : results)
    if (result) result = finish_array(kind, std::move(result));
  return results;
}

PyObject* backward_checked(PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) {
  static const Signature<16> signature(
      kCaller, 6, 6,
      {"q", "k", "v", "out", "lse", "dout", "mask", "bias", "scale", "softcap", "sinks",
       "alibi_slopes", "dropout", "seed", "dlse", "num_threads"});
  std::array<PyObject*, 16> a;
  signature.parse(args, num_args, keywords, a);
  std::array<Ref, 5> grads =
      gradients({a[0], a[1], a[2], a[3], a[4], a[5], a[14]},
                {a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[15]}, nullptr);
  Py_ssize_t count = 3 + (grads[3] ? 1 : 0) + (grads[4] ? 1 : 0), next = 0;
  Ref tuple = Ref::checked(PyTuple_New(count));
  for (Ref& grad : grads)
    if (grad) PyTuple_SET_ITEM(tuple.get(), next++, grad.release());
  return tuple.release();
}

PyObject* backward_wanted(PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) {
  static const Signature<15> signature("_attention_backward", 15, 15,
                                       {"q", "k", "v", "out", "lse", "dout", "dlse", "mask", "bias",
                                        "scale", "softcap", "sinks", "dropout", "seed", "wants"});
  std::array<PyObject*, 15> a;
  signature.parse(args, num_args, keywords, a);
  for (PyObject*& value : a)
    if (value == Py_None) value = nullptr;
  const Wants wants{to_bool(PyTuple_GetItem(a[14], 0)), to_bool(PyTuple_GetItem(a[14], 1))};
  std::array<Ref, 5> grads =
      gradients({a[0], a[1], a[2], a[3], a[4], a[5], a[6]},
                {a[7], a[8], a[9], a[10], a[11], nullptr, a[12], a[13], nullptr}, &wants);
  for (Ref& grad : grads)
    if (!grad) grad = Ref::borrow(Py_None);
  return PyTuple_Pack(5, grads[0].get(), grads[1].get(), grads[2].get(), grads[3].get(),
                      grads[4].get());
}

PyMethodDef g_methods[] = {method<backward_checked>("attention_backward", kBackwardDoc),
                           method<backward_wanted>("_attention_backward", nullptr),
                           {nullptr, nullptr, 0, nullptr}};

}  // namespace

void bind_backward(nanobind::module_& module) {
  if (PyModule_AddFunctions(module.ptr(), g_methods) != 0) throw PythonError();
}

}  // namespace qkv::python
