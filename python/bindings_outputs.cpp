// SPDX-License-Identifier: Apache-2.0
// Tier: call. See bindings_outputs.h.
#include "bindings_outputs.h"

#include <algorithm>
#include <string>

#include "bindings_args.h"

namespace qkv::python {
namespace {

// First byte, and the one behind the last.
std::pair<intptr_t, intptr_t> extent(const ConstTensor& t) {
  auto lo = reinterpret_cast<intptr_t>(t.data), hi = lo;
  for (int a = 0; a < t.rank; ++a) {
    const int64_t reach = (t.shape[a] - 1) * t.stride[a] * size_bytes(t.dtype);
    (reach < 0 ? lo : hi) += reach;
  }
  return {lo, hi + size_bytes(t.dtype)};
}

bool overlap(const ConstTensor& a, const ConstTensor& b) {
  if (a.num_elements() == 0 || b.num_elements() == 0) return false;
  const auto [a_lo, a_hi] = extent(a);
  const auto [b_lo, b_hi] = extent(b);
  return a_lo < b_hi && b_lo < a_hi;
}

}  // namespace

void ResultArrays::add(DType dtype, std::initializer_list<int64_t> entry, Tensor* view) {
  int64_t shape[4] = {shape_.batch.value_or(0)};
  std::copy(entry.begin(), entry.end(), shape + 1);
  const std::span<const int64_t> all(shape, entry.size() + 1);
  arrays_[n_++] = make_array(kind_, dtype, shape_.batch ? all : all.subspan(1), view);
}

// Any sequence of integers: a list, a range, an array.
void ResultArrays::read_rows(PyObject* object) {
  const Ref sequence =
      Ref::checked(PySequence_Fast(object, "weight_rows must be a sequence of integers"));
  const Py_ssize_t n = PySequence_Fast_GET_SIZE(sequence.get());
  for (Py_ssize_t r = 0; r < n; ++r)
    rows_.push_back(to_int(PySequence_Fast_GET_ITEM(sequence.get(), r), 0));
  rows_.reserve(1);  // data() of no rows is not nullptr
}

void ResultArrays::make_out(PyObject* given,
                            std::initializer_list<std::pair<const Array*, const char*>> inputs) {
  const ResultShape& s = shape_;
  if (!given) {
    s.batch ? add(out_dtype_, {s.num_heads, s.n_q, s.head_dim_v}, &outputs.out)
            : add(out_dtype_, {s.n_q, s.num_heads, s.head_dim_v}, &outputs.out);
    return;
  }
  given_.open(given, caller_, "out", Array::Access::write);
  is_given_ = true;
  outputs.out = given_.writable_view();
  for (const auto& [input, name] : inputs) {
    if (overlap(outputs.out, input->view()))
      throw Error(std::string(caller_) + ": out must not overlap " + name + ", got " +
                  shape_text(outputs.out) + " and " + shape_text(input->view()));
  }
  arrays_[n_++] = Ref::borrow(given);
}

void ResultArrays::make(const Wanted& wanted) {
  const ResultShape& s = shape_;
  if (to_bool(wanted.lse)) add(arithmetic_, {s.num_heads, s.n_q}, &outputs.lse);
  if (to_bool(wanted.weights)) add(arithmetic_, {s.num_heads, s.n_q, s.n_kv}, &outputs.weights);
  if (to_bool(wanted.mean_weights)) add(arithmetic_, {s.n_q, s.n_kv}, &outputs.mean_weights);
  if (wanted.weight_rows) {
    read_rows(wanted.weight_rows);
    const auto n_rows = static_cast<int64_t>(rows_.size());
    outputs.weight_rows = ConstTensor(rows_.data(), {n_rows});
    add(arithmetic_, {s.num_heads, n_rows, s.n_kv}, &outputs.row_weights);
  }
  if (wanted.top_k) {
    const int64_t k = to_int(wanted.top_k, 0);
    if (k < 0)
      throw Error(std::string(caller_) + ": top_k must not be negative, got " + std::to_string(k));
    add(arithmetic_, {s.num_heads, s.n_q, k}, &outputs.top_weights);
    add(DType::i64, {s.num_heads, s.n_q, k}, &outputs.top_keys);
  }
  if (to_bool(wanted.column_sums))
    add(arithmetic_, {s.num_heads, s.num_keys}, &outputs.column_sums);
  if (to_bool(wanted.entropy)) add(arithmetic_, {s.num_heads, s.n_q}, &outputs.entropy);
}

PyObject* ResultArrays::finish() {
  for (size_t i = is_given_ ? 1 : 0; i < n_; ++i)
    arrays_[i] = finish_array(kind_, std::move(arrays_[i]));
  if (n_ == 1) return arrays_[0].release();
  Ref tuple = Ref::checked(PyTuple_New(static_cast<Py_ssize_t>(n_)));
  for (size_t i = 0; i < n_; ++i)
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), arrays_[i].release());
  return tuple.release();
}

}  // namespace qkv::python
