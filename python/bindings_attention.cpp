// SPDX-License-Identifier: Apache-2.0
// Tier: call. qkv.attention: the hot function.
#include "bindings_attention.h"

#include <string>
#include <vector>

#include "bindings_args.h"
#include "bindings_function.h"

namespace qkv::python {
namespace {

constexpr const char* kCaller = "attention";
constexpr size_t kMostForms = 6;

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

// The cheaper forms of the weights, in the order in which they are returned.
class Forms {
 public:
  struct Values {
    PyObject *mean_weights, *weight_rows, *top_k, *column_sums, *entropy;
  };

  Forms(const Values& values, const ArrayKind& kind, const ConstTensor& q, int64_t n_kv,
        DType arithmetic, AttentionOutputs* outputs)
      : kind_(kind) {
    const int64_t batch = q.shape[0], num_heads = q.shape[1], n_q = q.shape[2];
    if (to_bool(values.mean_weights)) {
      const int64_t shape[] = {batch, n_q, n_kv};
      add(arithmetic, shape, &outputs->mean_weights);
    }
    if (values.weight_rows) {
      read_rows(values.weight_rows);
      const auto n_rows = static_cast<int64_t>(rows_.size());
      outputs->weight_rows = ConstTensor(rows_.data(), {n_rows});
      const int64_t shape[] = {batch, num_heads, n_rows, n_kv};
      add(arithmetic, shape, &outputs->row_weights);
    }
    if (values.top_k) {
      const int64_t k = to_int(values.top_k, 0);
      if (k < 0) {
        throw Error(std::string(kCaller) + ": top_k must not be negative, got " +
                    std::to_string(k));
      }
      const int64_t shape[] = {batch, num_heads, n_q, k};
      add(arithmetic, shape, &outputs->top_weights);
      add(DType::i64, shape, &outputs->top_keys);
    }
    if (to_bool(values.column_sums)) {
      const int64_t shape[] = {batch, num_heads, n_kv};
      add(arithmetic, shape, &outputs->column_sums);
    }
    if (to_bool(values.entropy)) {
      const int64_t shape[] = {batch, num_heads, n_q};
      add(arithmetic, shape, &outputs->entropy);
    }
  }

  std::vector<Ref> finish() {
    for (Ref& array : arrays_) array = finish_array(kind_, std::move(array));
    return std::move(arrays_);
  }

 private:
  void add(DType dtype, std::span<const int64_t> shape, Tensor* view) {
    arrays_.push_back(make_array(kind_, dtype, shape, view));
  }
  // Any sequence of integers: a list, a range, an array.
  void read_rows(PyObject* object) {
    const Ref sequence =
        Ref::checked(PySequence_Fast(object, "weight_rows must be a sequence of integers"));
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(sequence.get());
    for (Py_ssize_t r = 0; r < n; ++r)
      rows_.push_back(to_int(PySequence_Fast_GET_ITEM(sequence.get(), r), 0));
    rows_.reserve(1);  // data() of no rows is not nullptr
  }

  const ArrayKind& kind_;
  std::vector<int64_t> rows_;
  std::vector<Ref> arrays_;
};

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
  Array q, k, v, given_out;
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

  AttentionOutputs outputs;
  Ref out, lse, weights;
  const DType arithmetic = tq.dtype == DType::f64 ? DType::f64 : DType::f32;
  const int64_t out_shape[] = {tq.shape[0], tq.shape[1], tq.shape[2], tv.shape[3]};
  if (a[18]) {
    given_out.open(a[18], kCaller, "out", Array::Access::write);
    outputs.out = given_out.writable_view();
    refuse_overlap(given_out, q, "q");
    refuse_overlap(given_out, k, "k");
    refuse_overlap(given_out, v, "v");
    out = Ref::borrow(a[18]);
  } else {
    out = make_array(q.kind(), info(tq.dtype).is_float ? tq.dtype : DType::f32, out_shape,
                     &outputs.out);
  }
  if (to_bool(a[11])) lse = make_array(q.kind(), arithmetic, {out_shape, 3}, &outputs.lse);
  if (to_bool(a[12])) {
    const int64_t shape[] = {tq.shape[0], tq.shape[1], tq.shape[2], tk.shape[2]};
    weights = make_array(q.kind(), arithmetic, shape, &outputs.weights);
  }
  Forms forms({a[13], a[14], a[15], a[16], a[17]}, q.kind(), tq, tk.shape[2], arithmetic, &outputs);
  const double pairs = static_cast<double>(tq.shape[0] * tq.shape[1]) *
                       static_cast<double>(tq.shape[2]) * static_cast<double>(tk.shape[2]);
  const double flop = 2 * pairs * static_cast<double>(tq.shape[3] + tv.shape[3]);
  run_released(flop, &arguments.options.executor,
               [&] { attention(tq, tk, tv, outputs, arguments.options); });
  if (!a[18]) out = finish_array(q.kind(), std::move(out));
  std::vector<Ref> more = forms.finish();
  if (!lse && !weights && more.empty()) return out.release();
  if (lse) lse = finish_array(q.kind(), std::move(lse));
  if (weights) weights = finish_array(q.kind(), std::move(weights));
  const Ref* results[2 + kMostForms + 1] = {&out};
  Py_ssize_t n = 1;
  if (lse) results[n++] = &lse;
  if (weights) results[n++] = &weights;
  for (const Ref& form : more) results[n++] = &form;
  Ref tuple = Ref::checked(PyTuple_New(n));
  for (Py_ssize_t r = 0; r < n; ++r)
    PyTuple_SET_ITEM(tuple.get(), r, Ref::borrow(results[r]->get()).release());
  return tuple.release();
}

PyMethodDef g_methods[] = {method<attention_checked>("attention", kAttentionDoc),
                           {nullptr, nullptr, 0, nullptr}};

}  // namespace

void bind_attention(nanobind::module_& module) {
  if (PyModule_AddFunctions(module.ptr(), g_methods) != 0) throw PythonError();
}

}  // namespace qkv::python
