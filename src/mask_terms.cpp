// SPDX-License-Identifier: Apache-2.0
// Tier: plan. Small questions of the schedule about a mask, and the broadcasting of tensors over
// the scores.
#include "mask_terms.h"

#include <algorithm>

namespace qkv {

using Term = Mask::Term;
using Kind = Mask::Term::Kind;

ScoreStrides score_strides(const ConstTensor& t) {
  auto stride = [&](int axis) { return axis >= 0 && t.shape[axis] != 1 ? t.stride[axis] : 0; };
  return {stride(t.rank > 2 ? 0 : -1), stride(t.rank > 3 ? 1 : -1), stride(t.rank - 2),
          stride(t.rank - 1)};
}

void check_scores_tensor(const ConstTensor& t, const MaskShape& shape, const char* caller,
                         const char* what) {
  const int64_t scores[4] = {shape.batch, shape.num_heads, shape.n_q, shape.n_kv};
  bool fits = t.rank >= 2;
  for (int axis = 0; axis < t.rank; ++axis) {
    const int score_axis =
        t.rank == 3 && axis == 0 ? 0 : axis + 4 - t.rank;  // 3-D has no axis of heads
    fits &= t.shape[axis] == scores[score_axis] || t.shape[axis] == 1;
  }
  if (fits) return;
  throw Error(std::string(caller) + ": " + what +
              " does not broadcast over [batch, num_heads, n_q, n_kv], got " + what + " " +
              shape_text(t) + " and scores " + shape_text(shape));
}

ConstTensor narrow_scores(ConstTensor t, const MaskShape& array, int64_t first, int64_t n,
                          int64_t keys) {
  const int rows = t.rank - 2, columns = t.rank - 1;
  if (t.shape[rows] == array.n_q && t.shape[rows] != 1) {
    if (t.data && first != 0)
      t.data = static_cast<const char*>(t.data) + first * t.stride[rows] * size_bytes(t.dtype);
    t.shape[rows] = n;
  }
  if (t.shape[columns] == array.n_kv && t.shape[columns] != 1) t.shape[columns] = keys;
  return t;
}

Mask Term::narrowed(const Mask& mask, const MaskShape& array, int64_t first, int64_t n,
                    int64_t keys) {
  if (!mask.has_dense()) return mask;
  auto terms = std::make_shared<std::vector<Term>>(mask.terms().begin(), mask.terms().end());
  for (Term& t : *terms) {
    if (t.kind != Kind::dense) continue;
    t.dense = narrow_scores(t.dense, array, first, n, keys);
    t.tiles = {};
  }
  Mask narrow;
  narrow.terms_ = std::move(terms);
  return narrow;
}

std::string shape_text(const MaskShape& shape) {
  const int64_t scores[4] = {shape.batch, shape.num_heads, shape.n_q, shape.n_kv};
  return shape_text(std::span<const int64_t>(scores));
}

int64_t keys_of_entry(const Mask& mask, const MaskShape& shape, int64_t b) {
  for (const Term& t : mask.terms())
    if (t.kind == Kind::lengths)
      return std::clamp<int64_t>((*t.lengths)[static_cast<size_t>(b)], 0, shape.n_kv);
  return shape.n_kv;
}

int64_t aligned_keys(const Mask& mask, const MaskShape& shape, int64_t b) {
  return is_aligned_by_length(mask) ? keys_of_entry(mask, shape, b) : shape.n_kv;
}

bool is_aligned_by_length(const Mask& mask) {
  bool has_lengths = false, is_causal = false;
  for (const Term& t : mask.terms()) {
    has_lengths |= t.kind == Kind::lengths;
    is_causal |= t.kind == Kind::causal && t.alignment == Alignment::bottom_right;
  }
  return has_lengths && is_causal;
}

int64_t first_position(const Mask& mask, const MaskShape& shape, int64_t b) {
  bool has_top_left = false, has_bottom_right = false;
  for (const Term& t : mask.terms())
    if (t.is_aligned())
      (t.alignment == Alignment::top_left ? has_top_left : has_bottom_right) = true;
  if (has_top_left && !has_bottom_right) return 0;
  return aligned_keys(mask, shape, b) - shape.n_q;
}

const MaskDocuments* scattered_documents(const Mask& mask) {
  for (const Term& t : mask.terms())
    if (t.kind == Kind::documents && t.documents->is_scattered) return t.documents.get();
  return nullptr;
}

}  // namespace qkv
