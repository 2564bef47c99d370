// SPDX-License-Identifier: Apache-2.0
// Tier: plan. What a KvCache holds, and where each token lies. All that tells the kinds apart is here:
// a run is a row of tokens in neighbouring slots of one block.
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "kv_block.h"
#include "kv_rows.h"
#include "qkv/kv_cache.h"
#include "rope_table.h"

namespace qkv {

struct KvCache::Impl {
  struct Entry {
    std::vector<KvBlockRef> blocks;
    int64_t first = 0;  // ring: the first token that is held, apart from the kept ones
  };

  struct Append;  // kv_cache_append.cpp

  KvCacheConfig config;
  KvSizes sizes;
  std::shared_ptr<KvPages> pages;  // of a paged cache and its forks
  std::vector<Entry> entries;
  std::vector<int64_t> lengths;
  QuantSums k_sums, v_sums;
  int64_t num_rows = 0;
  std::optional<RopeTable> rope;  // checked options; copied by who fills it

  explicit Impl(const KvCacheConfig& c);

  bool is_ring() const { return config.kind == KvCacheKind::ring; }
  bool is_paged() const { return config.kind == KvCacheKind::paged; }
  /// Slots in front of a ring for tokens that are kept.
  int64_t kept() const { return is_ring() ? config.num_sink_tokens : 0; }

  /// The slot of a token in its block.
  int64_t slot(const KvBlock& block, int64_t token) const {
    if (is_paged()) return token % config.page_size;
    if (!is_ring() || token < kept()) return token;
    return kept() + (token - kept()) % (block.slots - kept());
  }
  size_t block_of(int64_t token) const {
    return is_paged() ? static_cast<size_t>(token / config.page_size) : 0;
  }
  /// Tokens from this one on that lie in neighbouring slots of its block.
  int64_t run_length(const KvBlock& block, int64_t token) const {
    return (is_ring() && token < kept() ? kept() : block.slots) - slot(block, token);
  }

  /// f(block, slot, token, n) for the runs of the tokens [begin, end).
  template <class F>
  void for_each_run(const Entry& e, int64_t begin, int64_t end, F f) const {
    for (int64_t t = begin; t < end;) {
      KvBlock& block = *e.blocks[block_of(t)];
      const int64_t n = std::min(end - t, run_length(block, t));
      f(block, slot(block, t), t, n);
      t += n;
    }
  }
  /// The same for all tokens that are held.
  template <class F>
  void for_each_held(const Entry& e, int64_t length, F f) const {
    for_each_run(e, 0, std::min(length, kept()), f);
    for_each_run(e, std::min(length, std::max(e.first, kept())), length, f);
  }

  /// The held tokens of an entry as segments of KV head 0; keys_begin is taken off their indices and
  /// only tokens [keys_begin, keys_end) are listed.
  void list_segments(size_t entry, int64_t keys_begin, int64_t keys_end,
                     std::vector<kernels::KvSegment>* segments) const;

  /// Memory of its own for the tokens [begin, end) of an entry; those before `length` keep their
  /// contents.
  void make_room(size_t entry, int64_t begin, int64_t end);
  /// Slots of the one block of an entry for `tokens` tokens of which `added` come at once.
  int64_t wanted_slots(int64_t tokens, int64_t added) const;
  /// Moves a contiguous entry or a ring to a new block.
  void move_to_block(size_t entry, int64_t slots);
};

}  // namespace qkv
