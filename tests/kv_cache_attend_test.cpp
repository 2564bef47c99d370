// SPDX-License-Identifier: Apache-2.0
// Tier: test. KvCache::attend(): the bits of attention() for every kind, type and number of threads, with
// masks, bias, weights, rope, norm and trees; kept tokens and i8 against the reference.
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <string>
#include <vector>

#include "qkv/kv_cache.h"
#include "support/caches.h"
#include "support/files.h"
#include "support/run_attention.h"

namespace qkv::test {
namespace {

constexpr int64_t kHeads = 6, kKvHeads = 2, kDimQk = 40, kDimV = 33;

KvCacheConfig config_of(KvCacheKind kind, DType dtype = DType::f32, int64_t window = 0) {
  KvCacheConfig c;
  c.batch = 2, c.num_kv_heads = kKvHeads, c.head_dim_qk = kDimQk, c.head_dim_v = kDimV;
  c.kind = kind, c.dtype = dtype, c.window = window, c.page_size = 48;
  return c;
}

// Two entries of different lengths, appended in parts; queries of both.
struct Case {
  std::vector<int64_t> lengths = {300, 131};
  TestTensor q, k, v;

  explicit Case(int64_t n_q, uint64_t seed = 1, DType dtype = DType::f32) {
    std::mt19937_64 random(seed);
    const int64_t n = std::max(lengths[0], lengths[1]);
    q = TestTensor(dtype, {2, kHeads, n_q, kDimQk});
    k = TestTensor(dtype, {2, kKvHeads, n, kDimQk});
    v = TestTensor(dtype, {2, kKvHeads, n, kDimV});
    for (TestTensor* t : {&q, &k, &v}) t->fill_random(random);
  }
  KvCache cache(const KvCacheConfig& config) const {
    KvCache c(config);
    // Entry 1 gets its tokens last, all at once; the last append holds what n_q <= 130 may see.
    for (int64_t at = 0; at < lengths[0];) {
      const int64_t n = std::min<int64_t>(at == 0 ? 170 : 130, lengths[0] - at);
      const std::vector<int64_t> counts = {n, at == 0 ? 1 : n == 130 ? 130 : 0};
      TestTensor own_k(k.view().dtype, {2, kKvHeads, n, kDimQk});
      TestTensor own_v(k.view().dtype, {2, kKvHeads, n, kDimV});
      for (int64_t b = 0; b < 2; ++b)
        for (int64_t h = 0; h < kKvHeads; ++h)
          for (int64_t i = 0; i < counts[static_cast<size_t>(b)]; ++i) {
            const int64_t from = c.length(b) + i;
            for (int64_t d = 0; d < kDimQk; ++d) own_k.set(b, h, i, d, k.get(b, h, from, d));
            for (int64_t d = 0; d < kDimV; ++d) own_v.set(b, h, i, d, v.get(b, h, from, d));
          }
      c.append(own_k, own_v, {.counts = counts});
      at += n;
    }
    EXPECT_EQ(c.length(0), lengths[0]);
    EXPECT_EQ(c.length(1), lengths[1]);
    return c;
  }
  // Queries, keys and values of one entry, stored as `dtype`.
  Problem alone(int64_t b, DType dtype) const {
    Problem p;
    const int64_t n = lengths[static_cast<size_t>(b)], n_q = q.view().shape[2];
    p.extents = {1, kHeads, kKvHeads, n_q, n, kDimQk, kDimV};
    const auto copy = [&](const TestTensor& from, DType to, int64_t heads, int64_t tokens) {
      TestTensor t(to, {1, heads, tokens, from.view().shape[3]});
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t i = 0; i < tokens; ++i)
          for (int64_t d = 0; d < from.view().shape[3]; ++d)
            t.set(0, h, i, d, from.get(b, h, i, d));
      return t;
    };
    p.q = copy(q, q.view().dtype, kHeads, n_q);
    p.k = copy(k, dtype, kKvHeads, n), p.v = copy(v, dtype, kKvHeads, n);
    return p;
  }
};

struct Got {
  TestTensor out, lse, weights;
};
Got attend(const KvCache& cache, const TestTensor& q, const AttentionOptions& options = {},
           const KvQueryOptions& queries = {}) {
  const DType dtype = q.view().dtype;
  const int64_t n_q = q.view().shape[2];
  Got g;
  g.out = TestTensor(dtype, {2, kHeads, n_q, cache.config().head_dim_v});
  g.lse = TestTensor(arithmetic_dtype(dtype), {2, kHeads, n_q});
  g.weights = TestTensor(arithmetic_dtype(dtype), {2, kHeads, n_q, cache.longest()});
  cache.attend(q.view(), {.out = g.out.view(), .lse = g.lse.view(), .weights = g.weights.view()},
               options, queries);
  return g;
}

// Row i of entry b of g is row i of want.
void expect_entry(const Got& g, int64_t b, const Results& want, const std::string& text) {
  const Tensor& shape = want.weights.view();
  for (int64_t h = 0; h < kHeads; ++h)
    for (int64_t i = 0; i < shape.shape[2]; ++i) {
      for (int64_t d = 0; d < kDimV; ++d)
        ASSERT_EQ(g.out.get(b, h, i, d), want.out.get(0, h, i, d)) << text;
      ASSERT_EQ(element(g.lse.view(), g.lse.offset(b, h, i)),
                element(want.lse.view(), want.lse.offset(0, h, i)))
          << text;
      for (int64_t j = 0; j < g.weights.view().shape[3]; ++j)
        ASSERT_EQ(g.weights.get(b, h, i, j), j < shape.shape[3] ? want.weights.get(0, h, i, j) : 0)
            << text;
    }
}

TEST(KvCacheAttend, EveryKindAndType_TheBitsOfAttention) {
  for (const int64_t n_q : {1, 5, 130})
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64})
      for (const int64_t window : {0, 60}) {
        const Case c(n_q, 3, dtype == DType::f64 ? DType::f64 : DType::f32);
        for (const KvCacheKind kind :
             {KvCacheKind::contiguous, KvCacheKind::ring, KvCacheKind::paged}) {
          if (kind == KvCacheKind::ring && window == 0) continue;
          const KvCacheConfig config = config_of(kind, dtype, window);
          const KvCache cache = c.cache(config);
          AttentionOptions options;
          options.num_threads = 1;
          const Got one = attend(cache, c.q, options);
          for (const int num_threads : {2, 3, 7}) {
            options.num_threads = num_threads;
            const Got more = attend(cache, c.q, options);
            EXPECT_EQ(more.out.bits(), one.out.bits()) << num_threads << " threads";
            EXPECT_EQ(more.lse.bits(), one.lse.bits());
          }
          for (int64_t b = 0; b < 2; ++b) {
            const Problem p = c.alone(b, dtype);
            AttentionOptions o;
            o.mask = Mask::causal_bottom_right();
            if (window > 0) o.mask = o.mask & Mask::window(window - 1, -1);
            expect_entry(one, b, run_attention(p, o),
                         text_of(config) + " n_q " + std::to_string(n_q));
          }
        }
      }
}

