// SPDX-License-Identifier: Apache-2.0
// Tier: test. KvCache::save() and load(): every kind and type goes on with the same bits; broken files are
// refused.
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "qkv/kv_cache.h"
#include "qkv/weights.h"
#include "support/caches.h"
#include "support/files.h"

namespace qkv::test {
namespace {

TEST(KvCacheFile, SavedAndLoaded_GoesOnWithTheSameBits) {
  const TemporaryFolder folder;
  uint64_t seed = 1;
  for (KvCacheConfig config : all_configs()) {
    SCOPED_TRACE(text_of(config));
    config.k_norm.assign(8, 1.0f);
    CacheModel m(config, seed++);
    m.cache.save(folder / "empty");
    EXPECT_EQ(KvCache::load(folder / "empty").longest(), 0);
    m.append({25, 3});
    for (int i = 0; i < 20; ++i) m.append({1, 2});
    m.cache.save(folder / "cache");
    KvCache loaded = KvCache::load(folder / "cache");
    EXPECT_EQ(loaded.length(0), m.cache.length(0));
    EXPECT_EQ(loaded.first_token(0), m.cache.first_token(0));
    EXPECT_EQ(loaded.config().k_norm, config.k_norm);
    const TestTensor q = m.random_query(2);
    const auto attend = [&](const KvCache& cache) {
      TestTensor out(q.view().dtype, {2, CacheModel::kHeads, 2, config.head_dim_v});
      cache.attend(q.view(), {.out = out.view()});
      return out.bits();
    };
    EXPECT_EQ(attend(loaded), attend(m.cache));
    TestTensor k(DType::f32, {2, 2, 2, 8}), v(DType::f32, {2, 2, 2, 6});
    k.fill(0.25), v.fill(0.5);
    if (config.dtype == DType::f64) k = TestTensor(DType::f64, {2, 2, 2, 8});
    k.fill(0.25);
    loaded.append(k.view(), v.view());
    m.cache.append(k.view(), v.view());
    EXPECT_EQ(attend(loaded), attend(m.cache));
  }
}

TEST(KvCacheFile, Rope_IsKept) {
  const TemporaryFolder folder;
  KvCacheConfig config = small_config();
  config.rope = RopeOptions{.base = 100, .style = RopeStyle::interleaved, .rot_dim = 4};
  CacheModel m(config, 1);
  m.cache.save(folder / "cache");
  const KvCache loaded = KvCache::load(folder / "cache");
  ASSERT_TRUE(loaded.config().rope);
  EXPECT_EQ(loaded.config().rope->base, 100);
  EXPECT_EQ(loaded.config().rope->style, RopeStyle::interleaved);
  EXPECT_EQ(loaded.config().rope->rot_dim, 4);
}

TEST(KvCacheFile, BrokenFiles_AreRefused) {
  const TemporaryFolder folder;
  CacheModel m(small_config(), 1);
  m.append({3, 3});
  m.cache.save(folder / "cache");
  const SafetensorsFile file = SafetensorsFile::open(folder / "cache");
  const std::string metadata = file.metadata().at("qkv.kv_cache");
  const auto refused = [&](const std::string& name, const ConstTensor& instead,
                           const std::string& text, const std::string& words) {
    std::vector<NamedTensor> tensors;
    for (const char* n : {"k", "v", "lengths", "first_tokens"})
      tensors.push_back({n, n == name ? instead : file.tensor(n)});
    std::map<std::string, std::string> meta;
    if (!text.empty()) meta["qkv.kv_cache"] = text;
    save_safetensors(folder / "bad", tensors, meta);
    const std::string error = error_text([&] { KvCache::load(folder / "bad"); });
    EXPECT_NE(error.find(words), std::string::npos) << words << " in: " << error;
    EXPECT_NE(error.find(folder / "bad"), std::string::npos) << error;
  };
  refused("", {}, "", "its metadata has no qkv.kv_cache");
  refused("", {}, "{", "the configuration cannot be read");
  refused("", {}, "{}", "the configuration cannot be read");
  const int64_t too_long[] = {3, 4}, negative[] = {3, -1}, beyond[] = {4, 0}, one[] = {3};
  refused("lengths", ConstTensor(too_long, {2}), metadata,
          "a length 4 from token 0 on does not fit 3");
  refused("lengths", ConstTensor(negative, {2}), metadata, "a length -1");
  refused("lengths", ConstTensor(one, {1}), metadata, "lengths needs i64 [2], got i64 [1]");
  refused("first_tokens", ConstTensor(beyond, {2}), metadata, "from token 4 on");
  refused("k", file.tensor("v"), metadata, "k needs f32 [2, 2, 3, 8], got f32 [2, 2, 3, 6]");
}

}  // namespace
}  // namespace qkv::test
