// SPDX-License-Identifier: Apache-2.0
// Tier: call. KvCache::save() and load(): a safetensors file with the tokens that are held, in order, and
// the configuration as JSON in its metadata.
#include <fmt/format.h>

#include <cstring>
#include <nlohmann/json.hpp>

#include "check.h"
#include "kv_cache_impl.h"
#include "qkv/kv_cache.h"
#include "qkv/weights.h"

namespace qkv {
namespace {

using Json = nlohmann::json;

constexpr const char* kMetadataKey = "qkv.kv_cache";
constexpr const char* kKinds[] = {"contiguous", "ring", "paged"};
constexpr const char* kStyles[] = {"half_split", "interleaved"};

Json to_json(const KvCacheConfig& c) {
  Json j = {{"batch", c.batch},
            {"num_kv_heads", c.num_kv_heads},
            {"head_dim_qk", c.head_dim_qk},
            {"head_dim_v", c.head_dim_v},
            {"capacity", c.capacity},
            {"dtype", name(c.dtype)},
            {"kind", kKinds[static_cast<size_t>(c.kind)]},
            {"page_size", c.page_size},
            {"window", c.window},
            {"num_sink_tokens", c.num_sink_tokens},
            {"k_norm", c.k_norm},
            {"q_norm", c.q_norm},
            {"norm_eps", c.norm_eps}};
  if (c.rope)
    j["rope"] = {{"base", c.rope->base},
                 {"style", kStyles[static_cast<size_t>(c.rope->style)]},
                 {"rot_dim", c.rope->rot_dim}};
  return j;
}

template <size_t n>
size_t index_of(const std::string& word, const char* const (&words)[n]) {
  for (size_t i = 0; i < n; ++i)
    if (word == words[i]) return i;
  throw Error("unknown word " + word);
}

KvCacheConfig from_json(const Json& j) {
  KvCacheConfig c;
  c.batch = j.at("batch"), c.num_kv_heads = j.at("num_kv_heads");
  c.head_dim_qk = j.at("head_dim_qk"), c.head_dim_v = j.at("head_dim_v");
  c.capacity = j.at("capacity"), c.page_size = j.at("page_size");
  c.window = j.at("window"), c.num_sink_tokens = j.at("num_sink_tokens");
  const std::string dtype = j.at("dtype");
  bool known = false;
  for (const DTypeInfo& row : kDTypes)
    if (row.name == dtype) c.dtype = row.dtype, known = true;
  if (!known) throw Error("unknown dtype " + dtype);
  c.kind = static_cast<KvCacheKind>(index_of(j.at("kind").get<std::string>(), kKinds));
  c.k_norm = j.at("k_norm").get<std::vector<float>>();
  c.q_norm = j.at("q_norm").get<std::vector<float>>();
  c.norm_eps = j.at("norm_eps");
  if (j.contains("rope")) {
    const Json& r = j["rope"];
    c.rope = RopeOptions{
        r.at("base"), static_cast<RopeStyle>(index_of(r.at("style").get<std::string>(), kStyles)),
        r.at("rot_dim")};
  }
  return c;
}

// One of k, v and their scales, of all entries: [batch, num_kv_heads, most, dim].
struct Rows {
  std::vector<char> data;
  int64_t head_bytes, row_bytes;
  char* at(int64_t entry, int64_t head, int64_t heads, int64_t row) {
    return data.data() + (entry * heads + head) * head_bytes + row * row_bytes;
  }
};

}  // namespace

void KvCache::save(const std::string& path) const {
  const Impl& m = *impl_;
  const KvCacheConfig& c = m.config;
  std::vector<int64_t> held(m.entries.size()), firsts;
  int64_t most = 0;
  for (size_t b = 0; b < m.entries.size(); ++b) {
    m.for_each_held(m.entries[b], m.lengths[b],
                    [&](const KvBlock&, int64_t, int64_t, int64_t n) { held[b] += n; });
    firsts.push_back(m.entries[b].first);
    most = std::max(most, held[b]);
  }
  const int64_t element = size_bytes(c.dtype);
  const auto rows = [&](int64_t row_bytes) {
    Rows r{{}, most * row_bytes, row_bytes};
    r.data.resize(static_cast<size_t>(c.batch * c.num_kv_heads * r.head_bytes));
    return r;
  };
  Rows k = rows(c.head_dim_qk * element), v = rows(c.head_dim_v * element);
  Rows k_scale = rows(m.sizes.has_scales() ? 4 : 0), v_scale = k_scale;
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t h = 0; h < c.num_kv_heads; ++h) {
      int64_t row = 0;
      for (const KvCacheSegment& s : segments(b, h)) {
        const auto copy = [&](const ConstTensor& t, Rows* to) {
          for (int64_t i = 0; t && i < s.count; ++i)
            if (to->row_bytes > 0)
              std::memcpy(to->at(b, h, c.num_kv_heads, row + i),
                          static_cast<const char*>(t.data) + i * t.stride[0] * size_bytes(t.dtype),
                          static_cast<size_t>(to->row_bytes));
        };
        copy(s.k, &k), copy(s.v, &v), copy(s.k_scale, &k_scale), copy(s.v_scale, &v_scale);
        row += s.count;
      }
    }
  const auto tensor = [&](const Rows& r, DType dtype, int64_t dim) {
    const int64_t shape[] = {c.batch, c.num_kv_heads, most, dim};
    return ConstTensor(r.data.data(), dtype, std::span<const int64_t>(shape, dim < 0 ? 3u : 4u));
  };
  std::vector<NamedTensor> tensors = {{"k", tensor(k, c.dtype, c.head_dim_qk)},
                                      {"v", tensor(v, c.dtype, c.head_dim_v)},
                                      {"lengths", ConstTensor(m.lengths.data(), {c.batch})},
                                      {"first_tokens", ConstTensor(firsts.data(), {c.batch})}};
  if (m.sizes.has_scales()) {
    tensors.push_back({"k_scale", tensor(k_scale, DType::f32, -1)});
    tensors.push_back({"v_scale", tensor(v_scale, DType::f32, -1)});
  }
  save_safetensors(path, tensors, {{kMetadataKey, to_json(c).dump()}});
}

