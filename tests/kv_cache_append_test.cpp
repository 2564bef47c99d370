// SPDX-License-Identifier: Apache-2.0
// Tier: test. KvCache::append(): all entries get their tokens or none does, whichever allocation fails;
// the same bits for any number of threads.
#include <gtest/gtest.h>

#include <cstdlib>
#include <new>
#include <numeric>
#include <string>

#include "support/caches.h"
#include "support/files.h"
#include "support/shuffled_executor.h"

namespace qkv::test {
namespace {
// Allocations of this thread until one fails; negative: none fails.
thread_local int64_t g_until_failure = -1;

void* allocate(size_t n, size_t align) {
  if (g_until_failure >= 0 && g_until_failure-- == 0) throw std::bad_alloc();
  if (void* p = std::aligned_alloc(align, (n + align) / align * align)) return p;
  throw std::bad_alloc();
}
}  // namespace
}  // namespace qkv::test

// Not inlined: gcc would take the malloc of one half and the delete of the other for a mismatch.
__attribute__((noinline)) void* operator new(size_t n) { return qkv::test::allocate(n, 16); }
__attribute__((noinline)) void* operator new(size_t n, std::align_val_t align) {
  return qkv::test::allocate(n, static_cast<size_t>(align));
}
// A sanitizer's own would not match the delete below.
__attribute__((noinline)) void* operator new(size_t n, const std::nothrow_t&) noexcept {
  return std::aligned_alloc(16, (n + 16) / 16 * 16);
}
__attribute__((noinline)) void operator delete(void* p, const std::nothrow_t&) noexcept {
  std::free(p);
}
__attribute__((noinline)) void operator delete(void* p) noexcept { std::free(p); }
__attribute__((noinline)) void operator delete(void* p, size_t) noexcept { std::free(p); }
__attribute__((noinline)) void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
__attribute__((noinline)) void operator delete(void* p, size_t, std::align_val_t) noexcept {
  std::free(p);
}

