// SPDX-License-Identifier: Apache-2.0
// Tier: call. qkv.attention_varlen and qkv.merge_states.
#include "bindings_args.h"
#include "bindings_attention.h"
#include "bindings_function.h"

namespace qkv::python {
namespace {

PyObject* attention_varlen_checked(PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) {
  constexpr const char* kCaller = "attention_varlen";
  static const Signature<16> signature(
      kCaller, 5, 5,
      {"q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv", "mask", "bias", "scale", "softcap", "sinks",
       "alibi_slopes", "dropout", "seed", "return_lse", "out", "num_threads"});
  std::array<PyObject*, 16> a;
  signature.parse(args, num_args, keywords, a);
  Array q, k, v, cu_q, cu_kv, given_out;
  q.open(a[0], kCaller, "q");
  k.open(a[1], kCaller, "k");
  v.open(a[2], kCaller, "v");
  for (Array* array : {&q, &k, &v}) array->make_rows_contiguous();
  cu_q.open(a[3], kCaller, "cu_seqlens_q");
  cu_kv.open(a[4], kCaller, "cu_seqlens_kv");
  OptionArguments arguments({a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[15]}, kCaller);
  const ConstTensor &tq = q.view(), &tv = v.view();
  if (tq.rank != 3 || k.view().rank != 3 || tv.rank != 3) {
    throw Error(std::string(kCaller) + ": q, k and v need 3 axes [total, heads, dim], got q " +
                shape_text(tq) + ", k " + shape_text(k.view()) + " and v " + shape_text(tv));
  }
  AttentionOutputs outputs;
  Ref out, lse;
  const int64_t out_shape[] = {tq.shape[0], tq.shape[1], tv.shape[2]};
  if (a[14]) {
    given_out.open(a[14], kCaller, "out", Array::Access::write);
    outputs.out = given_out.writable_view();
    out = Ref::borrow(a[14]);
  } else {
    out = make_array(q.kind(), info(tq.dtype).is_float ? tq.dtype : DType::f32, out_shape,
                     &outputs.out);
  }
  if (to_bool(a[13])) {
    const int64_t lse_shape[] = {tq.shape[1], tq.shape[0]};
    lse = make_array(q.kind(), tq.dtype == DType::f64 ? DType::f64 : DType::f32, lse_shape,
                     &outputs.lse);
  }
  const double flop = 2.0 * static_cast<double>(tq.shape[0]) * static_cast<double>(tv.shape[0]) *
                      static_cast<double>(tq.shape[1]) *
                      static_cast<double>(tq.shape[2] + tv.shape[2]);
  run_released(flop, &arguments.options.executor, [&] {
    attention_varlen(tq, k.view(), tv, cu_q.view(), cu_kv.view(), outputs, arguments.options);
  });
  if (!a[14]) out = finish_array(q.kind(), std::move(out));
  if (!lse) return out.release();
  lse = finish_array(q.kind(), std::move(lse));
  return PyTuple_Pack(2, out.get(), lse.get());
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
