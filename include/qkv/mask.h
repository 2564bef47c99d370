// SPDX-License-Identifier: Apache-2.0
// Tier: call. Mask: which keys a query may see. Range kinds become one visible range [lo, hi) per row; dense arrays and
// scattered documents are terms on top of it. Masks combine with &.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "qkv/tensor.h"

namespace qkv {

/// Where the last query stands. top_left: p = i. bottom_right: p = i + n_kv - n_q (the last query sees the last key).
enum class Alignment : uint8_t { top_left, bottom_right };

/// Half-open range of visible keys of one query row; empty if lo >= hi.
struct RowRange {
  int64_t lo;
  int64_t hi;
};

/// The extents a mask is applied to.
struct MaskShape {
  int64_t batch, num_heads, n_q, n_kv;
};

/// An immutable value; copying shares. p is the absolute position of query i under the alignment named.
///
///   kind                   key j is visible to query i if           picture (n_q 4, n_kv 6; x = visible)
///   full                   always
///   causal_top_left        j <= i                                   x.....  xx....  xxx...  xxxx..
///   causal_bottom_right    j <= p, p = i + n_kv - n_q               xxx...  xxxx..  xxxxx.  xxxxxx
///   window(1, 0)           p - left <= j <= p + right               .xx...  ..xx..  ...xx.  ....xx
///   prefix(4)              j < n or j <= p                          xxxx..  xxxx..  xxxxx.  xxxxxx
///   chunk(3)               floor(j / size) == floor(p / size)       xxx...  ...xxx  ...xxx  ...xxx
///   lengths                j < kv_lengths[b]
///   documents              q_ids[i] == kv_ids[j]
///   dense                  array[b, h, i, j] is true (boolean), or an additive array: -inf hides, other values are a bias
///
/// lengths alone hide padding. lengths together with causal_bottom_right: each entry is a sequence of its own length, so
/// p = i + kv_lengths[b] - n_q for every bottom_right kind of the mask; rows with p < 0 see nothing.
class QKV_EXPORT Mask {
 public:
  Mask() = default;  ///< full
  static Mask full();
  static Mask causal_top_left();
  static Mask causal_bottom_right();
  /// -1 = unbounded on that side; other negative values are refused.
  static Mask window(int64_t left, int64_t right, Alignment alignment = Alignment::bottom_right);
  static Mask prefix(int64_t n);
  static Mask chunk(int64_t size);
  /// One length per batch entry, 0 <= length <= n_kv (checked when the mask is used). The values are copied.
  static Mask lengths(std::span<const int64_t> kv_lengths);
  /// ids are [n] (shared by the batch) or [batch, n], int32 or int64. The values are copied.
  static Mask documents(ConstTensor q_ids, ConstTensor kv_ids);
  /// Boolean (true = attend) or additive (floating point); 2-D [n_q, n_kv], 3-D [batch, n_q, n_kv] or 4-D, extents may be 1
  /// (broadcast) and strides 0. The array is NOT copied and must outlive every use of the mask.
  static Mask dense(ConstTensor array);

  friend QKV_EXPORT Mask operator&(const Mask& a, const Mask& b);

  /// The same mask with a table of what its dense arrays hide, so that calls that use it again do not
  /// read the arrays again to find empty and full blocks. The arrays must not change afterwards.
  Mask prepared() const;

  bool is_full() const { return !terms_ || terms_->empty(); }
  bool has_dense() const;

  /// Throws Error if the mask does not fit the extents.
  void check(const MaskShape& shape, const char* caller) const;
  /// The same when only batch entry `entry` has these extents (packed sequences).
  void check(const MaskShape& shape, const char* caller, int64_t entry) const;
  /// The visible ranges of rows [i0, i0 + n) of batch entry b, before dense terms and scattered documents.
  void row_ranges(const MaskShape& shape, int64_t b, int64_t i0, int64_t n, RowRange* out) const;
  /// True if query i of head h may see key j (slow; the definition that everything else is tested against).
  bool visible(const MaskShape& shape, int64_t b, int64_t h, int64_t i, int64_t j) const;
  /// Number of (query, key) pairs that are visible, summed over batch and heads.
  int64_t count_visible(const MaskShape& shape) const;
  /// Boolean array [n_q, n_kv] of batch entry b and head h, row-major.
  std::vector<uint8_t> to_dense(const MaskShape& shape, int64_t b = 0, int64_t h = 0) const;
  /// A picture in text (x and .) or SVG of batch entry b, head h.
  std::string to_text(const MaskShape& shape, int64_t b = 0, int64_t h = 0) const;
  std::string to_svg(const MaskShape& shape, int64_t b = 0, int64_t h = 0) const;
  /// "causal_bottom_right & lengths(...)"
  std::string name() const;

  struct Term;  // mask_terms.h: what the schedule reads
  std::span<const Term> terms() const;

 private:
  explicit Mask(Term term);
  std::shared_ptr<const std::vector<Term>> terms_;
};

}  // namespace qkv
