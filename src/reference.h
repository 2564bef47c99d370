// SPDX-License-Identifier: Apache-2.0
// Tier: call. The readable definition of attention and of its gradients: plain loops in double.
// Everything fast in this library is measured against these functions. Arguments must be valid
// (attention() says what that means).
#pragma once
#include <cstdint>
#include <vector>

#include "qkv/attention.h"

namespace qkv::reference {

/// Row-major, in double.
struct Forward {
  std::vector<double> out;      ///< [batch, num_heads, n_q, head_dim_v]
  std::vector<double> lse;      ///< [batch, num_heads, n_q]
  std::vector<double> weights;  ///< [batch, num_heads, n_q, n_kv], before dropout
};
Forward forward(const ConstTensor& q, const ConstTensor& k, const ConstTensor& v,
                const AttentionOptions& options = {});

/// The forms of the weights, each made of one full row after another. Row-major, in double.
struct WeightForms {
  std::vector<double> mean_weights;  ///< [batch, n_q, n_kv]
  std::vector<double> row_weights;   ///< [batch, num_heads, n_rows, n_kv]
  std::vector<double> top_weights;   ///< [batch, num_heads, n_q, top_k]
  std::vector<int64_t> top_keys;     ///< as top_weights
  std::vector<double> column_sums;   ///< [batch, num_heads, n_kv]
  std::vector<double> entropy;       ///< [batch, num_heads, n_q]
};
WeightForms weight_forms(const ConstTensor& q, const ConstTensor& k, const ConstTensor& v,
                         const AttentionOptions& options, const std::vector<int64_t>& weight_rows,
                         int64_t top_k);

/// Gradients of sum(dout * out) + sum(dlse * lse). Row-major, in double; empty where the input is
/// not given.
struct Backward {
  std::vector<double> dq, dk, dv;     ///< as q, k, v
  std::vector<double> dbias;          ///< as the bias: summed over the axes that it broadcasts
  std::vector<double> dsinks;         ///< [num_heads]
  std::vector<double> dalibi_slopes;  ///< [num_heads]
  double dscale = 0;
};
/// dout [batch, num_heads, n_q, head_dim_v]; dlse [batch, num_heads, n_q] or not given.
Backward backward(const ConstTensor& q, const ConstTensor& k, const ConstTensor& v,
                  const ConstTensor& dout, const ConstTensor& dlse = {},
                  const AttentionOptions& options = {});

/// The gradient with respect to q, k, v and dout of
/// sum(ddq * dq) + sum(ddk * dk) + sum(ddv * dv), where dq, dk and dv are backward()'s for a dlse of
/// 0. Row-major, in double. ddq, ddk, ddv are as q, k, v or not given (0).
struct DoubleBackward {
  std::vector<double> dq, dk, dv, ddout;
};
DoubleBackward double_backward(const ConstTensor& q, const ConstTensor& k, const ConstTensor& v,
                               const ConstTensor& dout, const ConstTensor& ddq,
                               const ConstTensor& ddk, const ConstTensor& ddv,
                               const AttentionOptions& options = {});

}  // namespace qkv::reference
