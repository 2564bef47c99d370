// SPDX-License-Identifier: Apache-2.0
// Tier: call. qkv.attention_varlen and qkv.merge_states.
#include <algorithm>

#include "bindings_args.h"
#include "bindings_attention.h"
#include "bindings_function.h"
#include "bindings_outputs.h"

namespace qkv::python {
namespace {

// The largest number of keys of a sequence. Bad offsets give some number: the call refuses them.
int64_t longest_sequence(const ConstTensor& cu, int64_t total) {
  int64_t longest = 0;
  if (cu.rank != 1 || (cu.dtype != DType::i32 && cu.dtype != DType::i64)) return longest;
  const auto at = [&](int64_t s) {
    return cu.dtype == DType::i32 ? static_cast<const int32_t*>(cu.data)[s * cu.stride[0]]
                                  : static_cast<const int64_t*>(cu.data)[s * cu.stride[0]];
  };
  for (int64_t s = 1; s < cu.shape[0]; ++s) {
    const int64_t begin = std::clamp<int64_t>(at(s - 1), 0, total);
    longest = std::max(longest, std::clamp<int64_t>(at(s), 0, total) - begin);
  }
  return longest;
}

PyObject* attention_varlen_checked(PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) {
  constexpr const char* kCaller = "attention_varlen";
  static const Signature<22> signature(kCaller, 5, 5,
                                       {"q",
                                        "k",
                                        "v",
                                        "cu_seqlens_q",
                                        "cu_seqlens_kv",
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
  std::array<PyObject*, 22> a;
  signature.parse(args, num_args, keywords, a);
  Array q, k, v, cu_q, cu_kv;
  q.open(a[0], kCaller, "q");
  k.open(a[1], kCaller, "k");
  v.open(a[2], kCaller, "v");
  for (Array* array : {&q, &k, &v}) array->make_rows_contiguous();
  cu_q.open(a[3], kCaller, "cu_seqlens_q");
  cu_kv.open(a[4], kCaller, "cu_seqlens_kv");
  OptionArguments arguments({a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[21]}, kCaller);
  const ConstTensor &tq = q.view(), &tv = v.view();
  if (tq.rank != 3 || k.view().rank != 3 || tv.rank != 3) {
    throw Error(std::string(kCaller) + ": q, k and v need 3 axes [total, heads, dim], got q " +
                shape_text(tq) + ", k " + shape_text(k.view()) + " and v " + shape_text(tv));
  }
  ResultArrays results(kCaller, q.kind(), tq.dtype,
                       {{},
                        tq.shape[1],
                        tq.shape[0],
                        longest_sequence(cu_kv.view(), tv.shape[0]),
                        tv.shape[2],
                        tv.shape[0]});
  results.make_out(a[20], {{&q, "q"}, {&k, "k"}, {&v, "v"}});
  results.make({a[13], a[14], a[15], a[16], a[17], a[18], a[19]});
  const double flop = 2.0 * static_cast<double>(tq.shape[0]) * static_cast<double>(tv.shape[0]) *
                      static_cast<double>(tq.shape[1]) *
                      static_cast<double>(tq.shape[2] + tv.shape[2]);
  run_released(flop, &arguments.options.executor, [&] {
    attention_varlen(tq, k.view(), tv, cu_q.view(), cu_kv.view(), results.outputs,
                     arguments.options);
  });
  return results.finish();
}

PyObject* merge_states_checked(PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) {
  constexpr const char* kCaller = "merge_states";
  static const Signature<4> signature(kCaller, 4, 4, {"out_a", "lse_a", "out_b", "lse_b"});
  std::array<PyObject*, 4> a;
  signature.parse(args, num_args, keywords, a);
  Array out_a, lse_a, out_b, lse_b;
  out_a.open(a[0], kCaller, "out_a");
  lse_a.open(a[1], kCaller, "lse_a");
  out_b.open(a[2], kCaller, "out_b");
  lse_b.open(a[3], kCaller, "lse_b");
  for (Array* array : {&out_a, &out_b}) array->make_rows_contiguous();
  const ConstTensor &to = out_a.view(), &tl = lse_a.view();
  Tensor out_view, lse_view;
  Ref out = make_array(out_a.kind(), to.dtype, {to.shape, static_cast<size_t>(to.rank)}, &out_view);
  Ref lse = make_array(out_a.kind(), tl.dtype, {tl.shape, static_cast<size_t>(tl.rank)}, &lse_view);
  run_released(0, nullptr,
               [&] { merge_states(to, tl, out_b.view(), lse_b.view(), out_view, lse_view); });
  out = finish_array(out_a.kind(), std::move(out));
  lse = finish_array(out_a.kind(), std::move(lse));
  return PyTuple_Pack(2, out.get(), lse.get());
}

PyMethodDef g_methods[] = {method<attention_varlen_checked>("attention_varlen", kVarlenDoc),
                           method<merge_states_checked>("merge_states", kMergeDoc),
                           {nullptr, nullptr, 0, nullptr}};

}  // namespace

void bind_variants(nanobind::module_& module) {
  if (PyModule_AddFunctions(module.ptr(), g_methods) != 0) throw PythonError();
}

}  // namespace qkv::python