KvCache KvCache::load(const std::string& path) {
  const SafetensorsFile file = SafetensorsFile::open(path);
  const Check check("KvCache::load");
  const auto refuse = [&](const std::string& text) {
    check.refuse(fmt::format("{}: {}", path, text));
  };
  const auto found = file.metadata().find(kMetadataKey);
  if (found == file.metadata().end())
    refuse(fmt::format("no cache, its metadata has no {}", kMetadataKey));
  KvCacheConfig c;
  try {
    c = from_json(Json::parse(found->second));
  } catch (const std::exception& e) {
    refuse(fmt::format("the configuration cannot be read: {}", e.what()));
  }
  KvCache cache(c);
  Impl& m = *cache.impl_;
  const auto tensor = [&](const char* name, DType dtype, std::vector<int64_t> shape) {
    const ConstTensor t = file.tensor(name);
    bool fits = t.dtype == dtype && t.rank == static_cast<int>(shape.size());
    for (int a = 0; fits && a < t.rank; ++a) fits = t.shape[a] == shape[static_cast<size_t>(a)];
    if (!fits)
      refuse(fmt::format("{} needs {} {}, got {} {}", name, qkv::name(dtype),
                         shape_text(std::span<const int64_t>(shape)), qkv::name(t.dtype),
                         shape_text(t)));
    return t;
  };
  const auto integers = [&](const char* name) {
    const ConstTensor t = tensor(name, DType::i64, {c.batch});
    std::vector<int64_t> values(static_cast<size_t>(c.batch));
    if (c.batch > 0) std::memcpy(values.data(), t.data, values.size() * 8);
    return values;
  };
  const std::vector<int64_t> lengths = integers("lengths"), firsts = integers("first_tokens");
  const ConstTensor any_k = file.tensor("k");
  const int64_t most = any_k.rank == 4 ? any_k.shape[2] : 0;
  const ConstTensor k = tensor("k", c.dtype, {c.batch, c.num_kv_heads, most, c.head_dim_qk});
  const ConstTensor v = tensor("v", c.dtype, {c.batch, c.num_kv_heads, most, c.head_dim_v});
  ConstTensor k_scale, v_scale;
  if (m.sizes.has_scales()) {
    k_scale = tensor("k_scale", DType::f32, {c.batch, c.num_kv_heads, most});
    v_scale = tensor("v_scale", DType::f32, {c.batch, c.num_kv_heads, most});
  }
  for (size_t b = 0; b < lengths.size(); ++b) {
    const int64_t length = lengths[b], first = firsts[b], kept = m.kept();
    const bool fits = length >= 0 && first >= 0 && first <= length && (m.is_ring() || first == 0) &&
                      (m.is_ring() || c.capacity == 0 || length <= c.capacity);
    const int64_t in_ring = fits ? length - std::min(length, std::max(first, kept)) : 0;
    const int64_t front = fits ? std::min(length, kept) : 0;
    if (!fits || in_ring > most || front + (m.is_ring() ? in_ring : length) > most)
      refuse(fmt::format("a length {} from token {} on does not fit {} stored tokens", length,
                         first, most));
    if (length == 0) continue;
    Impl::Entry& e = m.entries[b];
    if (m.is_ring()) {
      m.move_to_block(b, std::max(m.wanted_slots(length, 0), kept + in_ring));
    } else {
      m.make_room(b, 0, length);
    }
    e.first = first, m.lengths[b] = length;
    const auto entry = static_cast<int64_t>(b);
    int64_t row = 0;
    const int64_t element = size_bytes(c.dtype);
    m.for_each_held(e, length, [&](KvBlock& block, int64_t slot, int64_t, int64_t n) {
      for (int64_t h = 0; h < c.num_kv_heads; ++h) {
        const int64_t at = (entry * c.num_kv_heads + h) * most + row;
        const auto copy = [&](const ConstTensor& from, int64_t dim, int64_t bytes, void* to) {
          if (n * dim > 0)
            std::memcpy(to, static_cast<const char*>(from.data) + at * dim * bytes,
                        static_cast<size_t>(n * dim * bytes));
        };
        copy(k, c.head_dim_qk, element,
             block.k + (h * block.k_head_stride + slot * block.k_row_stride) * element);
        copy(v, c.head_dim_v, element,
             block.v + (h * block.v_head_stride + slot * block.v_row_stride) * element);
        if (!block.k_scale) continue;
        copy(k_scale, 1, 4, block.k_scale + h * block.slots + slot);
        copy(v_scale, 1, 4, block.v_scale + h * block.slots + slot);
      }
      row += n;
    });
  }
  return cache;
}

}  // namespace qkv
