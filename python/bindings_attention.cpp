// SPDX-License-Identifier: Apache-2.0
// Tier: call. qkv.attention: the hot function.
#include "bindings_attention.h"

#include "bindings_args.h"
#include "bindings_function.h"

namespace qkv::python {
namespace {

constexpr const char* kCaller = "attention";

// The result must not be written where inputs are still read.
void refuse_overlap(const Array& out, const Array& input, const char* name) {
  const auto extent = [](const ConstTensor& t) {
    auto lo = reinterpret_cast<intptr_t>(t.data), hi = lo;
    for (int a = 0; a < t.rank; ++a) {
      const int64_t reach = (t.shape[a] - 1) * t.stride[a] * size_bytes(t.dtype);
      (reach < 0 ? lo : hi) += reach;
    }
    return std::pair(lo, hi + size_bytes(t.dtype));
  };
  if (out.view().num_elements() == 0 || input.view().num_elements() == 0) return;
  const auto [out_lo, out_hi] = extent(out.view());
  const auto [in_lo, in_hi] = extent(input.view());
  if (out_lo < in_hi && in_lo < out_hi) {
    throw Error(std::string(kCaller) + ": out must not overlap " + name + ", got " +
                shape_text(out.view()) + " and " + shape_text(input.view()));
  }
}

PyObject* attention_checked(PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) {
  static const Signature<15> signature(
      kCaller, 3, 3,
      {"q", "k", "v", "mask", "bias", "scale", "softcap", "sinks", "alibi_slopes", "dropout",
       "seed", "return_lse", "return_weights", "out", "num_threads"});
  std::array<PyObject*, 15> a;
  signature.parse(args, num_args, keywords, a);
  Array q, k, v, given_out;
  q.open(a[0], kCaller, "q");
  k.open(a[1], kCaller, "k");
  v.open(a[2], kCaller, "v");
  q.make_rows_contiguous();
  k.make_rows_contiguous();
  v.make_rows_contiguous();
  OptionArguments arguments({a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[14]}, kCaller);
  const ConstTensor &tq = q.view(), &tk = k.view(), &tv = v.view();
  if (tq.rank != 4 || tk.rank != 4 || tv.rank != 4) {
    throw Error(std::string(kCaller) +
                ": q, k and v need 4 axes [batch, heads, tokens, dim], got q " + shape_text(tq) +
                ", k " + shape_text(tk) + " and v " + shape_text(tv));
  }

  AttentionOutputs outputs;
  Ref out, lse, weights;
  const DType arithmetic = tq.dtype == DType::f64 ? DType::f64 : DType::f32;
  const int64_t out_shape[] = {tq.shape[0], tq.shape[1], tq.shape[2], tv.shape[3]};
  if (a[13]) {
    given_out.open(a[13], kCaller, "out", Array::Access::write);
    outputs.out = given_out.writable_view();
    refuse_overlap(given_out, q, "q");
    refuse_overlap(given_out, k, "k");
    refuse_overlap(given_out, v, "v");
    out = Ref::borrow(a[13]);
  } else {
    out = make_array(q.kind(), info(tq.dtype).is_float ? tq.dtype : DType::f32, out_shape,
                     &outputs.out);
  }
  if (to_bool(a[11])) lse = make_array(q.kind(), arithmetic, {out_shape, 3}, &outputs.lse);
  if (to_bool(a[12])) {
    const int64_t shape[] = {tq.shape[0], tq.shape[1], tq.shape[2], tk.shape[2]};
    weights = make_array(q.kind(), arithmetic, shape, &outputs.weights);
  }
  const double pairs = static_cast<double>(tq.shape[0] * tq.shape[1]) *
                       static_cast<double>(tq.shape[2]) * static_cast<double>(tk.shape[2]);
  const double flop = 2 * pairs * static_cast<double>(tq.shape[3] + tv.shape[3]);
  run_released(flop, &arguments.options.executor,
               [&] { attention(tq, tk, tv, outputs, arguments.options); });
  if (!a[13]) out = finish_array(q.kind(), std::move(out));
  if (!lse && !weights) return out.release();
  if (lse) lse = finish_array(q.kind(), std::move(lse));
  if (weights) weights = finish_array(q.kind(), std::move(weights));
  return lse && weights ? PyTuple_Pack(3, out.get(), lse.get(), weights.get())
                        : PyTuple_Pack(2, out.get(), lse ? lse.get() : weights.get());
}

PyMethodDef g_methods[] = {method<attention_checked>("attention", kAttentionDoc),
                           {nullptr, nullptr, 0, nullptr}};

}  // namespace

void bind_attention(nanobind::module_& module) {
  if (PyModule_AddFunctions(module.ptr(), g_methods) != 0) throw PythonError();
}

}  // namespace qkv::python
