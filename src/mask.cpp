// SPDX-License-Identifier: Apache-2.0
// Tier: call. Masks: factories, checks, the visible range of each row, and the predicate that
// defines them. mask_documents.cpp encodes ids, mask_picture.cpp draws. The schedule reads
// mask_terms.h.
#include "qkv/mask.h"

#include <algorithm>
#include <limits>

#include "element.h"
#include "mask_terms.h"

namespace qkv {
namespace {

using Term = Mask::Term;
using Kind = Mask::Term::Kind;

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
constexpr int64_t kMin = std::numeric_limits<int64_t>::min();

int64_t saturating_add(int64_t a, int64_t b) {
  int64_t sum;
  return __builtin_add_overflow(a, b, &sum) ? (b > 0 ? kMax : kMin) : sum;
}

int64_t saturating_sub(int64_t a, int64_t b) {
  int64_t difference;
  return __builtin_sub_overflow(a, b, &difference) ? (b > 0 ? kMin : kMax) : difference;
}

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }

[[noreturn]] void fail(const char* caller, const std::string& what) {
  throw Error(std::string(caller) + ": " + what);
}

// Position of query 0. aligned: see aligned_keys(). This cannot overflow, nor can adding a row index.
int64_t first(const Term& t, const MaskShape& shape, int64_t aligned) {
  return t.alignment == Alignment::top_left ? 0 : aligned - shape.n_q;
}

// The extents of arrays that the mask holds, in constant time: what keeps reads in bounds.
void check_extents(const Term& t, const MaskShape& shape, const char* caller) {
  if (t.kind == Kind::lengths && static_cast<int64_t>(t.lengths->size()) != shape.batch)
    fail(caller, "mask lengths do not fit the batch, got lengths [" +
                     std::to_string(t.lengths->size()) + "] and scores " + shape_text(shape));
  if (t.kind == Kind::documents) {
    const MaskDocuments& d = *t.documents;
    auto ids = [&](bool per_batch, int64_t n) {
      const int64_t extents[2] = {d.batch, n};
      return shape_text(std::span(extents).subspan(per_batch ? 0 : 1));
    };
    if (d.n_q != shape.n_q || d.n_kv != shape.n_kv || (d.per_batch() && d.batch != shape.batch))
      fail(caller, "mask documents do not fit, got q_ids " + ids(d.q_per_batch, d.n_q) +
                       ", kv_ids " + ids(d.kv_per_batch, d.n_kv) + " and scores " +
                       shape_text(shape));
  }
  if (t.kind == Kind::dense) check_scores_tensor(t.dense, shape, caller, "mask");
}

bool is_hidden(const ConstTensor& dense, int64_t offset) {
  const double x = element(dense, offset);
  return dense.dtype == DType::boolean ? x == 0 : x == -std::numeric_limits<double>::infinity();
}

// The definition of one term.
bool sees(const Term& t, const MaskShape& shape, int64_t aligned, int64_t b, int64_t h, int64_t i,
          int64_t j) {
  const int64_t p = i + first(t, shape, aligned);
  switch (t.kind) {
    case Kind::causal:
      return j <= p;
    case Kind::window:
      return (t.a < 0 || j >= saturating_sub(p, t.a)) && (t.b < 0 || j <= saturating_add(p, t.b));
    case Kind::prefix:
      return j < t.a || j <= p;
    case Kind::chunk:
      return floor_div(j, t.a) == floor_div(p, t.a);
    case Kind::lengths:
      return j < (*t.lengths)[static_cast<size_t>(b)];
    case Kind::documents:
      return t.documents->q(b)[i] == t.documents->kv(b)[j];
    case Kind::dense:
      return !is_hidden(t.dense, score_strides(t.dense).offset(b, h, i, j));
  }
  return false;
}

// out[r] = out[r] and what the term shows to row i0 + r. Dense terms and scattered documents are
// left for the caller.
void intersect(const Term& t, const MaskShape& shape, int64_t aligned, int64_t b, int64_t i0,
               int64_t n, RowRange* out) {
  const int64_t p0 = i0 + first(t, shape, aligned);
  switch (t.kind) {
    case Kind::causal:
      for (int64_t r = 0; r < n; ++r) out[r].hi = std::min(out[r].hi, p0 + r + 1);
      break;
    case Kind::window:
      if (t.a >= 0)
        for (int64_t r = 0; r < n; ++r)
          out[r].lo = std::max(out[r].lo, saturating_sub(p0 + r, t.a));
      if (t.b >= 0 && t.b < kMax)
        for (int64_t r = 0; r < n; ++r)
          out[r].hi = std::min(out[r].hi, saturating_add(p0 + r, t.b + 1));
      break;
    case Kind::prefix:
      for (int64_t r = 0; r < n; ++r) out[r].hi = std::min(out[r].hi, std::max(t.a, p0 + r + 1));
      break;
    case Kind::chunk:
      for (int64_t r = 0; r < n; ++r) {
        const int64_t p = p0 + r;
        const int64_t lo = p < 0 ? kMax : p / t.a * t.a;  // a chunk before key 0 is empty
        out[r].lo = std::max(out[r].lo, lo);
        out[r].hi = std::min(out[r].hi, saturating_add(lo, t.a));
      }
      break;
    case Kind::documents: {
      const RowRange* hull = t.documents->hull(b) + i0;
      for (int64_t r = 0; r < n; ++r) {
        out[r].lo = std::max(out[r].lo, hull[r].lo);
        out[r].hi = std::min(out[r].hi, hull[r].hi);
      }
      break;
    }
    case Kind::lengths:  // where the ranges begin
    case Kind::dense:
      break;
  }
}

}  // namespace