TEST(KvCacheAttend, MasksAndBias_MeanWhatTheyMeanForTheEntryAlone) {
  constexpr int64_t kN = 7, kLongest = 300;
  const Case c(kN, 4);
  std::mt19937_64 random(5);
  MaskFactory masks({2, kHeads, kN, kLongest}, random);
  const TestTensor& seen = masks.dense(DType::boolean, {kN, kLongest});
  const TestTensor& added = masks.dense(DType::f32, {2, 1, kN, kLongest});
  const KvCache cache = c.cache(config_of(KvCacheKind::paged));
  const auto narrow = [&](ConstTensor t, int64_t b) {  // entry b, its keys
    if (t.rank == 4) {
      t.data = static_cast<const char*>(t.data) + b * t.stride[0] * size_bytes(t.dtype);
      t.shape[0] = 1;
    }
    t.shape[t.rank - 1] = c.lengths[static_cast<size_t>(b)];
    return t;
  };
  std::vector<double> slopes_of(kHeads, 0.1), sinks_of(kHeads, 0.5);
  const TestTensor slopes(DType::f32, {kHeads}, slopes_of), sinks(DType::f32, {kHeads}, sinks_of);
  for (int which = 0; which < 8; ++which) {
    const auto options = [&](int64_t b) {  // b < 0: of both
      AttentionOptions o;
      switch (which) {
        case 0:
          o.mask = Mask::window(-1, -1);
          break;
        case 1:
          o.mask = Mask::prefix(20);
          break;
        case 2:
          o.mask = Mask::chunk(50);
          break;
        case 3:
          o.mask = Mask::window(3, 0);
          break;
        case 4:
          o.mask = Mask::dense(b < 0 ? ConstTensor(seen.view()) : narrow(seen.view(), b));
          break;
        case 5:
          o.mask = Mask::causal_bottom_right();
          o.bias = b < 0 ? ConstTensor(added.view()) : narrow(added.view(), b);
          break;
        case 6:
          o.mask = Mask::causal_bottom_right();
          o.alibi_slopes = slopes.view(), o.sinks = sinks.view(), o.softcap = 3, o.scale = 0.7;
          break;
        default:
          o.mask = Mask::causal_top_left();
      }
      return o;
    };
    const Got g = attend(cache, c.q, options(-1));
    for (int64_t b = 0; b < 2; ++b)
      expect_entry(g, b, run_attention(c.alone(b, DType::f32), options(b)),
                   "mask " + std::to_string(which));
  }
}

