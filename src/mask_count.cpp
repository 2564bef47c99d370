// SPDX-License-Identifier: Apache-2.0
// Tier: plan. Counts the visible pairs of a mask. Between a few cuts the range of every row is
// linear in the row, so the sum over rows needs only the cuts; chunks and documents are summed row
// by row; dense terms and scattered documents pair by pair.
#include <algorithm>
#include <limits>

#include "mask_terms.h"

namespace qkv {
namespace {

using Term = Mask::Term;
using Kind = Mask::Term::Kind;
__extension__ using Wide = unsigned __int128;

constexpr Wide kLargest = std::numeric_limits<int64_t>::max();

[[noreturn]] void fail_too_large(const MaskShape& shape) {
  throw Error("Mask::count_visible: the number of pairs does not fit 64 bits, got scores " +
              shape_text(shape));
}

Wide width(const Mask& mask, const MaskShape& shape, int64_t b, int64_t i) {
  RowRange range;
  mask.row_ranges(shape, b, i, 1, &range);
  return static_cast<Wide>(range.hi - range.lo);
}

// Rows between which lo and hi of a row change their form. A bound is a constant or p plus a
// constant; the form changes where two of them cross.
std::vector<int64_t> cuts(const Mask& mask, const MaskShape& shape, int64_t b) {
  const int64_t n_keys = keys_of_entry(mask, shape, b), aligned = aligned_keys(mask, shape, b);
  std::vector<int64_t> constants = {0, n_keys};
  std::vector<int64_t> moving;  // value in row 0
  for (const Term& t : mask.terms()) {
    if (!t.is_aligned()) continue;
    const int64_t p0 = t.alignment == Alignment::top_left ? 0 : aligned - shape.n_q;
    moving.push_back(p0);
    int64_t bound;
    if (t.kind == Kind::window && t.a > 0 && !__builtin_sub_overflow(p0, t.a, &bound))
      moving.push_back(bound);
    if (t.kind == Kind::window && t.b > 0 && !__builtin_add_overflow(p0, t.b, &bound))
      moving.push_back(bound);
    if (t.kind == Kind::prefix) constants.push_back(std::min(t.a, n_keys));
  }
  std::vector<int64_t> rows = {0, shape.n_q};
  for (int64_t constant : constants)
    for (int64_t value : moving) {
      int64_t row;
      if (__builtin_sub_overflow(constant, value, &row)) continue;  // further away than any row
      row = std::clamp<int64_t>(row, 0, shape.n_q);
      rows.insert(rows.end(),
                  {std::max<int64_t>(row - 1, 0), row, std::min(row, shape.n_q - 1) + 1});
    }
  std::sort(rows.begin(), rows.end());
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  return rows;
}

// Pairs inside the ranges of one batch entry and head, where these are all.
Wide count_ranges(const Mask& mask, const MaskShape& shape, int64_t b) {
  const bool by_row = std::any_of(mask.terms().begin(), mask.terms().end(), [](const Term& t) {
    return t.kind == Kind::chunk || t.kind == Kind::documents;
  });
  Wide sum = 0;
  if (by_row) {
    for (int64_t i = 0; i < shape.n_q; ++i) sum += width(mask, shape, b, i);
    return sum;
  }
  const std::vector<int64_t> rows = cuts(mask, shape, b);
  for (size_t c = 0; c + 1 < rows.size(); ++c) {
    const Wide ends = width(mask, shape, b, rows[c]) + width(mask, shape, b, rows[c + 1] - 1);
    sum += ends * static_cast<Wide>(rows[c + 1] - rows[c]) / 2;
  }
  return sum;
}

Wide count_pairs(const Mask& mask, const MaskShape& shape, int64_t b, int64_t h) {
  Wide sum = 0;
  for (int64_t i = 0; i < shape.n_q; ++i) {
    RowRange range;
    mask.row_ranges(shape, b, i, 1, &range);
    for (int64_t j = range.lo; j < range.hi; ++j) sum += visible_in_range(mask, shape, b, h, i, j);
  }
  return sum;
}

}  // namespace

int64_t Mask::count_visible(const MaskShape& shape) const {
  check(shape, "Mask::count_visible");
  bool differs_by_entry = false, differs_by_head = false,
       needs_pairs = scattered_documents(*this) != nullptr;
  for (const Term& t : terms()) {
    differs_by_entry |= t.kind == Kind::lengths ||
                        (t.kind == Kind::documents && t.documents->per_batch()) ||
                        (t.kind == Kind::dense && score_strides(t.dense).batch != 0);
    differs_by_head |= t.kind == Kind::dense && score_strides(t.dense).head != 0;
    needs_pairs |= t.kind == Kind::dense;
  }
  Wide sum = 0;
  for (int64_t b = 0; b < (differs_by_entry ? shape.batch : std::min<int64_t>(shape.batch, 1)); ++b)
    for (int64_t h = 0;
         h < (differs_by_head ? shape.num_heads : std::min<int64_t>(shape.num_heads, 1)); ++h) {
      const Wide pairs =
          needs_pairs ? count_pairs(*this, shape, b, h) : count_ranges(*this, shape, b);
      const Wide times = static_cast<Wide>(differs_by_entry ? 1 : shape.batch) *
                         static_cast<Wide>(differs_by_head ? 1 : shape.num_heads);
      Wide product;
      const bool is_too_large =
          __builtin_mul_overflow(pairs, times, &product) || product > kLargest - sum;
      if (is_too_large) fail_too_large(shape);
      sum += product;
    }
  return static_cast<int64_t>(sum);
}

}  // namespace qkv