Mask::Mask(Term term) : terms_(std::make_shared<const std::vector<Term>>(1, std::move(term))) {}

Mask Mask::full() { return {}; }

Mask Mask::causal_top_left() {
  static const Mask mask(Term{.kind = Kind::causal, .alignment = Alignment::top_left});
  return mask;
}

Mask Mask::causal_bottom_right() {
  static const Mask mask(Term{.kind = Kind::causal});
  return mask;
}

Mask Mask::window(int64_t left, int64_t right, Alignment alignment) {
  if (left < -1 || right < -1)
    throw Error("Mask::window: a side is -1 (unbounded) or more, got left " + std::to_string(left) +
                " and right " + std::to_string(right));
  return Mask(Term{.kind = Kind::window, .alignment = alignment, .a = left, .b = right});
}

Mask Mask::prefix(int64_t n) {
  if (n < 0) throw Error("Mask::prefix: n is negative, got " + std::to_string(n));
  return Mask(Term{.kind = Kind::prefix, .a = n});
}

Mask Mask::chunk(int64_t size) {
  if (size < 1) throw Error("Mask::chunk: size must be positive, got " + std::to_string(size));
  return Mask(Term{.kind = Kind::chunk, .a = size});
}

Mask Mask::lengths(std::span<const int64_t> kv_lengths) {
  auto values = std::make_shared<const std::vector<int64_t>>(kv_lengths.begin(), kv_lengths.end());
  return Mask(Term{.kind = Kind::lengths, .lengths = std::move(values)});
}

Mask Mask::documents(ConstTensor q_ids, ConstTensor kv_ids) {
  return Mask(Term{.kind = Kind::documents, .documents = make_documents(q_ids, kv_ids)});
}

Mask Mask::dense(ConstTensor array) {
  if (array.dtype != DType::boolean && !info(array.dtype).is_float)
    throw Error(
        "Mask::dense: an array is boolean (true = attend) or additive floating point, got " +
        std::string(qkv::name(array.dtype)) + " " + shape_text(array));
  if (array.rank < 2)
    throw Error("Mask::dense: an array has 2, 3 or 4 axes, got " + shape_text(array));
  if (!array.data && array.num_elements() > 0)
    throw Error("Mask::dense: no data, got " + shape_text(array));
  return Mask(Term{.kind = Kind::dense, .dense = array});
}

Mask operator&(const Mask& a, const Mask& b) {
  if (a.is_full()) return b;
  if (b.is_full()) return a;
  std::vector<Term> terms(a.terms().begin(), a.terms().end());
  for (const Term& t : b.terms()) {
    auto same = std::find_if(terms.begin(), terms.end(),
                             [&](const Term& other) { return other.kind == t.kind; });
    if (same != terms.end() && t.kind == Kind::lengths) {
      if (same->lengths->size() != t.lengths->size())
        throw Error("Mask &: lengths differ in batch, got lengths [" +
                    std::to_string(same->lengths->size()) + "] and lengths [" +
                    std::to_string(t.lengths->size()) + "]");
      std::vector<int64_t> shorter = *same->lengths;
      for (size_t e = 0; e < shorter.size(); ++e)
        shorter[e] = std::min(shorter[e], (*t.lengths)[e]);
      same->lengths = std::make_shared<const std::vector<int64_t>>(std::move(shorter));
    } else if (same != terms.end() && t.kind == Kind::documents) {
      same->documents = intersect_documents(*same->documents, *t.documents);
    } else {
      terms.push_back(t);
    }
  }
  Mask both;
  both.terms_ = std::make_shared<const std::vector<Term>>(std::move(terms));
  return both;
}