TEST(KvCacheAttend, KeptTokens_AreAWindowWithTheFirstTokens) {
  for (const int64_t n_q : {1, 60, 131})
    for (const KvCacheKind kind :
         {KvCacheKind::contiguous, KvCacheKind::ring, KvCacheKind::paged}) {
      KvCacheConfig config = config_of(kind, DType::f32, 50);
      config.num_sink_tokens = 5;
      const Case c(n_q, 6);
      KvCache cache = c.cache(config);
      TestTensor out(DType::f32, {2, kHeads, n_q, kDimV}), lse(DType::f32, {2, kHeads, n_q});
      cache.attend(c.q.view(), {.out = out.view(), .lse = lse.view()});
      for (int64_t b = 0; b < 2; ++b) {
        Problem p = c.alone(b, DType::f32);
        const int64_t n = p.extents.n_kv;
        TestTensor seen(DType::boolean, {n_q, n});
        for (int64_t i = 0; i < n_q; ++i)
          for (int64_t j = 0; j < n; ++j) {
            const int64_t at = n - n_q + i;
            set_element(seen.view(), i * n + j, j <= at && (j < 5 || j > at - 50));
          }
        p.options.mask = Mask::dense(seen.view());
        const auto want = reference::forward(p.q, p.k, p.v, p.options);
        const NaiveErrors naive = naive_errors(p, want);
        std::vector<double> got_out, got_lse;
        for (int64_t h = 0; h < kHeads; ++h)
          for (int64_t i = 0; i < n_q; ++i) {
            got_lse.push_back(element(lse.view(), lse.offset(b, h, i)));
            for (int64_t d = 0; d < kDimV; ++d) got_out.push_back(out.get(b, h, i, d));
          }
        EXPECT_TRUE(
            within_bound("out", DType::f32, got_out, want.out, naive.out, out_magnitude(p, want)));
        EXPECT_TRUE(within_bound("lse", DType::f32, got_lse, want.lse, naive.lse, 1));
      }
    }
}

