// SPDX-License-Identifier: Apache-2.0
// Tier: test. KvCache: append, truncate, fork, clear and keep_of_last of every kind and type against a
// plain list of tokens. Memory that was not written is NaN.
#include "qkv/kv_cache.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <string>

#include "support/caches.h"
#include "support/files.h"

// Fresh memory of the cache is NaN in every type.
__attribute__((noinline)) void* operator new(size_t n, std::align_val_t align) {
  const auto a = static_cast<size_t>(align);
  void* p = std::aligned_alloc(a, (n + a) / a * a);
  if (!p) throw std::bad_alloc();
  std::memset(p, 0xFF, n);
  return p;
}
__attribute__((noinline)) void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
__attribute__((noinline)) void operator delete(void* p, size_t, std::align_val_t) noexcept {
  std::free(p);
}

namespace qkv::test {
namespace {

TEST(KvCache, TokenByToken_SameTokensAsAtOnce) {
  for (const KvCacheConfig& config : all_configs()) {
    CacheModel one(config, 1), all(config, 1);
    for (int i = 0; i < 30; ++i) one.append({1, 1});
    all.append_all_of(one);
    one.expect_same_tokens(one.cache.first_token(0));
    all.expect_same_tokens(0);
    EXPECT_EQ(one.cache.length(1), 30);
    one.expect_attends(1);
    one.expect_same_bits(all, 1);
  }
}

// 10,000 operations: caches and their forks, entries of different lengths, every kind and type; a quarter
// of the queries asks for every form of the weights.
TEST(KvCache, RandomOperations) {
  const std::vector<KvCacheConfig> configs = all_configs();
  const int per_config = 10'000 / static_cast<int>(configs.size()) + 1;
  uint64_t seed = 1;
  int64_t done = 0;
  for (const KvCacheConfig& config : configs) {
    std::mt19937_64 random(seed++);
    const auto below = [&](int64_t n) {
      return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
    };
    std::vector<std::unique_ptr<CacheModel>> caches;
    caches.push_back(std::make_unique<CacheModel>(config, seed));
    for (int i = 0; i < per_config; ++i, ++done) {
      CacheModel& model = *caches[static_cast<size_t>(below(static_cast<int64_t>(caches.size())))];
      SCOPED_TRACE(text_of(config) + " operation " + std::to_string(i));
      switch (below(12)) {
        case 0:
        case 1:
        case 2:
        case 3:
          model.append({below(4), below(8)});
          break;
        case 4:
          model.append({below(40), 1});
          break;
        case 5:
          model.truncate({below(60), below(60)});
          break;
        case 6:
          if (caches.size() < 4) {
            caches.push_back(model.fork(seed * 1000 + static_cast<uint64_t>(i)));
          } else if (&model != caches[0].get()) {
            std::erase_if(caches, [&](const auto& c) { return c.get() == &model; });
            continue;  // model is gone
          }
          break;
        case 7:
          if (below(4) == 0) {
            model.clear();
          } else {
            model.cache.reserve(below(30));
          }
          break;
        case 8:
          model.keep_of_last(below(6));
          break;
        default:
          model.expect_attends(1 + below(4), below(4) == 0);
      }
      if (below(10) == 0) model.expect_same_tokens();
      if (testing::Test::HasFailure()) return;
    }
    for (const auto& model : caches) model->expect_same_tokens();
  }
  EXPECT_GE(done, 10'000);
}

TEST(KvCache, Fork_SharesMemoryUntilOneWrites) {
  KvCacheConfig config = small_config();
  config.kind = KvCacheKind::paged, config.page_size = 4;
  CacheModel a(config, 3);
  a.append({8, 8});
  const auto b = a.fork(4);
  const auto k_of = [](const CacheModel& m, size_t page) {
    return m.cache.segments(0, 0)[page].k.data;
  };
  EXPECT_EQ(k_of(a, 0), k_of(*b, 0));
  b->append({1, 1});
  EXPECT_EQ(k_of(a, 0), k_of(*b, 0));
  EXPECT_EQ(k_of(a, 1), k_of(*b, 1));  // a full page is never written again
  b->truncate({6, 6});
  b->append({1, 1});
  EXPECT_NE(k_of(a, 1), k_of(*b, 1));
  a.expect_same_tokens();
  b->expect_same_tokens();
}

TEST(KvCache, Appending_NeverCopiesThePast) {
  KvCacheConfig config = small_config();
  config.capacity = 1000;
  CacheModel m(config, 5);
  m.append({1, 1});
  const void* first = m.cache.segments(0, 0)[0].k.data;
  const int64_t bytes = m.cache.bytes();
  EXPECT_EQ(bytes % (2 * 1000), 0);
  for (int i = 0; i < 99; ++i) m.append({10, 10});
  EXPECT_EQ(m.cache.segments(0, 0)[0].k.data, first);
  EXPECT_EQ(m.cache.bytes(), bytes);
  // Without a capacity the memory doubles: few moves.
  config.capacity = 0;
  CacheModel grows(config, 5);
  int moves = 0;
  const void* last = nullptr;
  for (int i = 0; i < 1000; ++i) {
    grows.append({1, 1});
    const void* now = grows.cache.segments(0, 0)[0].k.data;
    moves += now != last;
    last = now;
  }
  EXPECT_LE(moves, 12);
  // A ring stays as it is.
  config.kind = KvCacheKind::ring, config.window = 16, config.page_size = 8;
  CacheModel ring(config, 5);
  ring.append({8, 8});
  const int64_t ring_bytes = ring.cache.bytes();
  for (int i = 0; i < 200; ++i) ring.append({1 + i % 8, 1});
  EXPECT_EQ(ring.cache.bytes(), ring_bytes);
  // 16 - 1 + 8 slots of two heads, K and V each rounded up to 128 bytes, for two entries.
  EXPECT_EQ(ring_bytes, 2 * ((2 * 23 * 8 * 4 + 127) / 128 + (2 * 23 * 6 * 4 + 127) / 128) * 128);
}

TEST(KvCache, Errors_ChangeNothing) {
  KvCacheConfig config = small_config();
  config.capacity = 10;
  CacheModel m(config, 6);
  m.append({7, 3});
  TestTensor k(DType::f32, {2, 2, 4, 8}), v(DType::f32, {2, 2, 4, 6});
  const auto refused = [&](auto call, const std::string& words) {
    const std::string text = error_text(call);
    EXPECT_NE(text.find(words), std::string::npos) << words << " in: " << text;
    m.expect_same_tokens();
    EXPECT_EQ(m.cache.length(0), 7);
    EXPECT_EQ(m.cache.length(1), 3);
  };
  refused([&] { m.cache.append(k.view(), v.view()); },
          "KvCache::append: 4 tokens do not fit, length 7 of capacity 10, got k [2, 2, 4, 8]");
  refused([&] { m.cache.append(v.view(), k.view()); }, "k needs shape [2, 2, n, 8]");
  TestTensor longer(DType::f32, {2, 2, 5, 6}), integers(DType::i32, {2, 2, 4, 8});
  refused([&] { m.cache.append(k.view(), longer.view()); }, "k and v differ in tokens");
  refused([&] { m.cache.append(integers.view(), v.view()); }, "must be floating point, got i32");
  const std::vector<int64_t> bad = {1, 5}, one = {1}, few = {1, 1};
  refused([&] { m.cache.append(k.view(), v.view(), {.counts = bad}); },
          "a count must lie in [0, 4]");
  refused([&] { m.cache.append(k.view(), v.view(), {.counts = one}); },
          "one number per batch entry");
  TestTensor positions(DType::i64, {4});
  refused(
      [&] { m.cache.append(k.view(), v.view(), {.counts = few, .positions = positions.view()}); },
      "this cache has none");
  refused([&] { m.cache.truncate(-1); }, "must not be negative, got -1");
  refused([&] { m.cache.truncate(one); }, "one length per batch entry");
  refused([&] { m.cache.reserve(11); }, "11 tokens do not fit the capacity 10");
  refused([&] { m.cache.keep_of_last(4, one); }, "the last 4 tokens are not held, length 3");
  refused([&] { m.cache.keep_of_last(1, one); }, "places must ascend within [0, 1)");
  refused([&] { m.cache.segments(2, 0); }, "batch entry 2 of 2");
  refused([&] { m.cache.segments(0, 2); }, "head 2 of 2");

  TestTensor query(DType::f32, {2, 2, 1, 8}), entropy(DType::f32, {2, 2, 2});
  refused([&] { m.cache.attend(query.view(), {.entropy = entropy.view()}); },
          "outputs.entropy needs shape [2, 2, 1], got [2, 2, 2]");
  const std::vector<int64_t> rows = {0, 1};
  TestTensor row_weights(DType::f32, {2, 2, 2, 7});
  refused(
      [&] {
        m.cache.attend(query.view(), {.weight_rows = ConstTensor(rows.data(), {2}),
                                      .row_weights = row_weights.view()});
      },
      "outputs.weight_rows must lie in [0, n_q 1), got 1 at index 1");
  refused([&] { m.cache.append(k.view(), v.view(), {.num_threads = -1}); },
          "num_threads must not be negative, got -1");

  KvCacheConfig kept = small_config();
  kept.window = 9, kept.num_sink_tokens = 3;
  const KvCache keeps(kept);
  TestTensor no_query(DType::f32, {2, 2, 0, 8}), no_entropy(DType::f32, {2, 2, 0});
  EXPECT_NE(error_text([&] {
              keeps.attend(no_query.view(), {.entropy = no_entropy.view()});
            }).find("forms of the weights are not made here"),
            std::string::npos);

  const auto refused_config = [&](auto change, const std::string& words) {
    KvCacheConfig c = small_config();
    change(c);
    EXPECT_NE(error_text([&] { KvCache cache(c); }).find(words), std::string::npos) << words;
  };
  refused_config([](KvCacheConfig& c) { c.batch = -1; }, "sizes must not be negative, got -1");
  refused_config([](KvCacheConfig& c) { c.page_size = 0; }, "page_size must be positive");
  refused_config([](KvCacheConfig& c) { c.dtype = DType::i32; }, "got i32");
  refused_config([](KvCacheConfig& c) { c.kind = KvCacheKind::ring; }, "a ring needs a window");
  refused_config([](KvCacheConfig& c) { c.num_sink_tokens = 1; }, "num_sink_tokens");
  refused_config([](KvCacheConfig& c) { c.k_norm = {1}; }, "head_dim_qk 8 weights, got 1");
  refused_config([](KvCacheConfig& c) { c.rope = RopeOptions{.rot_dim = 3}; },
                 "rot_dim must be even");
  refused_config([](KvCacheConfig& c) { c.capacity = INT64_MAX / 2; }, "too large");
}

TEST(KvCache, Ring_RefusesToGoBackTooFar) {
  KvCacheConfig config = small_config();
  config.kind = KvCacheKind::ring, config.window = 8, config.page_size = 4;
  CacheModel m(config, 7);
  m.append({30, 30});
  for (int i = 0; i < 40; ++i) m.append({1, 1});
  // 30 + 7 slots: the tokens [33, 70).
  EXPECT_EQ(m.cache.first_token(), 33);
  EXPECT_NE(
      error_text([&] { m.cache.truncate(39); }).find("the ring has lost what token 39 may see"),
      std::string::npos);
  m.truncate({40, 70});
  m.expect_attends(1);  // refused for entry 0: token 32 is lost
  m.append({3, 3});
  m.expect_attends(3);
}

TEST(KvCache, FromBuffers_WritesToTheCallersMemory) {
  std::mt19937_64 random(8);
  for (const Layout layout : {Layout::contiguous, Layout::bshd, Layout::padded, Layout::reversed}) {
    TestTensor k(DType::f32, {2, 2, 9, 8}, layout), v(DType::f32, {2, 2, 9, 6}, layout);
    KvCacheConfig config = small_config();
    config.capacity = 9;
    CacheModel m(config, 9);
    const std::vector<int64_t> none = {0, 0};
    m.cache = KvCache::from_buffers(k.view(), v.view(), none);
    m.append({4, 7});
    const auto twin = m.fork(10);
    m.append({2, 1});
    twin->append({1, 2});
    m.expect_attends(2);
    twin->expect_attends(2);
    m.expect_same_tokens();
    twin->expect_same_tokens();
    EXPECT_EQ(k.get(1, 1, 7, 3),
              element(m.cache.segments(1, 1)[0].k, 7 * m.cache.segments(1, 1)[0].k.stride[0] + 3));
    EXPECT_TRUE(std::isnan(k.get(1, 0, 8, 0)));
    EXPECT_TRUE(k.is_padding_untouched() && v.is_padding_untouched());
    TestTensor more(DType::f32, {2, 2, 4, 8}), more_v(DType::f32, {2, 2, 4, 6});
    EXPECT_NE(error_text([&] { m.cache.append(more.view(), more_v.view()); }).find("capacity 9"),
              std::string::npos);
    const std::vector<int64_t> too_long = {0, 10};
    EXPECT_NE(error_text([&] {
                KvCache::from_buffers(k.view(), v.view(), too_long);
              }).find("a length must lie in [0, 9], got 10"),
              std::string::npos);
  }
}

TEST(KvCache, Int8_ErrorReport) {
  KvCacheConfig config = small_config();
  config.dtype = DType::i8;
  CacheModel m(config, 11);
  EXPECT_EQ(m.cache.quant_error().num_rows, 0);
  m.append({50, 50});
  const KvQuantError e = m.cache.quant_error();
  EXPECT_EQ(e.num_rows, 2 * 2 * 50);
  // Half a step of 1 / 127 of the largest, and that step is reached nearly.
  EXPECT_LE(e.max_relative_k, 0.5 / 127 * 1.0001);
  EXPECT_GE(e.max_relative_k, 0.45 / 127);
  EXPECT_GT(e.max_abs_v, e.rms_v);
  EXPECT_NEAR(e.rms_k, m.rms_k_error(), 1e-9 + 1e-6 * e.rms_k);
  m.expect_attends(2);
}

TEST(KvCache, Int8_NanAndInfOfATokenStayInItsRows) {
  KvCacheConfig config = small_config();
  config.dtype = DType::i8;
  CacheModel m(config, 12);
  m.append({3, 3});
  m.append_value(std::numeric_limits<double>::infinity());
  const TestTensor out = m.attend(1);
  EXPECT_TRUE(std::isnan(out.get(0, 0, 0, 0)));
  m.append({2, 2});
  std::vector<uint8_t> seen = {1, 1, 1, 0, 1, 1};
  AttentionOptions hides;
  const int64_t shape[] = {1, 6};
  hides.mask = Mask::dense(ConstTensor(seen.data(), DType::boolean, shape));
  for (const double x : m.attend(1, hides).values()) EXPECT_TRUE(std::isfinite(x));
  for (const double x : m.attend(4, hides).values()) EXPECT_TRUE(std::isfinite(x));
}

}  // namespace
}  // namespace qkv::test
