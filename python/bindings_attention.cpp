// SPDX-License-Identifier: Apache-2.0
// Tier: call. qkv.attention: the hot function.
#include "bindings_attention.h"

#include <string>

#include "bindings_args.h"
#include "bindings_function.h"
#include "bindings_outputs.h"

namespace qkv::python {
namespace {

constexpr const char* kCaller = "attention";

PyObject* attention_checked(PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) {
  static const Signature<20> signature(kCaller, 3, 3,
                                       {"q",
                                        "k",
                                        "v",
                                        "mask",
                                        "bias",
                                        "scale",
                                        "softcap",
                                        "sinks",
                                        "alibi_slopes",
                                        "dropout",
                                        "seed",
                                        "return_lse",
                                        "return_weights",
                                        "return_mean_weights",
                                        "weight_rows",
                                        "top_k",
                                        "return_column_sums",
                                        "return_entropy",
                                        "out",
                                        "num_threads"});
  std::array<PyObject*, 20> a;
  signature.parse(args, num_args, keywords, a);
  Array q, k, v;
  q.open(a[0], kCaller, "q");
  k.open(a[1], kCaller, "k");
  v.open(a[2], kCaller, "v");
  q.make_rows_contiguous();
  k.make_rows_contiguous();
  v.make_rows_contiguous();
  OptionArguments arguments({a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[19]}, kCaller);
  const ConstTensor &tq = q.view(), &tk = k.view(), &tv = v.view();
  if (tq.rank != 4 || tk.rank != 4 || tv.rank != 4) {
    throw Error(std::string(kCaller) +
                ": q, k and v need 4 axes [batch, heads, tokens, dim], got q " + shape_text(tq) +
                ", k " + shape_text(tk) + " and v " + shape_text(tv));
  }

  ResultArrays results(
      kCaller, q.kind(), tq.dtype,
      {tq.shape[0], tq.shape[1], tq.shape[2], tk.shape[2], tv.shape[3], tk.shape[2]});
  results.make_out(a[18], {{&q, "q"}, {&k, "k"}, {&v, "v"}});
  results.make({a[11], a[12], a[13], a[14], a[15], a[16], a[17]});
  const double pairs = static_cast<double>(tq.shape[0] * tq.shape[1]) *
                       static_cast<double>(tq.shape[2]) * static_cast<double>(tk.shape[2]);
  const double flop = 2 * pairs * static_cast<double>(tq.shape[3] + tv.shape[3]);
  run_released(flop, &arguments.options.executor,
               [&] { attention(tq, tk, tv, results.outputs, arguments.options); });
  return results.finish();
}

PyMethodDef g_methods[] = {method<attention_checked>("attention", kAttentionDoc),
                           {nullptr, nullptr, 0, nullptr}};

}  // namespace

void bind_attention(nanobind::module_& module) {
  if (PyModule_AddFunctions(module.ptr(), g_methods) != 0) throw PythonError();
}

}  // namespace qkv::python