TEST(KvCacheAttend, Int8_IsAttentionOnWhatItStores) {
  for (const int64_t n_q : {1, 4, 130}) {
    const Case c(n_q, 7);
    const KvCache cache = c.cache(config_of(KvCacheKind::paged, DType::i8));
    const Got g = attend(cache, c.q);
    for (int64_t b = 0; b < 2; ++b) {
      Problem p = c.alone(b, DType::f32);
      for (int64_t h = 0; h < kKvHeads; ++h)
        for (const KvCacheSegment& s : cache.segments(b, h))
          for (int64_t i = 0; i < s.count; ++i) {
            const auto stored = [&](const ConstTensor& t, const ConstTensor& scale, int64_t d) {
              return element(scale, i) * element(t, i * t.stride[0] + d);
            };
            for (int64_t d = 0; d < kDimQk; ++d)
              p.k.set(0, h, s.begin + i, d, stored(s.k, s.k_scale, d));
            for (int64_t d = 0; d < kDimV; ++d)
              p.v.set(0, h, s.begin + i, d, stored(s.v, s.v_scale, d));
          }
      p.options.mask = Mask::causal_bottom_right();
      const auto want = reference::forward(p.q, p.k, p.v, p.options);
      const NaiveErrors naive = naive_errors(p, want);
      std::vector<double> out, lse;
      for (int64_t h = 0; h < kHeads; ++h)
        for (int64_t i = 0; i < n_q; ++i) {
          lse.push_back(element(g.lse.view(), g.lse.offset(b, h, i)));
          for (int64_t d = 0; d < kDimV; ++d) out.push_back(g.out.get(b, h, i, d));
        }
      EXPECT_TRUE(
          within_bound("out", DType::f32, out, want.out, naive.out, out_magnitude(p, want)));
      EXPECT_TRUE(within_bound("lse", DType::f32, lse, want.lse, naive.lse, 1));
    }
  }
}

TEST(KvCacheAttend, RopeAndNorm_AreThoseOfTheCaller) {
  std::mt19937_64 random(8);
  for (const RopeStyle style : {RopeStyle::half_split, RopeStyle::interleaved}) {
    constexpr int64_t kN = 9;
    const Case c(kN, 9);
    KvCacheConfig config = config_of(KvCacheKind::paged);
    config.rope = RopeOptions{.base = 500, .style = style, .rot_dim = 24};
    const KvCache cache = c.cache(config);
    const Got g = attend(cache, c.q);
    for (int64_t b = 0; b < 2; ++b) {
      Problem p = c.alone(b, DType::f32);
      const auto turn = [&](TestTensor& t, int64_t first) {
        std::vector<int64_t> positions;
        for (int64_t i = 0; i < t.view().shape[2]; ++i) positions.push_back(first + i);
        rope(t, ConstTensor(positions.data(), {t.view().shape[2]}), t.view(), *config.rope);
      };
      turn(p.k, 0);
      turn(p.q, p.extents.n_kv - kN);
      AttentionOptions o;
      o.mask = Mask::causal_bottom_right();
      expect_entry(g, b, run_attention(p, o), "rope");
    }
  }
  // A norm with weight w divides by the root of the mean square first.
  constexpr int64_t kN = 3;
  const Case c(kN, 10);
  KvCacheConfig config = config_of(KvCacheKind::contiguous, DType::f64);
  std::normal_distribution<float> normal;
  for (int64_t d = 0; d < kDimQk; ++d)
    config.k_norm.push_back(normal(random)), config.q_norm.push_back(normal(random));
  config.norm_eps = 0.01;
  const Case wide(kN, 10, DType::f64);
  const KvCache cache = wide.cache(config);
  const Got g = attend(cache, wide.q);
  for (int64_t b = 0; b < 2; ++b) {
    Problem p = wide.alone(b, DType::f64);
    const auto norm = [&](TestTensor& t, const std::vector<float>& weight) {
      for (int64_t h = 0; h < t.view().shape[1]; ++h)
        for (int64_t i = 0; i < t.view().shape[2]; ++i) {
          double squares = 0;
          for (int64_t d = 0; d < kDimQk; ++d) squares += t.get(0, h, i, d) * t.get(0, h, i, d);
          for (int64_t d = 0; d < kDimQk; ++d)
            t.set(0, h, i, d,
                  t.get(0, h, i, d) * (1 / std::sqrt(squares / kDimQk + 0.01)) *
                      static_cast<double>(weight[static_cast<size_t>(d)]));
        }
    };
    norm(p.k, config.k_norm), norm(p.q, config.q_norm);
    AttentionOptions o;
    o.mask = Mask::causal_bottom_right();
    expect_entry(g, b, run_attention(p, o), "norm");
  }
}

