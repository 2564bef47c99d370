// SPDX-License-Identifier: Apache-2.0
// Tier: kernel (compiled once per Highway target). Which keys of a block meet which vectors of a
// panel. Mask kinds are unknown here: there are only first and last visible keys. Narrow tiles on a
// causal diagonal, in a window and for rows that do not fill a panel all come from the same rule: a
// span is a run of keys that the same vectors need.
#if defined(QKV_KERNELS_SPANS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_KERNELS_SPANS_INL_H_
#undef QKV_KERNELS_SPANS_INL_H_
#else
#define QKV_KERNELS_SPANS_INL_H_
#endif

#include "kernels/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::kernels {
namespace HWY_NAMESPACE {

// Keys per block: s^T of 128 keys stays in L1 beside the Q panel (64 and 256 measure within 1 %).
inline constexpr int kBlock = 128;

HWY_INLINE int64_t RoundUp(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

struct Span {
  int begin, end;  // keys, relative to the block
  int v0, nv;      // vectors [v0, v0 + nv) of the panel
  bool masked;     // some lane of these vectors must not see some of these keys
};

struct SpanList {
  static constexpr int kMax = 4 * kTileVectors + 2;
  Span span[kMax];
  int n = 0;
  bool dense = false;  // the dense terms matter here
};

// Keys of one vector: some lane sees keys in [begin, end), every lane sees those in [full_begin,
// full_end).
struct VectorKeys {
  int64_t begin, end, full_begin, full_end;
};

// Spans of the keys [from, to) of the block at k0. Cuts are moved outwards to multiples of the
// tile's rows, so that tiles stay whole; what a lane then computes in excess is masked.
HWY_INLINE void FindSpans(const VectorKeys* keys, int64_t k0, int from, int to, SpanList* list) {
  bool plain = true;
  for (int v = 0; v < kTileVectors; v++) {
    plain &= keys[v].full_begin <= k0 + from && k0 + to <= keys[v].full_end;
  }
  if (plain) {
    list->span[0] = {from, to, 0, kTileVectors, false};
    list->n = 1;
    return;
  }
  int cuts[SpanList::kMax + 2];
  int n = 0;
  const auto cut = [&](int64_t key) HWY_ATTR {
    if (key <= k0 + from || key >= k0 + to) return;
    int at = n++;
    for (; at > 0 && cuts[at - 1] > key - k0; at--) cuts[at] = cuts[at - 1];
    cuts[at] = static_cast<int>(key - k0);
  };
  for (int v = 0; v < kTileVectors; v++) {
    cut(keys[v].begin), cut(keys[v].end), cut(keys[v].full_begin), cut(keys[v].full_end);
  }
  cuts[n++] = to;
  list->n = 0;
  for (int i = 0, begin = from; i < n; begin = cuts[i++]) {
    const int end = cuts[i];
    if (begin == end) continue;
    Span span = {begin, end, kTileVectors, 0, false};
    int last = -1;
    for (int v = 0; v < kTileVectors; v++) {
      if (keys[v].begin < k0 + end && k0 + begin < keys[v].end) {
        span.v0 = HWY_MIN(span.v0, v);
        last = v;
      }
    }
    if (last < 0) continue;
    span.nv = last - span.v0 + 1;
    for (int v = span.v0; v <= last; v++) {
      span.masked |= !(keys[v].full_begin <= k0 + begin && k0 + end <= keys[v].full_end);
    }
    Span* previous = list->n ? &list->span[list->n - 1] : nullptr;
    if (previous && previous->end == begin && previous->v0 == span.v0 && previous->nv == span.nv &&
        previous->masked == span.masked) {
      previous->end = end;
    } else {
      list->span[list->n++] = span;
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::kernels
HWY_AFTER_NAMESPACE();

#endif  // toggle
