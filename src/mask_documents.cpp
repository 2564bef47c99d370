// SPDX-License-Identifier: Apache-2.0
// Tier: call. Document ids become small codes, and one range of keys per query where the keys of a
// document lie together. Called by mask.cpp when a mask is made; nothing here runs per call of
// attention().
#include <algorithm>
#include <limits>

#include "mask_terms.h"

namespace qkv {
namespace {

// Ids of one side, row-major [batch or 1, n].
struct Ids {
  std::vector<int64_t> values;
  int64_t n;
  int64_t batch;
  bool per_batch;
};

Ids read_ids(const ConstTensor& t, const char* name) {
  if (t.dtype != DType::i32 && t.dtype != DType::i64)
    throw Error(std::string("Mask::documents: ") + name + " must be i32 or i64, got " +
                std::string(qkv::name(t.dtype)) + " " + shape_text(t));
  if (t.rank != 1 && t.rank != 2)
    throw Error(std::string("Mask::documents: ") + name + " must be [n] or [batch, n], got " +
                shape_text(t));
  const bool per_batch = t.rank == 2;
  Ids ids{{}, t.shape[t.rank - 1], per_batch ? t.shape[0] : 1, per_batch};
  ids.values.reserve(static_cast<size_t>(ids.batch * ids.n));
  for (int64_t b = 0; b < ids.batch; ++b)
    for (int64_t i = 0; i < ids.n; ++i) {
      const int64_t at = (per_batch ? b * t.stride[0] : 0) + i * t.stride[t.rank - 1];
      ids.values.push_back(t.dtype == DType::i32 ? static_cast<const int32_t*>(t.data)[at]
                                                 : static_cast<const int64_t*>(t.data)[at]);
    }
  return ids;
}

// First and last key and the number of keys of one document in one batch entry.
struct Extent {
  int64_t first, last, count;
};

void find_hulls(MaskDocuments& d, size_t n_codes) {
  std::vector<Extent> extents(n_codes, Extent{0, -1, 0});
  for (int64_t b = 0; b < (d.per_batch() ? d.batch : 1); ++b) {
    for (int64_t j = 0; j < d.n_kv; ++j) {
      const int32_t code = d.kv(b)[j];
      if (code < 0) continue;
      Extent& e = extents[static_cast<size_t>(code)];
      if (e.count++ == 0) e.first = j;
      e.last = j;
    }
    for (int64_t i = 0; i < d.n_q; ++i) {
      const int32_t code = d.q(b)[i];
      const Extent e = code < 0 ? Extent{0, -1, 0} : extents[static_cast<size_t>(code)];
      d.hulls.push_back({e.first, e.last + 1});
      d.is_scattered |= e.count != e.last + 1 - e.first;
    }
    for (int64_t j = 0; j < d.n_kv; ++j)
      if (d.kv(b)[j] >= 0) extents[static_cast<size_t>(d.kv(b)[j])] = {0, -1, 0};
  }
}

std::shared_ptr<const MaskDocuments> encode(const Ids& q, const Ids& kv) {
  std::vector<int64_t> known = kv.values;  // an id's code is its index here
  std::sort(known.begin(), known.end());
  known.erase(std::unique(known.begin(), known.end()), known.end());
  if (known.size() > static_cast<size_t>(std::numeric_limits<int32_t>::max()))
    throw Error("Mask::documents: more than 2^31 - 1 different ids");
  auto code_of = [&](int64_t id) {
    const auto it = std::lower_bound(known.begin(), known.end(), id);
    return it == known.end() || *it != id ? MaskDocuments::kNoKey
                                          : static_cast<int32_t>(it - known.begin());
  };

  auto d = std::make_shared<MaskDocuments>();
  d->n_q = q.n, d->n_kv = kv.n;
  d->q_per_batch = q.per_batch, d->kv_per_batch = kv.per_batch;
  d->batch = q.per_batch ? q.batch : kv.batch;
  std::vector<bool> is_asked(known.size());
  d->q_codes.reserve(q.values.size());
  for (int64_t id : q.values) {
    d->q_codes.push_back(code_of(id));
    if (d->q_codes.back() >= 0) is_asked[static_cast<size_t>(d->q_codes.back())] = true;
  }
  d->kv_codes.reserve(kv.values.size());
  for (int64_t id : kv.values) {
    const int32_t code = code_of(id);
    d->kv_codes.push_back(is_asked[static_cast<size_t>(code)] ? code : MaskDocuments::kNoQuery);
  }
  find_hulls(*d, known.size());
  return d;
}

// A pair of codes as one id; what matches nothing on either side keeps matching nothing.
Ids pair_ids(const MaskDocuments& a, const MaskDocuments& b, bool of_queries) {
  const bool per_batch =
      of_queries ? a.q_per_batch || b.q_per_batch : a.kv_per_batch || b.kv_per_batch;
  Ids ids{{},
          of_queries ? a.n_q : a.n_kv,
          per_batch ? (a.per_batch() ? a.batch : b.batch) : 1,
          per_batch};
  for (int64_t e = 0; e < ids.batch; ++e)
    for (int64_t i = 0; i < ids.n; ++i) {
      const int32_t code_a = (of_queries ? a.q(e) : a.kv(e))[i];
      const int32_t code_b = (of_queries ? b.q(e) : b.kv(e))[i];
      const int64_t nothing = of_queries ? MaskDocuments::kNoKey : MaskDocuments::kNoQuery;
      ids.values.push_back(
          code_a < 0 || code_b < 0 ? nothing : (static_cast<int64_t>(code_a) << 32) + code_b);
    }
  return ids;
}

}  // namespace

std::shared_ptr<const MaskDocuments> make_documents(const ConstTensor& q_ids,
                                                    const ConstTensor& kv_ids) {
  const Ids q = read_ids(q_ids, "q_ids");
  const Ids kv = read_ids(kv_ids, "kv_ids");
  if (q.per_batch && kv.per_batch && q.batch != kv.batch)
    throw Error("Mask::documents: q_ids and kv_ids differ in batch, got " + shape_text(q_ids) +
                " and " + shape_text(kv_ids));
  return encode(q, kv);
}

std::shared_ptr<const MaskDocuments> intersect_documents(const MaskDocuments& a,
                                                         const MaskDocuments& b) {
  const bool batch_differs = a.per_batch() && b.per_batch() && a.batch != b.batch;
  if (a.n_q != b.n_q || a.n_kv != b.n_kv || batch_differs) {
    auto text = [](const MaskDocuments& d) {
      const int64_t extents[3] = {d.batch, d.n_q, d.n_kv};
      return shape_text(std::span(extents).subspan(d.per_batch() ? 0 : 1));
    };
    throw Error("Mask &: documents differ in shape, got " + text(a) + " and " + text(b));
  }
  return encode(pair_ids(a, b, true), pair_ids(a, b, false));
}

}  // namespace qkv