TEST(KvCacheAttend, Counts_OtherRowsArePadding) {
  constexpr int64_t kN = 6;
  const Case c(kN, 11);
  const KvCache cache = c.cache(config_of(KvCacheKind::contiguous));
  const std::vector<int64_t> counts = {2, 5};
  const Got g = attend(cache, c.q, {}, {.counts = counts});
  for (int64_t b = 0; b < 2; ++b) {
    Problem few = c.alone(b, DType::f32);
    const int64_t n = counts[static_cast<size_t>(b)];
    few.extents.n_q = n;
    few.q = TestTensor(DType::f32, {1, kHeads, n, kDimQk});
    for (int64_t h = 0; h < kHeads; ++h)
      for (int64_t i = 0; i < n; ++i)
        for (int64_t d = 0; d < kDimQk; ++d) few.q.set(0, h, i, d, c.q.get(b, h, i, d));
    AttentionOptions o;
    o.mask = Mask::causal_bottom_right();
    expect_entry(g, b, run_attention(few, o), "counts");
    for (int64_t h = 0; h < kHeads; ++h)
      for (int64_t i = n; i < kN; ++i) {
        EXPECT_EQ(element(g.lse.view(), g.lse.offset(b, h, i)),
                  -std::numeric_limits<double>::infinity());
        for (int64_t d = 0; d < kDimV; ++d) EXPECT_EQ(g.out.get(b, h, i, d), 0);
        for (int64_t j = 0; j < 300; ++j) EXPECT_EQ(g.weights.get(b, h, i, j), 0);
      }
  }
}

TEST(KvCacheAttend, Tree_EveryNodeSeesItsOwnPath) {
  // The last seven tokens are two branches with twigs: a node's result is that of the sequence with its
  // path alone, rope at its depth.
  const std::vector<int64_t> parents = {-1, 0, 0, 1, 2, 4, -1};
  constexpr int64_t kN = 7;
  Case c(kN, 12);
  c.lengths = {300, 300};
  KvCacheConfig config = config_of(KvCacheKind::paged);
  config.rope = RopeOptions{};
  std::vector<int64_t> depth;
  for (const int64_t parent : parents)
    depth.push_back(parent < 0 ? 0 : depth[static_cast<size_t>(parent)] + 1);
  const int64_t before = 300 - kN;
  const auto slice = [](const TestTensor& t, int64_t first, int64_t n) {
    ConstTensor view = t.view();
    view.data = static_cast<const float*>(view.data) + first * view.stride[2];
    view.shape[2] = n;
    return view;
  };
  KvCache cache(config);
  cache.append(slice(c.k, 0, before), slice(c.v, 0, before));
  const KvCache prompt = cache.fork();
  std::vector<int64_t> positions;
  for (const int64_t d : depth) positions.push_back(before + d);
  const ConstTensor at(positions.data(), {kN});
  cache.append(slice(c.k, before, kN), slice(c.v, before, kN), {.positions = at});
  TestTensor out(DType::f32, {2, kHeads, kN, kDimV});
  cache.attend_tree(c.q.view(), parents, {.out = out.view()}, {}, {.positions = at});
  for (int64_t node = 0; node < kN; ++node) {
    std::vector<int64_t> path;
    for (int64_t n = node; n >= 0; n = parents[static_cast<size_t>(n)])
      path.insert(path.begin(), n);
    KvCache line = prompt.fork();
    for (const int64_t n : path) line.append(slice(c.k, before + n, 1), slice(c.v, before + n, 1));
    TestTensor want(DType::f32, {2, kHeads, 1, kDimV});
    line.attend(slice(c.q, node, 1), {.out = want.view()});
    std::vector<double> got;
    for (int64_t b = 0; b < 2; ++b)
      for (int64_t h = 0; h < kHeads; ++h)
        for (int64_t d = 0; d < kDimV; ++d) got.push_back(out.get(b, h, node, d));
    EXPECT_TRUE(within_bound("node", DType::f32, got, want.values(), 0, 1)) << node;
    // The accepted path stays: the cache continues as the line does, bit for bit.
    KvCache accepted = cache.fork();
    accepted.keep_of_last(kN, path);
    TestTensor after(DType::f32, {2, kHeads, 1, kDimV});
    accepted.attend(slice(c.q, node, 1), {.out = after.view()});
    EXPECT_EQ(after.bits(), want.bits()) << node;
  }
}

