// SPDX-License-Identifier: Apache-2.0
// Tier: call. merge_states(): two partial results over disjoint keys become one.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "check.h"
#include "element.h"
#include "qkv/attention.h"

namespace qkv {
namespace {

const Check kCheck("merge_states");

void store(const Tensor& t, int64_t offset, double value) {
  switch (t.dtype) {
    case DType::f64:
      static_cast<double*>(t.data)[offset] = value;
      break;
    case DType::bf16:
      static_cast<bf16_t*>(t.data)[offset] = to_bf16(static_cast<float>(value));
      break;
    case DType::f16:
      static_cast<f16_t*>(t.data)[offset] = to_f16(static_cast<float>(value));
      break;
    default:
      static_cast<float*>(t.data)[offset] = static_cast<float>(value);
  }
}

void check_pair(const ConstTensor& out, const ConstTensor& lse, const ConstTensor& like,
                const char* side) {
  bool same = out.rank == like.rank && lse.rank == like.rank - 1;
  for (int a = 0; same && a < like.rank; ++a) {
    same = out.shape[a] == like.shape[a] && (a == like.rank - 1 || lse.shape[a] == like.shape[a]);
  }
  if (!same) {
    kCheck.refuse(
        fmt::format("out{0} must have the shape of out_a, and lse{0} that without the last axis, "
                    "got out {1} and "
                    "lse {2} beside out_a {3}",
                    side, shape_text(out), shape_text(lse), shape_text(like)));
  }
  if (!info(out.dtype).is_float || (lse.dtype != DType::f32 && lse.dtype != DType::f64)) {
    kCheck.refuse(
        fmt::format("out{0} must be floating point and lse{0} f32 or f64, got {1} and {2}", side,
                    name(out.dtype), name(lse.dtype)));
  }
  if ((!out.data && out.num_elements() > 0) || (!lse.data && lse.num_elements() > 0)) {
    kCheck.refuse(fmt::format("out{0} or lse{0} has no data, got {1} and {2}", side,
                              shape_text(out), shape_text(lse)));
  }
}

int64_t row_offset(const ConstTensor& t, int axes, const int64_t* index) {
  int64_t offset = 0;
  for (int a = 0; a < axes; ++a) offset += index[a] * t.stride[a];
  return offset;
}

}  // namespace

void merge_states(ConstTensor out_a, ConstTensor lse_a, ConstTensor out_b, ConstTensor lse_b,
                  Tensor out, Tensor lse) {
  if (out_a.rank < 1)
    kCheck.refuse(fmt::format("out_a needs at least one axis, got {}", shape_text(out_a)));
  check_pair(out_a, lse_a, out_a, "_a");
  check_pair(out_b, lse_b, out_a, "_b");
  ConstTensor as_lse = lse;
  if (!lse) as_lse = lse_a;
  check_pair(out, as_lse, out_a, "");
  const int axes = out_a.rank - 1;
  const int64_t dim = out_a.shape[axes];
  int64_t rows = 1;
  for (int a = 0; a < axes; ++a) rows *= out_a.shape[a];
  int64_t index[4] = {};
  for (int64_t row = 0; row < rows; ++row) {
    const double a = element(lse_a, row_offset(lse_a, axes, index)),
                 b = element(lse_b, row_offset(lse_b, axes, index));
    const double none = -std::numeric_limits<double>::infinity();
    const double top = a == none ? b : b == none ? a : std::max(a, b);
    const double weight_a = a == none ? 0 : std::exp(a - top),
                 weight_b = b == none ? 0 : std::exp(b - top);
    const double total = weight_a + weight_b;
    const int64_t at_a = row_offset(out_a, axes, index), at_b = row_offset(out_b, axes, index);
    const int64_t at = row_offset(out, axes, index);
    for (int64_t d = 0; d < dim; ++d) {
      double sum = 0;
      if (a != none) sum += weight_a * element(out_a, at_a + d * out_a.stride[axes]);
      if (b != none) sum += weight_b * element(out_b, at_b + d * out_b.stride[axes]);
      store(out, at + d * out.stride[axes], total == 0 ? 0 : sum / total);
    }
    if (lse) store(lse, row_offset(lse, axes, index), total == 0 ? none : top + std::log(total));
    for (int a2 = axes - 1; a2 >= 0 && ++index[a2] == out_a.shape[a2]; --a2) index[a2] = 0;
  }
}

}  // namespace qkv
