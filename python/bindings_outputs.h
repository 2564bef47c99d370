// SPDX-License-Identifier: Apache-2.0
// Tier: call. The arrays that an attention function returns, in one order: out, lse, weights, then the
// forms of the weights.
#pragma once
#include <array>
#include <initializer_list>
#include <optional>
#include <utility>
#include <vector>

#include "bindings_array.h"
#include "qkv/attention.h"

namespace qkv::python {

/// Extents of the results; those of packed sequences have no batch axis, and out has its tokens in front.
struct ResultShape {
  std::optional<int64_t> batch;
  int64_t num_heads, n_q, n_kv, head_dim_v;
  int64_t num_keys;  // of column_sums
};

class ResultArrays {
 public:
  /// What the caller asked for; nullptr: not.
  struct Wanted {
    PyObject *lse, *weights, *mean_weights, *weight_rows, *top_k, *column_sums, *entropy;
  };

  /// New arrays of this kind for results of queries of q_dtype.
  ResultArrays(const char* caller, const ArrayKind& kind, DType q_dtype, const ResultShape& shape)
      : caller_(caller),
        kind_(kind),
        out_dtype_(info(q_dtype).is_float ? q_dtype : DType::f32),
        arithmetic_(q_dtype == DType::f64 ? DType::f64 : DType::f32),
        shape_(shape) {}

  /// out is a new array, or the given one, which must not overlap the inputs (with their names).
  void make_out(PyObject* given = nullptr,
                std::initializer_list<std::pair<const Array*, const char*>> inputs = {});
  void make(const Wanted& wanted);
  AttentionOutputs outputs;
  /// out, or a tuple of all that was made. A new reference.
  PyObject* finish();

 private:
  void add(DType dtype, std::initializer_list<int64_t> entry, Tensor* view);
  void read_rows(PyObject* object);

  const char* const caller_;
  const ArrayKind& kind_;
  const DType out_dtype_, arithmetic_;
  const ResultShape shape_;
  Array given_;
  bool is_given_ = false;
  std::vector<int64_t> rows_;
  std::array<Ref, 9> arrays_;
  size_t n_ = 0;
};

}  // namespace qkv::python