TEST(KvCacheAttend, Errors) {
  const Case c(4, 13);
  KvCache cache = c.cache(config_of(KvCacheKind::contiguous));
  TestTensor out(DType::f32, {2, kHeads, 4, kDimV});
  const auto refused = [&](auto call, const std::string& words) {
    const std::string text = error_text(call);
    EXPECT_NE(text.find(words), std::string::npos) << words << " in: " << text;
    EXPECT_TRUE(std::isnan(out.get(0, 0, 0, 0))) << "written before " << words;
  };
  const AttentionOutputs outputs{.out = out.view()};
  TestTensor long_q(DType::f32, {2, kHeads, 301, kDimQk}), wide_q(DType::f32, {2, kHeads, 4, 41});
  TestTensor odd_q(DType::f32, {2, 5, 4, kDimQk}), f64_q(DType::f64, {2, kHeads, 4, kDimQk});
  refused([&] { cache.attend(long_q, outputs); },
          "the queries are the last 301 tokens, but length is 300, got q [2, 6, 301, 40]");
  refused([&] { cache.attend(wide_q, outputs); }, "q needs shape [2, num_heads, n_q, 40]");
  refused([&] { cache.attend(odd_q, outputs); }, "num_heads 5 is not a multiple of num_kv_heads 2");
  refused([&] { cache.attend(f64_q, {}); }, "f64 goes with f64 only");
  TestTensor small(DType::f32, {2, kHeads, 3, kDimV});
  refused([&] { cache.attend(c.q, {.out = small.view()}); }, "outputs.out needs shape");
  const std::vector<int64_t> counts = {1, 200}, one = {1};
  refused([&] { cache.attend(c.q, outputs, {}, {.counts = counts}); },
          "a count must lie in [0, 4], got 200");
  refused([&] { cache.attend(c.q, outputs, {}, {.counts = one}); }, "one number per batch entry");
  TestTensor positions(DType::i64, {4});
  refused([&] { cache.attend(c.q, outputs, {}, {.positions = positions.view()}); },
          "this cache has none");
  TestTensor short_mask(DType::boolean, {4, 299});
  short_mask.fill(1);
  AttentionOptions o;
  o.mask = Mask::dense(short_mask.view());
  refused([&] { cache.attend(c.q, outputs, o); }, "mask does not broadcast");
  const std::vector<int64_t> loop = {-1, 1, 0, 0}, few = {-1};
  refused([&] { cache.attend_tree(c.q, loop, outputs); }, "parents[1] must lie in [-1, 1), got 1");
  refused([&] { cache.attend_tree(c.q, few, outputs); }, "one parent for each of the n_q queries");
  KvCacheConfig kept = config_of(KvCacheKind::ring, DType::f32, 50);
  kept.num_sink_tokens = 2;
  const KvCache ring = c.cache(kept);
  refused([&] { ring.attend(c.q, outputs, o); }, "num_sink_tokens takes no mask");
  const std::vector<int64_t> line = {-1, 0, 1, 2};
  refused([&] { ring.attend_tree(c.q, line, outputs); }, "a window counts tokens in a line");
}

}  // namespace
}  // namespace qkv::test
