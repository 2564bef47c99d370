// SPDX-License-Identifier: Apache-2.0
// Tier: call. KvCache: configuration, truncate, fork. kv_cache_impl.h says where tokens lie,
// kv_cache_append.cpp appends, kv_cache_attend.cpp attends, kv_cache_file.cpp saves and loads.
#include "qkv/kv_cache.h"

#include <fmt/format.h>

#include <cmath>
#include <utility>

#include "check.h"
#include "checked_sizes.h"
#include "kv_cache_impl.h"

namespace qkv {
namespace {

void check_config(const KvCacheConfig& c) {
  const auto refuse = [](const std::string& text) { throw Error("KvCache: " + text); };
  for (const int64_t n : {c.batch, c.num_kv_heads, c.head_dim_qk, c.head_dim_v, c.capacity,
                          c.window, c.num_sink_tokens})
    if (n < 0) refuse(fmt::format("sizes must not be negative, got {}", n));
  if (c.page_size < 1) refuse(fmt::format("page_size must be positive, got {}", c.page_size));
  if (!info(c.dtype).is_float && c.dtype != DType::i8)
    refuse(fmt::format("dtype must be f32, f64, bf16, f16 or i8, got {}", name(c.dtype)));
  if (c.kind == KvCacheKind::ring && c.window == 0) refuse("a ring needs a window");
  if (c.num_sink_tokens > 0 && c.window == 0)
    refuse("num_sink_tokens stay visible beside a window, and there is none");
  for (const std::vector<float>* w : {&c.k_norm, &c.q_norm})
    if (!w->empty() && static_cast<int64_t>(w->size()) != c.head_dim_qk)
      refuse(fmt::format("a norm needs head_dim_qk {} weights, got {}", c.head_dim_qk, w->size()));
  if (!(c.norm_eps >= 0) || !std::isfinite(c.norm_eps))
    refuse(fmt::format("norm_eps must be finite and not negative, got {}", c.norm_eps));
}

}  // namespace

KvCache::Impl::Impl(const KvCacheConfig& c)
    : config(c),
      sizes{c.num_kv_heads, c.head_dim_qk, c.head_dim_v, c.dtype, c.head_dim_qk, c.head_dim_v},
      pages(c.kind == KvCacheKind::paged ? std::make_shared<KvPages>() : nullptr),
      entries(static_cast<size_t>(c.batch)),
      lengths(static_cast<size_t>(c.batch)) {
  if (c.rope) rope.emplace(*c.rope, c.head_dim_qk, "KvCache");
}

int64_t KvCache::Impl::wanted_slots(int64_t tokens, int64_t added) const {
  if (is_ring()) return kept() + config.window - 1 + std::max(added, config.page_size);
  return config.capacity > 0 ? config.capacity : tokens;
}

void KvCache::Impl::move_to_block(size_t entry, int64_t slots) {
  Entry& e = entries[entry];
  KvBlockRef block(sizes, slots);
  if (!e.blocks.empty()) {
    int64_t first = 0;
    if (is_ring()) first = std::max(e.first, lengths[entry] - (slots - kept()));
    for_each_held(e, lengths[entry],
                  [&](const KvBlock& from, int64_t at, int64_t token, int64_t n) {
                    for (int64_t t = token; t < token + n;) {
                      if (t >= kept() && t < first) {
                        t = std::min(first, token + n);
                        continue;
                      }
                      const int64_t m = std::min(token + n - t, run_length(*block, t));
                      copy_slots(sizes, from, at + t - token, &*block, slot(*block, t), m);
                      t += m;
                    }
                  });
    e.first = first;
  }
  e.blocks.assign(1, std::move(block));
}

void KvCache::Impl::make_room(size_t entry, int64_t begin, int64_t end) {
  Entry& e = entries[entry];
  const int64_t length = lengths[entry];
  if (!is_paged()) {
    const int64_t have = e.blocks.empty() ? 0 : e.blocks[0]->slots;
    const int64_t want = wanted_slots(end, end - std::min(length, begin));
    if (have >= want && have > 0 && (e.blocks[0].is_own() || begin >= end)) return;
    if (want == 0) return;
    const bool doubles = !is_ring() && config.capacity == 0 && have > 0 && want > have;
    move_to_block(entry, std::max({want, have, doubles ? 2 * have : 0}));
    return;
  }
  const int64_t size = config.page_size;
  for (int64_t page = begin / size; page * size < end; ++page) {
    const auto at = static_cast<size_t>(page);
    if (at < e.blocks.size() && e.blocks[at].is_own()) continue;
    KvBlockRef block(sizes, size, pages);
    if (at < e.blocks.size()) {
      copy_slots(sizes, *e.blocks[at], 0, &*block, 0, std::min(size, length - page * size));
      e.blocks[at] = std::move(block);
    } else {
      e.blocks.push_back(std::move(block));
    }
  }
}

KvCache::KvCache(const KvCacheConfig& config) {
  check_config(config);
  impl_ = std::make_unique<Impl>(config);
  if (config.kind == KvCacheKind::contiguous && config.capacity > 0)
    for (size_t b = 0; b < impl_->entries.size(); ++b) impl_->make_room(b, 0, config.capacity);
}
KvCache::KvCache(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
KvCache::~KvCache() = default;
KvCache::KvCache(KvCache&&) noexcept = default;
KvCache& KvCache::operator=(KvCache&&) noexcept = default;

KvCache KvCache::from_buffers(Tensor k, Tensor v, std::span<const int64_t> lengths) {
  const Check check("KvCache::from_buffers");
  const auto n = static_cast<int64_t>(lengths.size());
  bool fits = k.rank == 4 && v.rank == 4 && k.shape[0] == n;
  for (int a = 0; fits && a < 3; ++a) fits = k.shape[a] == v.shape[a];
  if (!fits || k.dtype != v.dtype)
    check.refuse(
        fmt::format("k and v need [batch, num_kv_heads, capacity, dim] of one element type "
                    "and one length per batch entry, got k {} {}, v {} {} and {} lengths",
                    name(k.dtype), shape_text(k), name(v.dtype), shape_text(v), n));
  if (!info(k.dtype).is_float)
    check.refuse(fmt::format("k and v must be floating point, got {}", name(k.dtype)));
  check.output(k, "k", {n, k.shape[1], k.shape[2], k.shape[3]}, k.dtype);
  check.output(v, "v", {n, k.shape[1], k.shape[2], v.shape[3]}, k.dtype);
  check.layout(k, "k");
  check.layout(v, "v");
  for (const int64_t length : lengths)
    if (length < 0 || length > k.shape[2])
      check.refuse(fmt::format("a length must lie in [0, {}], got {}", k.shape[2], length));
  KvCacheConfig config;
  config.batch = n, config.num_kv_heads = k.shape[1];
  config.head_dim_qk = k.shape[3], config.head_dim_v = v.shape[3];
  config.capacity = k.shape[2], config.dtype = k.dtype;
  auto impl = std::make_unique<Impl>(config);
  impl->sizes.k_row_stride = k.stride[2], impl->sizes.v_row_stride = v.stride[2];
  const int64_t element = size_bytes(k.dtype);
  for (int64_t b = 0; b < n; ++b) {
    KvBlockRef block(new KvBlock);
    block->slots = k.shape[2], block->is_callers = true;
    block->k = static_cast<char*>(k.data) + b * k.stride[0] * element;
    block->v = static_cast<char*>(v.data) + b * v.stride[0] * element;
    block->k_head_stride = k.stride[1], block->v_head_stride = v.stride[1];
    block->k_row_stride = k.stride[2], block->v_row_stride = v.stride[2];
    block->bytes = n > 0 ? k.num_elements() / n * element + v.num_elements() / n * element : 0;
    impl->entries[static_cast<size_t>(b)].blocks.push_back(std::move(block));
    impl->lengths[static_cast<size_t>(b)] = lengths[static_cast<size_t>(b)];
  }
  return KvCache(std::move(impl));
}

const KvCacheConfig& KvCache::config() const { return impl_->config; }
std::span<const int64_t> KvCache::lengths() const { return impl_->lengths; }

int64_t KvCache::longest() const {
  int64_t longest = 0;
  for (const int64_t n : impl_->lengths) longest = std::max(longest, n);
  return longest;
}

static size_t checked_entry(int64_t entry, const std::vector<int64_t>& lengths,
                            const char* caller) {
  if (entry < 0 || entry >= static_cast<int64_t>(lengths.size()))
    throw Error(fmt::format("{}: batch entry {} of {}", caller, entry, lengths.size()));
  return static_cast<size_t>(entry);
}

int64_t KvCache::length(int64_t entry) const {
  return impl_->lengths[checked_entry(entry, impl_->lengths, "KvCache::length")];
}
int64_t KvCache::first_token(int64_t entry) const {
  return impl_->entries[checked_entry(entry, impl_->lengths, "KvCache::first_token")].first;
}

int64_t KvCache::bytes() const {
  int64_t total = 0;
  for (const Impl::Entry& e : impl_->entries)
    for (const KvBlockRef& block : e.blocks) total += block->bytes;
  return total;
}

KvQuantError KvCache::quant_error() const {
  const QuantSums &k = impl_->k_sums, &v = impl_->v_sums;
  const auto rms = [](const QuantSums& s) {
    return s.elements > 0 ? std::sqrt(s.squares / static_cast<double>(s.elements)) : 0.0;
  };
  return {k.max_abs, v.max_abs, rms(k), rms(v), k.max_relative, v.max_relative, impl_->num_rows};
}

std::vector<KvCacheSegment> KvCache::segments(int64_t entry, int64_t h_kv) const {
  const Impl& m = *impl_;
  const size_t b = checked_entry(entry, m.lengths, "KvCache::segments");
  if (h_kv < 0 || h_kv >= m.config.num_kv_heads)
    throw Error(fmt::format("KvCache::segments: head {} of {}", h_kv, m.config.num_kv_heads));
  std::vector<KvCacheSegment> all;
  const KvSizes& s = m.sizes;
  const int64_t element = size_bytes(s.dtype);
  m.for_each_held(m.entries[b], m.lengths[b],
                  [&](const KvBlock& block, int64_t slot, int64_t token, int64_t n) {
                    const auto rows = [&](const char* at, int64_t head_stride, int64_t row_stride,
                                          int64_t dim) {
                      const int64_t shape[] = {n, dim}, stride[] = {row_stride, 1};
                      return ConstTensor(at + (h_kv * head_stride + slot * row_stride) * element,
                                         s.dtype, shape, stride);
                    };
                    KvCacheSegment segment{
                        rows(block.k, block.k_head_stride, s.k_row_stride, s.head_dim_qk),
                        rows(block.v, block.v_head_stride, s.v_row_stride, s.head_dim_v),
                        {},
                        {},
                        token,
                        n};
                    if (block.k_scale) {
                      segment.k_scale = ConstTensor(block.k_scale + h_kv * block.slots + slot, {n});
                      segment.v_scale = ConstTensor(block.v_scale + h_kv * block.slots + slot, {n});
                    }
                    all.push_back(segment);
                  });
  return all;
}

void KvCache::truncate(int64_t n) {
  if (n < 0) throw Error(fmt::format("KvCache::truncate: n must not be negative, got {}", n));
  truncate(std::vector<int64_t>(impl_->lengths.size(), n));
}

void KvCache::truncate(std::span<const int64_t> lengths) {
  Impl& m = *impl_;
  if (lengths.size() != m.lengths.size())
    throw Error(fmt::format("KvCache::truncate: one length per batch entry, {}, is needed, got {}",
                            m.lengths.size(), lengths.size()));
  for (size_t b = 0; b < lengths.size(); ++b) {
    const int64_t n = lengths[b], first = m.entries[b].first;
    if (n < 0) throw Error(fmt::format("KvCache::truncate: a length is negative, got {}", n));
    if (n < m.lengths[b] && n > m.kept() && first > std::max(m.kept(), n - m.config.window + 1))
      throw Error(
          fmt::format("KvCache::truncate: the ring has lost what token {} may see, it holds "
                      "the tokens [{}, {})",
                      n, first, m.lengths[b]));
  }
  for (size_t b = 0; b < lengths.size(); ++b) {
    if (lengths[b] >= m.lengths[b]) continue;
    const int64_t n = m.lengths[b] = lengths[b];
    Impl::Entry& e = m.entries[b];
    e.first = std::min(e.first, n);
    if (!m.is_paged()) continue;
    // Pages behind the end stay for the next tokens, unless another cache reads them.
    const int64_t size = m.config.page_size, pages = divide_up(n, size);
    while (static_cast<int64_t>(e.blocks.size()) > pages && !e.blocks.back().is_own())
      e.blocks.pop_back();
  }
}

void KvCache::keep_of_last(int64_t n, std::span<const int64_t> places) {
  Impl& m = *impl_;
  for (size_t b = 0; b < m.lengths.size(); ++b) {
    const int64_t base = m.lengths[b] - n;
    if (n < 0 || base < 0 || base < m.entries[b].first)
      throw Error(fmt::format("KvCache::keep_of_last: the last {} tokens are not held, length {}",
                              n, m.lengths[b]));
  }
  for (size_t i = 0; i < places.size(); ++i)
    if (places[i] < 0 || places[i] >= n || (i > 0 && places[i] <= places[i - 1]))
      throw Error(fmt::format(
          "KvCache::keep_of_last: places must ascend within [0, {}), got {} at index {}", n,
          places[i], i));
  const auto kept = static_cast<int64_t>(places.size());
  if (kept > 0 && places.back() >= kept)  // else nothing moves
    for (size_t b = 0; b < m.entries.size(); ++b) m.make_room(b, m.lengths[b] - n, m.lengths[b]);
  for (size_t b = 0; b < m.entries.size(); ++b) {
    const int64_t base = m.lengths[b] - n;
    Impl::Entry& e = m.entries[b];
    for (int64_t i = 0; i < kept; ++i) {
      const int64_t from = base + places[static_cast<size_t>(i)], to = base + i;
      if (from == to) continue;
      KvBlock &source = *e.blocks[m.block_of(from)], &target = *e.blocks[m.block_of(to)];
      copy_slots(m.sizes, source, m.slot(source, from), &target, m.slot(target, to), 1);
    }
    m.lengths[b] = base + kept;
  }
}

void KvCache::clear() { truncate(0); }

void KvCache::reserve(int64_t tokens) {
  Impl& m = *impl_;
  if (tokens < 0)
    throw Error(fmt::format("KvCache::reserve: tokens must not be negative, got {}", tokens));
  if (!m.is_ring() && m.config.capacity > 0 && tokens > m.config.capacity)
    throw Error(fmt::format("KvCache::reserve: {} tokens do not fit the capacity {}", tokens,
                            m.config.capacity));
  for (size_t b = 0; b < m.entries.size(); ++b)
    m.make_room(b, m.lengths[b], m.is_ring() ? m.lengths[b] + tokens : tokens);
}

KvCache KvCache::fork() const {
  auto twin = std::make_unique<Impl>(*impl_);
  // Callers may write to their memory whenever they like: the twin of from_buffers() gets a copy.
  KvSizes& s = twin->sizes;
  s.k_row_stride = s.head_dim_qk, s.v_row_stride = s.head_dim_v;
  for (size_t b = 0; b < twin->entries.size(); ++b) {
    const std::vector<KvBlockRef>& blocks = twin->entries[b].blocks;
    if (!blocks.empty() && blocks[0]->is_callers) twin->move_to_block(b, blocks[0]->slots);
  }
  return KvCache(std::move(twin));
}

}  // namespace qkv