std::span<const Mask::Term> Mask::terms() const {
  return terms_ ? std::span<const Term>(*terms_) : std::span<const Term>();
}

bool Mask::has_dense() const {
  return std::any_of(terms().begin(), terms().end(),
                     [](const Term& t) { return t.kind == Kind::dense; });
}

static void check_length(int64_t length, const MaskShape& shape, const char* caller) {
  if (length < 0 || length > shape.n_kv)
    fail(caller, "a mask length is not in [0, n_kv], got " + std::to_string(length) +
                     " and scores " + shape_text(shape));
}

void Mask::check(const MaskShape& shape, const char* caller) const {
  for (const Term& t : terms()) {
    check_extents(t, shape, caller);
    if (t.kind == Kind::lengths)
      for (int64_t length : *t.lengths) check_length(length, shape, caller);
  }
}

void Mask::check(const MaskShape& shape, const char* caller, int64_t entry) const {
  for (const Term& t : terms()) {
    check_extents(t, shape, caller);
    if (t.kind == Kind::lengths)
      check_length((*t.lengths)[static_cast<size_t>(entry)], shape, caller);
  }
}

void Mask::row_ranges(const MaskShape& shape, int64_t b, int64_t i0, int64_t n,
                      RowRange* out) const {
  if (b < 0 || b >= shape.batch || i0 < 0 || n < 0 || n > shape.n_q - i0)
    fail("Mask::row_ranges", "rows are out of range, got batch entry " + std::to_string(b) +
                                 ", rows [" + std::to_string(i0) + ", " + std::to_string(i0) +
                                 " + " + std::to_string(n) + ") and scores " + shape_text(shape));
  for (const Term& t : terms()) check_extents(t, shape, "Mask::row_ranges");
  const int64_t aligned = aligned_keys(*this, shape, b);
  std::fill(out, out + n, RowRange{0, keys_of_entry(*this, shape, b)});
  for (const Term& t : terms()) intersect(t, shape, aligned, b, i0, n, out);

  if (is_aligned_by_length(*this)) {
    const int64_t n_before = std::clamp<int64_t>(shape.n_q - aligned - i0, 0, n);  // p < 0
    std::fill(out, out + n_before, RowRange{0, 0});
  }
  for (int64_t r = 0; r < n; ++r)
    if (out[r].lo >= out[r].hi) out[r] = {0, 0};
}

bool Mask::visible(const MaskShape& shape, int64_t b, int64_t h, int64_t i, int64_t j) const {
  for (const Term& t : terms()) check_extents(t, shape, "Mask::visible");
  const int64_t aligned = aligned_keys(*this, shape, b);
  if (is_aligned_by_length(*this) && i + aligned - shape.n_q < 0) return false;
  return std::all_of(terms().begin(), terms().end(),
                     [&](const Term& t) { return sees(t, shape, aligned, b, h, i, j); });
}

bool visible_in_range(const Mask& mask, const MaskShape& shape, int64_t b, int64_t h, int64_t i,
                      int64_t j) {
  return std::all_of(mask.terms().begin(), mask.terms().end(), [&](const Term& t) {
    return (t.kind != Kind::dense && t.kind != Kind::documents) || sees(t, shape, 0, b, h, i, j);
  });
}

std::vector<uint8_t> Mask::to_dense(const MaskShape& shape, int64_t b, int64_t h) const {
  check(shape, "Mask::to_dense");
  int64_t size;
  if (__builtin_mul_overflow(shape.n_q, shape.n_kv, &size))
    fail("Mask::to_dense", "too large, got scores " + shape_text(shape));
  std::vector<uint8_t> dense(static_cast<size_t>(size));
  for (int64_t i = 0; i < shape.n_q; ++i) {
    RowRange range;
    row_ranges(shape, b, i, 1, &range);
    for (int64_t j = range.lo; j < range.hi; ++j)
      dense[static_cast<size_t>(i * shape.n_kv + j)] = visible_in_range(*this, shape, b, h, i, j);
  }
  return dense;
}

}  // namespace qkv
