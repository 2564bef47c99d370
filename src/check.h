// SPDX-License-Identifier: Apache-2.0
// Tier: plan. The checks of arguments that attention() and its gradients share. Nothing is written
// before all checks of a call have passed.
#pragma once
#include <initializer_list>
#include <string>

#include "call.h"
#include "qkv/attention.h"

namespace qkv {

/// Every function throws Error, "<caller>: what is wrong, got <shapes>".
class Check {
 public:
  explicit Check(const char* caller) : caller_(caller) {}

  [[noreturn]] void refuse(const std::string& text) const;
  /// The last axis is contiguous and there is data. `what` names the tensor, as in "outputs.out".
  void layout(const ConstTensor& t, const char* what) const;
  /// Shape, element type and data.
  void shape(const ConstTensor& t, const char* what, std::initializer_list<int64_t> shape,
             DType dtype) const;
  /// shape(), and no element twice.
  void output(const ConstTensor& t, const char* what, std::initializer_list<int64_t> shape,
              DType dtype) const;
  /// Checks the forms of the weights; returns whether there are any.
  bool forms(const AttentionOutputs& outputs, const MaskShape& shape, DType arithmetic) const;
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
  void per_head(const ConstTensor& t, const char* what, int64_t num_heads) const;
  void options(const AttentionOptions& options, const Call& call) const;

  const char* caller_;
};

}  // namespace qkv
