// SPDX-License-Identifier: Apache-2.0
// Tier: plan. Slabs of pages. kv_pages.h says what for.
#include "kv_pages.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace qkv {

KvPages::Slab* KvPages::add_slab(int64_t bytes) {
  std::size_t have = 0;
  for (const auto& [address, slab] : slabs_) have += slab.num_pieces;
  const auto most = static_cast<std::size_t>(std::max<int64_t>(kSlabBytes / bytes, 1));
  const std::size_t n = std::clamp<std::size_t>(have, 1, most);
  Slab slab{allocate_large(static_cast<int64_t>(n) * bytes), n, {}};
  char* first = static_cast<char*>(slab.memory.get());
  slab.free.reserve(n);
  for (std::size_t i = n; i > 0; --i)
    slab.free.push_back(first + static_cast<int64_t>(i - 1) * bytes);
  open_.reserve(slabs_.size() + 1);
  return &slabs_.emplace(first, std::move(slab)).first->second;
}

void* KvPages::take(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (open_.empty()) open_.push_back(add_slab(std::max(bytes, kernels::kAlignment)));
  Slab* slab = open_.back();
  char* piece = slab->free.back();
  slab->free.pop_back();
  if (slab->free.empty()) open_.pop_back();
  return piece;
}

void KvPages::give_back(void* piece) noexcept {
  const std::lock_guard lock(mutex_);
  const auto at = std::prev(slabs_.upper_bound(static_cast<char*>(piece)));
  Slab* slab = &at->second;
  if (slab->free.empty()) open_.push_back(slab);
  slab->free.push_back(static_cast<char*>(piece));
  if (slab->free.size() < slab->num_pieces || open_.size() == 1) return;
  open_.erase(std::find(open_.begin(), open_.end(), slab));
  slabs_.erase(at);
}

int64_t KvPages::num_pieces() const {
  const std::lock_guard lock(mutex_);
  std::size_t n = 0;
  for (const auto& [address, slab] : slabs_) n += slab.num_pieces;
  return static_cast<int64_t>(n);
}

}  // namespace qkv