namespace qkv::test {
namespace {

KvCacheConfig with_rope(KvCacheConfig config) {
  config.rope = RopeOptions{};
  config.k_norm.assign(static_cast<size_t>(config.head_dim_qk), 1.5f);
  return config;
}

// What a cache holds: every stored number, lengths, first tokens and the error report.
struct Contents {
  std::vector<double> values;
  std::vector<int64_t> numbers;
  bool operator==(const Contents&) const = default;
};
Contents contents_of(const KvCache& cache) {
  Contents c;
  for (int64_t b = 0; b < cache.config().batch; ++b) {
    c.numbers.push_back(cache.length(b));
    c.numbers.push_back(cache.first_token(b));
    for (int64_t h = 0; h < cache.config().num_kv_heads; ++h)
      for (ConstTensor KvCacheSegment::*part : {&KvCacheSegment::k, &KvCacheSegment::v,
                                                &KvCacheSegment::k_scale, &KvCacheSegment::v_scale})
        for (const KvCacheSegment& s : cache.segments(b, h))
          if (s.*part)
            for (const double x : values(s.*part)) c.values.push_back(x);
  }
  const KvQuantError e = cache.quant_error();
  for (const double x : {e.max_abs_k, e.rms_k, e.max_relative_k, e.max_abs_v, e.rms_v})
    c.values.push_back(x);
  c.numbers.push_back(e.num_rows);
  return c;
}

// Calls f with the first, second, ... allocation failing until it succeeds; returns the failures.
template <class F>
int fail_each_allocation(const KvCache& cache, F f) {
  const Contents before = contents_of(cache);
  for (int failures = 0;; ++failures) {
    g_until_failure = failures;
    try {
      f();
      g_until_failure = -1;
      return failures;
    } catch (const std::bad_alloc&) {
      g_until_failure = -1;
      EXPECT_TRUE(contents_of(cache) == before)
          << text_of(cache.config()) << ", allocation " << failures;
    }
    if (testing::Test::HasFailure()) return -1;
  }
}

// Every kind and type; alone, and forked so that memory must be copied first.
TEST(KvCacheAppend, AnyFailingAllocation_LeavesEveryEntryAsItWas) {
  for (const KvCacheConfig& plain : all_configs())
    for (const bool rope : {false, true})
      for (const bool is_forked : {false, true}) {
        CacheModel model(rope ? with_rope(plain) : plain, 31);
        for (int i = 0; i < 4; ++i) model.append({5, 3});
        const auto twin = is_forked ? model.fork(32) : nullptr;
        const Contents of_twin = contents_of(is_forked ? twin->cache : model.cache);
        int failures = 0;
        for (const std::vector<int64_t>& counts : {std::vector<int64_t>{6, 9}, {0, 30}})
          model.append(counts, {.num_threads = 1},
                       [&](auto append) { failures += fail_each_allocation(model.cache, append); });
        EXPECT_GT(failures, 2);
        EXPECT_EQ(model.cache.length(0), 26);
        EXPECT_EQ(model.cache.length(1), 51);
        if (!rope) model.expect_same_tokens();
        if (is_forked) {
          EXPECT_TRUE(contents_of(twin->cache) == of_twin);
        }
        if (testing::Test::HasFailure()) FAIL() << text_of(plain);
      }
}

TEST(KvCacheAppend, KeepOfLast_AnyFailingAllocation_LeavesEveryEntryAsItWas) {
  for (const KvCacheConfig& config : all_configs()) {
    CacheModel model(config, 33);
    model.append({12, 9});
    const auto twin = model.fork(34);  // so memory must be copied
    const std::vector<int64_t> places = {1, 3, 4};
    EXPECT_GT(fail_each_allocation(model.cache, [&] { model.cache.keep_of_last(5, places); }), 0);
    EXPECT_EQ(model.cache.length(0), 10);
    EXPECT_EQ(model.cache.length(1), 7);
    twin->expect_same_tokens();
  }
}

TEST(KvCacheAppend, CapacityOfTheLastEntry_LeavesTheOthersAsTheyWere) {
  for (const KvCacheKind kind : {KvCacheKind::contiguous, KvCacheKind::paged})
    for (const bool is_forked : {false, true}) {
      KvCacheConfig config = small_config();
      config.kind = kind, config.page_size = 4, config.capacity = 20;
      CacheModel model(config, 35);
      model.append({2, 18});
      const auto twin = is_forked ? model.fork(36) : nullptr;
      const Contents before = contents_of(model.cache);
      const int64_t bytes = model.cache.bytes();
      model.append({3, 3});  // refused
      EXPECT_EQ(model.cache.length(0), 2);
      EXPECT_TRUE(contents_of(model.cache) == before);
      EXPECT_EQ(model.cache.bytes(), bytes);
    }
}

TEST(KvCacheAppend, AnyNumberOfThreads_SameBits) {
  for (KvCacheConfig config : all_configs()) {
    if (config.num_sink_tokens > 0 || config.window > 0) continue;
    config = with_rope(config);
    config.head_dim_qk = 64, config.head_dim_v = 48, config.capacity = 0;
    config.k_norm.assign(64, 0.7f);
    const auto filled = [&](int num_threads, Executor* executor) {
      CacheModel model(config, 37);
      for (const std::vector<int64_t>& counts : {std::vector<int64_t>{300, 150}, {1, 40}})
        model.append(counts, {.num_threads = num_threads, .executor = executor},
                     [](auto append) { append(); });
      return contents_of(model.cache);
    };
    const Contents one = filled(1, nullptr);
    for (const int num_threads : {2, 3, 7})
      EXPECT_TRUE(filled(num_threads, nullptr) == one) << text_of(config) << ", " << num_threads;
    ShuffledExecutor shuffled(38);
    EXPECT_TRUE(filled(2, &shuffled) == one) << text_of(config);
    EXPECT_GT(shuffled.num_tasks(), 4);
  }
}

// Entries of one position share sines and cosines, others do not: each is as if appended alone.
TEST(KvCacheAppend, PositionsOfEntries_AreTheirOwn) {
  std::mt19937_64 random(39);
  KvCacheConfig config = with_rope(small_config());
  TestTensor k(DType::f32, {2, 2, 5, 8}), v(DType::f32, {2, 2, 5, 6});
  k.fill_random(random), v.fill_random(random);
  const std::vector<int64_t> apart = {7, 8, 9, 3, 0, 7, 8, 2, 3, 100}, alike = {4, 4, 9, 1, 0};
  for (const ConstTensor& positions :
       {ConstTensor(apart.data(), {2, 5}), ConstTensor(alike.data(), {5})}) {
    KvCache both(config);
    both.append(k, v, {.positions = positions});
    config.batch = 1;
    for (int64_t b = 0; b < 2; ++b) {
      KvCache alone(config);
      ConstTensor own_k = k, own_v = v, own = positions;
      own_k.data = static_cast<const float*>(own_k.data) + b * own_k.stride[0];
      own_v.data = static_cast<const float*>(own_v.data) + b * own_v.stride[0];
      own_k.shape[0] = own_v.shape[0] = 1;
      if (own.rank == 2) {
        own.data = static_cast<const int64_t*>(own.data) + b * 5;
        own.shape[0] = 1;
      }
      alone.append(own_k, own_v, {.positions = own});
      for (int64_t h = 0; h < 2; ++h)
        EXPECT_EQ(values(alone.segments(0, h)[0].k), values(both.segments(b, h)[0].k));
    }
    config.batch = 2;
  }
}

}  // namespace
}  // namespace qkv::test
