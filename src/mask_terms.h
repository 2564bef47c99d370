// SPDX-License-Identifier: Apache-2.0
// Tier: plan. What the schedule reads of a mask. A mask is a list of terms that must all agree;
// row_ranges() has already handled every kind but two: dense arrays, and documents whose keys are
// scattered. Only these remain for the kernel.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "qkv/mask.h"

namespace qkv {

/// Document ids of queries and keys as small codes: key j is visible to query i if their codes are
/// equal. An id that occurs on one side only has a code that matches nothing (kNoKey, kNoQuery).
/// Made by mask_documents.cpp.
struct MaskDocuments {
  static constexpr int32_t kNoKey = -1;    // of a query without a key
  static constexpr int32_t kNoQuery = -2;  // of a key without a query

  int64_t n_q = 0, n_kv = 0;
  int64_t batch = 1;  // entries of the arrays that have one per batch entry
  bool q_per_batch = false, kv_per_batch = false;
  std::vector<int32_t> q_codes;   // [batch or 1, n_q]
  std::vector<int32_t> kv_codes;  // [batch or 1, n_kv]
  std::vector<RowRange>
      hulls;  // [batch or 1, n_q]: from the first to the last key of the row's document
  bool is_scattered =
      false;  // some hull holds keys of another document: the codes must be compared

  bool per_batch() const { return q_per_batch || kv_per_batch; }
  const int32_t* q(int64_t b) const { return q_codes.data() + (q_per_batch ? b * n_q : 0); }
  const int32_t* kv(int64_t b) const { return kv_codes.data() + (kv_per_batch ? b * n_kv : 0); }
  const RowRange* hull(int64_t b) const { return hulls.data() + (per_batch() ? b * n_q : 0); }
};

/// Throws Error if the ids are not integers of one or two axes or their batch entries differ.
std::shared_ptr<const MaskDocuments> make_documents(const ConstTensor& q_ids,
                                                    const ConstTensor& kv_ids);
/// Visible in both. Throws Error if the extents differ.
std::shared_ptr<const MaskDocuments> intersect_documents(const MaskDocuments& a,
                                                         const MaskDocuments& b);

struct DenseTiles;  // dense_tiles.h

/// A mask holds at most one term of kind lengths and one of kind documents (operator& merges them).
struct Mask::Term {
  enum class Kind : uint8_t { causal, window, prefix, chunk, lengths, documents, dense };
  Kind kind;
  Alignment alignment = Alignment::bottom_right;  // of causal, window, prefix and chunk
  int64_t a = 0;  // window: left, -1 unbounded; prefix: n; chunk: size
  int64_t b = 0;  // window: right, -1 unbounded
  std::shared_ptr<const std::vector<int64_t>> lengths = {};
  std::shared_ptr<const MaskDocuments> documents = {};
  ConstTensor dense = {};                        // boolean or floating point, 2 to 4 axes
  std::shared_ptr<const DenseTiles> tiles = {};  // of dense, if the mask was prepared

  bool is_aligned() const { return kind <= Kind::chunk; }

  /// The mask of one batch entry whose queries and keys are fewer than those of dense arrays: of an
  /// array with n_q rows only rows [first, first + n), of one with n_kv keys only the first keys.
  static Mask narrowed(const Mask& mask, const MaskShape& array, int64_t first, int64_t n,
                       int64_t keys);
};

/// Element strides of a tensor that broadcasts over scores [batch, num_heads, n_q, n_kv]; 0 on an
/// axis it does not have. 2-D is [n_q, n_kv], 3-D is [batch, n_q, n_kv].
struct ScoreStrides {
  int64_t batch, head, query, key;
  int64_t offset(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return b * batch + h * head + i * query + j * key;
  }
};
ScoreStrides score_strides(const ConstTensor& t);
/// Mask::Term::narrowed() of one array.
ConstTensor narrow_scores(ConstTensor t, const MaskShape& array, int64_t first, int64_t n,
                          int64_t keys);
/// Throws Error unless t broadcasts over the scores. `what` names the tensor in the text: "bias",
/// "mask".
void check_scores_tensor(const ConstTensor& t, const MaskShape& shape, const char* caller,
                         const char* what);

/// "[batch, num_heads, n_q, n_kv]" for errors.
std::string shape_text(const MaskShape& shape);

/// Keys of batch entry b: its length if the mask has lengths, else n_kv.
int64_t keys_of_entry(const Mask& mask, const MaskShape& shape, int64_t b);
/// Position p of query 0 of batch entry b for ALiBi: bottom_right unless the mask names top_left alone.
int64_t first_position(const Mask& mask, const MaskShape& shape, int64_t b);
/// n_kv, or the entry's own length if bottom_right is counted from it (is_aligned_by_length).
int64_t aligned_keys(const Mask& mask, const MaskShape& shape, int64_t b);
/// True for lengths together with causal_bottom_right: each entry is a sequence of its own length. Queries with p < 0 are
/// then empty rows.
bool is_aligned_by_length(const Mask& mask);
/// Whether the terms that row_ranges() leaves open show key j of a row's range.
bool visible_in_range(const Mask& mask, const MaskShape& shape, int64_t b, int64_t h, int64_t i,
                      int64_t j);
/// The documents the kernel must compare inside the row ranges, or nullptr.
const MaskDocuments* scattered_documents(const Mask& mask);

}  // namespace qkv
