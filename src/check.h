// SPDX-License-Identifier: Apache-2.0
// Tier: plan. The checks of arguments that attention() and its gradients share. Nothing is written
// before all checks of a call have passed.
#pragma once
#include <initializer_list>
#include <optional>
#include <span>
#include <string>

#include "call.h"
#include "qkv/attention.h"

namespace qkv {

/// Extents of the outputs of a call. Those of packed sequences have no batch axis, and `out` has its
/// tokens in front.
struct OutputShape {
  std::optional<int64_t> batch;
  int64_t num_heads, n_q, n_kv, head_dim_v;
  int64_t num_keys;  // of column_sums: n_kv, or all keys of packed sequences
};

/// Every function throws Error, "<caller>: what is wrong, got <shapes>".
class Check {
 public:
  explicit Check(const char* caller) : caller_(caller) {}

  [[noreturn]] void refuse(const std::string& text) const;
  /// The last axis is contiguous and there is data. `what` names the tensor, as in "outputs.out".
  void layout(const ConstTensor& t, const char* what) const;
  /// Shape, element type and data.
  void shape(const ConstTensor& t, const char* what, std::span<const int64_t> shape,
             DType dtype) const;
  void shape(const ConstTensor& t, const char* what, std::initializer_list<int64_t> shape,
             DType dtype) const {
    this->shape(t, what, std::span(shape.begin(), shape.size()), dtype);
  }
  /// shape(), and no element twice.
  void output(const ConstTensor& t, const char* what, std::span<const int64_t> shape,
              DType dtype) const;
  void output(const ConstTensor& t, const char* what, std::initializer_list<int64_t> shape,
              DType dtype) const {
    output(t, what, std::span(shape.begin(), shape.size()), dtype);
  }
  /// Checks all that is wanted; returns whether there are forms of the weights.
  bool outputs(const AttentionOutputs& outputs, const OutputShape& shape, DType out_dtype,
               DType arithmetic) const;
  /// Where only full weights are made.
  void no_forms(const AttentionOutputs& outputs) const;
  /// Checks inputs and options; fills all of a call but its outputs. Numbers per head are kept per
  /// thread until the next call.
  Call call(const ConstTensor& q, const ConstTensor& k, const ConstTensor& v,
            const AttentionOptions& options) const;
  /// The same for one sequence of a packed batch: entry `entry` of num_entries of the mask.
  Call call(const ConstTensor& q, const ConstTensor& k, const ConstTensor& v,
            const AttentionOptions& options, int64_t entry, int64_t num_entries) const;

 private:
  void inputs(const ConstTensor& q, const ConstTensor& k, const ConstTensor& v) const;
  bool forms(const AttentionOutputs& outputs, const OutputShape& shape, DType arithmetic) const;
  void per_head(const ConstTensor& t, const char* what, int64_t num_heads) const;
  void options(const AttentionOptions& options, const Call& call) const;

  const char* caller_;
};

}  // namespace qkv
