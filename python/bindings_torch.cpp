// SPDX-License-Identifier: Apache-2.0
// Tier: call. The usual call of qkv.torch.scaled_dot_product_attention in one step: what Python would
// ask of each tensor costs more than a small attention.
#include <algorithm>

#include "bindings_args.h"
#include "bindings_attention.h"
#include "bindings_function.h"

namespace qkv::python {
namespace {

constexpr const char* kCaller = "scaled_dot_product_attention";

// The tensors of a call. The caller knows that no gradient is wanted.
struct Tensors {
  Array q, k, v, mask;

  // False: not four axes of one element type in CPU memory that fit each other as they are. The general
  // road then broadcasts, or finds torch's words for the mistake.
  bool open(PyObject* const* args, bool is_causal, bool enable_gqa) {
    const auto detached = Array::Access::read_detached;
    try {
      q.open(args[0], kCaller, "query", detached);
      k.open(args[1], kCaller, "key", detached);
      v.open(args[2], kCaller, "value", detached);
      mask.open(args[3], kCaller, "attn_mask", detached);
    } catch (const PythonError&) {  // sparse, nested
      PyErr_Clear();
      return false;
    } catch (const Error&) {  // another device, another type
      return false;
    }
    const ConstTensor &tq = q.view(), &tk = k.view(), &tv = v.view();
    if (tq.rank != 4 || tk.rank != 4 || tv.rank != 4) return false;
    if (!info(tq.dtype).is_float || tq.dtype != tk.dtype || tq.dtype != tv.dtype) return false;
    const int64_t heads = tk.shape[1];
    const bool is_grouped = enable_gqa && heads > 0 && tq.shape[1] % heads == 0;
    return tq.shape[0] == tk.shape[0] && (tq.shape[1] == heads || is_grouped) &&
           std::equal(tk.shape, tk.shape + 3, tv.shape) && tq.shape[3] == tk.shape[3] &&
           (!mask || (!is_causal && mask_fits()));
  }

 private:
  bool mask_fits() const {
    const ConstTensor &t = mask.view(), &tq = q.view();
    if (t.rank != 2 && t.rank != 4) return false;
    if (t.dtype != DType::boolean && t.dtype != tq.dtype) return false;
    const int64_t scores[] = {tq.shape[0], tq.shape[1], tq.shape[2], k.view().shape[2]};
    for (int a = 0; a < t.rank; ++a)
      if (t.shape[a] != 1 && t.shape[a] != scores[4 - t.rank + a]) return false;
    return true;
  }
};

// sdpa(query, key, value, attn_mask, is_causal, scale, enable_gqa) -> out, or None: see Tensors::open.
PyObject* sdpa(PyObject* const* args, Py_ssize_t num_args, PyObject*) {
  if (num_args != 7) {
    PyErr_SetString(PyExc_TypeError, "sdpa: unknown arguments");
    throw PythonError();
  }
  const bool is_causal = to_bool(args[4]);
  Tensors t;
  if (!t.open(args, is_causal, to_bool(args[6]))) Py_RETURN_NONE;
  for (Array* array : {&t.q, &t.k, &t.v}) array->make_rows_contiguous();
  static const Mask causal = Mask::causal_top_left();
  AttentionOptions options;
  if (is_causal) options.mask = causal;
  if (const ConstTensor& mask = t.mask.view()) {
    if (mask.dtype == DType::boolean) {
      options.mask = Mask::dense(mask);
    } else {
      options.bias = mask;
    }
  }
  if (args[5] != Py_None) options.scale = to_double(args[5], 0);
  const ConstTensor &q = t.q.view(), &k = t.k.view(), &v = t.v.view();
  AttentionOutputs outputs;
  const int64_t shape[] = {q.shape[0], q.shape[1], q.shape[2], v.shape[3]};
  Ref out = make_array(t.q.kind(), q.dtype, shape, &outputs.out);
  const double rows =
      static_cast<double>(q.shape[0] * q.shape[1]) * static_cast<double>(q.shape[2]);
  const double flop =
      2 * rows * static_cast<double>(k.shape[2]) * static_cast<double>(q.shape[3] + v.shape[3]);
  run_released(flop, &options.executor, [&] { attention(q, k, v, outputs, options); });
  return finish_array(t.q.kind(), std::move(out)).release();
}

PyMethodDef g_methods[] = {method<sdpa>("sdpa", "The usual call of scaled_dot_product_attention."),
                           {nullptr, nullptr, 0, nullptr}};

}  // namespace

void bind_torch(nanobind::module_& module) {
  if (PyModule_AddFunctions(module.ptr(), g_methods) != 0) throw PythonError();
}

}  // namespace qkv::python
