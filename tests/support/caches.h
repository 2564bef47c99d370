// SPDX-License-Identifier: Apache-2.0
// Tier: test. A KvCache beside a plain list of its tokens, and every configuration of the tests.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "qkv/kv_cache.h"
#include "support/all_outputs.h"
#include "support/tensors.h"

namespace qkv::test {

inline KvCacheConfig small_config() {
  KvCacheConfig c;
  c.batch = 2, c.num_kv_heads = 2, c.head_dim_qk = 8, c.head_dim_v = 6;
  return c;
}

inline std::string text_of(const KvCacheConfig& c) {
  static const char* kinds[] = {"contiguous", "ring", "paged"};
  return std::string(kinds[static_cast<size_t>(c.kind)]) + " " + std::string(name(c.dtype)) +
         " window " + std::to_string(c.window) + " num_sink_tokens " +
         std::to_string(c.num_sink_tokens) + " capacity " + std::to_string(c.capacity);
}

/// All kinds and types, with and without a window and kept tokens.
inline std::vector<KvCacheConfig> all_configs() {
  std::vector<KvCacheConfig> all;
  for (const KvCacheKind kind : {KvCacheKind::contiguous, KvCacheKind::ring, KvCacheKind::paged})
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64, DType::i8})
      for (const int64_t window : {0, 9})
        for (const int64_t num_sink_tokens : {0, 3}) {
          KvCacheConfig c = small_config();
          c.kind = kind, c.dtype = dtype, c.window = window, c.num_sink_tokens = num_sink_tokens;
          c.page_size = 4;
          if (kind == KvCacheKind::contiguous && dtype != DType::f32) c.capacity = 120;
          if (window == 0 && (kind == KvCacheKind::ring || num_sink_tokens > 0)) continue;
          all.push_back(c);
        }
  return all;
}

/// Tokens are drawn from a normal distribution and rounded to f32 (f64 for f64).
class CacheModel {
 public:
  static constexpr int64_t kHeads = 4;  // of queries

  CacheModel(const KvCacheConfig& config, uint64_t seed)
      : cache(config),
        config_(config),
        random_(seed),
        tokens_(static_cast<size_t>(config.batch)),
        last_(static_cast<size_t>(config.batch)) {}

  KvCache cache;

  int64_t length(int64_t b) const { return static_cast<int64_t>(at(b).size()); }

  /// counts[b] new tokens for entry b.
  void append(const std::vector<int64_t>& counts) {
    append(counts, {}, [](auto&& append) { append(); });
  }
  /// The same; `call` gets a function that appends, and returns when that has succeeded.
  template <class Call>
  void append(const std::vector<int64_t>& counts, KvAppendOptions options, Call call) {
    const int64_t n = *std::max_element(counts.begin(), counts.end()) + draw(2);
    TestTensor k(input(), {config_.batch, config_.num_kv_heads, n, config_.head_dim_qk});
    TestTensor v(input(), {config_.batch, config_.num_kv_heads, n, config_.head_dim_v});
    bool fits = true;
    for (int64_t b = 0; b < config_.batch; ++b) {
      const int64_t count = counts[static_cast<size_t>(b)];
      fits &= config_.kind == KvCacheKind::ring || config_.capacity == 0 ||
              length(b) + count <= config_.capacity;
      for (TestTensor* t : {&k, &v}) {  // padding stays NaN
        for (int64_t h = 0; h < config_.num_kv_heads; ++h)
          for (int64_t i = 0; i < count; ++i)
            for (int64_t d = 0; d < t->view().shape[3]; ++d) t->set(b, h, i, d, normal_(random_));
      }
    }
    if (!fits) {
      EXPECT_THROW(cache.append(k.view(), v.view(), {.counts = counts}), Error);
      return;
    }
    options.counts = counts;
    call([&] { cache.append(k.view(), v.view(), options); });
    take(k, v, counts);
  }
  /// All tokens of another cache whose entries have one length, at once.
  void append_all_of(const CacheModel& other) {
    const int64_t n = other.length(0);
    TestTensor k(input(), {config_.batch, config_.num_kv_heads, n, config_.head_dim_qk});
    TestTensor v(input(), {config_.batch, config_.num_kv_heads, n, config_.head_dim_v});
    for (int64_t b = 0; b < config_.batch; ++b)
      for (int64_t h = 0; h < config_.num_kv_heads; ++h)
        for (int64_t i = 0; i < n; ++i) {
          const Token& token = other.at(b)[static_cast<size_t>(i)];
          for (int64_t d = 0; d < config_.head_dim_qk; ++d)
            k.set(b, h, i, d, token.k[static_cast<size_t>(h)][static_cast<size_t>(d)]);
          for (int64_t d = 0; d < config_.head_dim_v; ++d)
            v.set(b, h, i, d, token.v[static_cast<size_t>(h)][static_cast<size_t>(d)]);
        }
    cache.append(k.view(), v.view());
    take(k, v, std::vector<int64_t>(static_cast<size_t>(config_.batch), n));
  }
  /// One token of every entry, all elements x.
  void append_value(double x) {
    TestTensor k(input(), {config_.batch, config_.num_kv_heads, 1, config_.head_dim_qk});
    TestTensor v(input(), {config_.batch, config_.num_kv_heads, 1, config_.head_dim_v});
    cache.append(k.fill(x).view(), v.fill(x).view());
    take(k, v, std::vector<int64_t>(static_cast<size_t>(config_.batch), 1));
  }

  void truncate(const std::vector<int64_t>& lengths) {
    bool lost = false;
    for (int64_t b = 0; b < config_.batch; ++b) {
      const int64_t n = lengths[static_cast<size_t>(b)];
      lost |= n < length(b) && n > kept() &&
              cache.first_token(b) > std::max(kept(), n - config_.window + 1);
    }
    if (lost) {
      EXPECT_THROW(cache.truncate(lengths), Error);
      return;
    }
    cache.truncate(lengths);
    for (int64_t b = 0; b < config_.batch; ++b) {
      const auto n = static_cast<size_t>(lengths[static_cast<size_t>(b)]);
      if (n < at(b).size()) at(b).resize(n), last_[static_cast<size_t>(b)] = 0;
    }
  }
  void clear() {
    cache.clear();
    for (int64_t b = 0; b < config_.batch; ++b) at(b).clear();
  }
  /// Every second of the last n tokens.
  void keep_of_last(int64_t n) {
    std::vector<int64_t> places;
    for (int64_t i = n % 2; i < n; i += 2) places.push_back(i);
    bool held = true;
    for (int64_t b = 0; b < config_.batch; ++b)
      held &= length(b) >= n && length(b) - n >= cache.first_token(b);
    if (!held) {
      EXPECT_THROW(cache.keep_of_last(n, places), Error);
      return;
    }
    cache.keep_of_last(n, places);
    for (int64_t b = 0; b < config_.batch; ++b) {
      Tokens& tokens = at(b);
      const size_t base = tokens.size() - static_cast<size_t>(n);
      for (size_t i = 0; i < places.size(); ++i)
        tokens[base + i] = tokens[base + static_cast<size_t>(places[i])];
      tokens.resize(base + places.size());
      last_[static_cast<size_t>(b)] = 0;
    }
  }
  std::unique_ptr<CacheModel> fork(uint64_t seed) const {
    auto twin = std::make_unique<CacheModel>(config_, seed);
    twin->cache = cache.fork();
    twin->tokens_ = tokens_, twin->last_ = last_;
    return twin;
  }

  /// The stored rows are the list's, rounded; every token from `first` on is there.
  void expect_same_tokens(int64_t first = -1) const {
    for (int64_t b = 0; b < config_.batch; ++b) {
      ASSERT_EQ(cache.length(b), length(b));
      for (int64_t h = 0; h < config_.num_kv_heads; ++h) {
        int64_t next = 0;
        for (const KvCacheSegment& s : cache.segments(b, h)) {
          if (s.begin != next) {  // what the ring has lost
            EXPECT_EQ(s.begin, std::max(cache.first_token(b), kept()));
            EXPECT_TRUE(next == kept());
          }
          next = s.begin + s.count;
          for (int64_t i = 0; i < s.count; ++i) {
            const Token& token = at(b)[static_cast<size_t>(s.begin + i)];
            expect_row(s.k, s.k_scale, i, token.k[static_cast<size_t>(h)]);
            expect_row(s.v, s.v_scale, i, token.v[static_cast<size_t>(h)]);
          }
        }
        EXPECT_EQ(next, length(b));
      }
      if (first >= 0) {
        EXPECT_EQ(cache.first_token(b), first);
      }
    }
  }

  TestTensor random_query(int64_t n_q) {
    TestTensor q(input(), {config_.batch, kHeads, n_q, config_.head_dim_qk});
    q.fill_random(random_);
    return q;
  }
  TestTensor attend(int64_t n_q, const AttentionOptions& options = {}) {
    TestTensor out(input(), {config_.batch, kHeads, n_q, config_.head_dim_v});
    cache.attend(random_query(n_q).view(), {.out = out.view()}, options);
    return out;
  }

  /// attend() has the bits of attention() on the listed tokens of each entry alone; where that has
  /// no such call (i8, kept tokens), those of a contiguous cache of one entry, filled at once.
  void expect_attends(int64_t n_q, bool with_forms = true) {
    const TestTensor q = random_query(n_q);
    bool guaranteed = true, held = true;
    int64_t longest = 0;
    for (int64_t b = 0; b < config_.batch; ++b) {
      const int64_t n = std::min(n_q, length(b));
      longest = std::max(longest, length(b));
      guaranteed &= n <= last_[static_cast<size_t>(b)];
      held &=
          n == 0 || cache.first_token(b) <= std::max(kept(), length(b) - n - config_.window + 1);
    }
    with_forms &= config_.num_sink_tokens == 0;  // no weights where tokens are kept
    const auto outputs = [&](int64_t batch, int64_t rows, int64_t keys,
                             const std::vector<int64_t>& weight_rows) {
      const Extents e{
          batch, kHeads, config_.num_kv_heads, rows, keys, config_.head_dim_qk, config_.head_dim_v};
      return with_forms ? AllOutputs(input(), e, weight_rows, 3) : AllOutputs(input(), e);
    };
    const AllOutputs all = outputs(config_.batch, n_q, longest, {n_q - 1, 0, draw(n_q)});
    if (n_q > longest || (config_.kind == KvCacheKind::ring && !held)) {
      EXPECT_FALSE(n_q <= longest && guaranteed) << "a ring holds what its last append may see";
      EXPECT_THROW(cache.attend(q.view(), all.view()), Error);
      return;
    }
    cache.attend(q.view(), all.view());
    for (int64_t b = 0; b < config_.batch; ++b) {
      const int64_t n = std::min(n_q, length(b)), padding = n_q - n;
      TestTensor own_q(input(), {1, kHeads, n, config_.head_dim_qk});
      for (int64_t h = 0; h < kHeads; ++h)
        for (int64_t i = 0; i < n; ++i)
          for (int64_t d = 0; d < config_.head_dim_qk; ++d)
            own_q.set(0, h, i, d, q.get(b, h, padding + i, d));
      const AllOutputs alone = outputs(1, n, length(b), rows_within(all.weight_rows, padding, n));
      attend_alone(b, own_q, alone.view());
      const std::string text = text_of(config_) + ", length " + std::to_string(length(b));
      expect_part(all, b, padding, 0, alone, text);
      expect_padding(all, b, 0, padding);
      if (with_forms) expect_no_columns(all, b, length(b));
      if (testing::Test::HasFailure()) return;
    }
  }
  /// Two caches of the same tokens give the same bits.
  void expect_same_bits(CacheModel& other, int64_t n_q) {
    const TestTensor q = random_query(n_q);
    TestTensor a(input(), {config_.batch, kHeads, n_q, config_.head_dim_v}), b = copy_of(a);
    cache.attend(q.view(), {.out = a.view()});
    other.cache.attend(q.view(), {.out = b.view()});
    EXPECT_TRUE(tokens_ == other.tokens_);
    EXPECT_EQ(a.bits(), b.bits()) << text_of(config_);
  }

  /// Root of the mean square of what rounding did to K.
  double rms_k_error() const {
    double squares = 0, elements = 0;
    for (int64_t b = 0; b < config_.batch; ++b)
      for (int64_t h = 0; h < config_.num_kv_heads; ++h)
        for (const KvCacheSegment& s : cache.segments(b, h))
          for (int64_t i = 0; i < s.count; ++i)
            for (int64_t d = 0; d < config_.head_dim_qk; ++d, ++elements) {
              const double scale = element(s.k_scale, i);
              const double stored = static_cast<float>(scale * element(s.k, i * s.k.stride[0] + d));
              const double x = at(b)[static_cast<size_t>(s.begin + i)]
                                   .k[static_cast<size_t>(h)][static_cast<size_t>(d)];
              squares += (x - stored) * (x - stored);
            }
    return std::sqrt(squares / elements);
  }

  /// The tokens of an entry: what 0 is k, 1 is v.
  TestTensor tokens_of(int64_t b, int what) const {
    const int64_t dim = what == 0 ? config_.head_dim_qk : config_.head_dim_v;
    const DType dtype = config_.dtype == DType::i8 ? DType::f32 : config_.dtype;
    TestTensor t(dtype, {1, config_.num_kv_heads, length(b), dim});
    for (int64_t h = 0; h < config_.num_kv_heads; ++h)
      for (int64_t j = 0; j < length(b); ++j) {
        const Token& token = at(b)[static_cast<size_t>(j)];
        const auto& row = (what == 0 ? token.k : token.v)[static_cast<size_t>(h)];
        for (int64_t d = 0; d < dim; ++d) t.set(0, h, j, d, row[static_cast<size_t>(d)]);
      }
    return t;
  }

 private:
  struct Token {
    std::vector<std::vector<double>> k, v;  // [head][d]
    bool operator==(const Token&) const = default;
  };
  using Tokens = std::vector<Token>;

  const Tokens& at(int64_t b) const { return tokens_[static_cast<size_t>(b)]; }
  Tokens& at(int64_t b) { return tokens_[static_cast<size_t>(b)]; }
  int64_t kept() const { return config_.kind == KvCacheKind::ring ? config_.num_sink_tokens : 0; }
  DType input() const { return config_.dtype == DType::f64 ? DType::f64 : DType::f32; }
  int64_t draw(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  static TestTensor copy_of(const TestTensor& t) {
    const Tensor& v = t.view();
    return {v.dtype, std::vector<int64_t>(v.shape, v.shape + v.rank)};
  }

  void take(const TestTensor& k, const TestTensor& v, const std::vector<int64_t>& counts) {
    for (int64_t b = 0; b < config_.batch; ++b) {
      const int64_t count = counts[static_cast<size_t>(b)];
      for (int64_t i = 0; i < count; ++i) {
        Token token;
        for (int64_t h = 0; h < config_.num_kv_heads; ++h) {
          std::vector<double>&row_k = token.k.emplace_back(), &row_v = token.v.emplace_back();
          for (int64_t d = 0; d < config_.head_dim_qk; ++d) row_k.push_back(k.get(b, h, i, d));
          for (int64_t d = 0; d < config_.head_dim_v; ++d) row_v.push_back(v.get(b, h, i, d));
        }
        at(b).push_back(std::move(token));
      }
      if (count > 0) last_[static_cast<size_t>(b)] = count;
    }
  }

  void expect_row(const ConstTensor& rows, const ConstTensor& scales, int64_t i,
                  const std::vector<double>& want) const {
    for (size_t d = 0; d < want.size(); ++d) {
      const double got = element(rows, i * rows.stride[0] + static_cast<int64_t>(d));
      if (config_.dtype == DType::i8) {
        const double scale = element(scales, i);
        ASSERT_LE(std::abs(scale * got - want[d]), 0.5001 * scale) << text_of(config_);
        continue;
      }
      double room = 0;
      const int64_t shape[] = {1};
      const Tensor rounded(&room, config_.dtype, shape);
      set_element(rounded, 0, want[d]);
      ASSERT_EQ(got, element(rounded, 0)) << text_of(config_);
    }
  }

  void attend_alone(int64_t b, const TestTensor& q, const AttentionOutputs& outputs) const {
    const TestTensor k = tokens_of(b, 0), v = tokens_of(b, 1);
    if (config_.dtype != DType::i8 && config_.num_sink_tokens == 0) {
      AttentionOptions o;
      o.mask = Mask::causal_bottom_right();
      if (config_.window > 0) o.mask = o.mask & Mask::window(config_.window - 1, -1);
      attention(q, k, v, outputs, o);
      return;
    }
    KvCacheConfig plain = config_;
    plain.kind = KvCacheKind::contiguous, plain.batch = 1, plain.capacity = 0;
    KvCache alone(plain);
    alone.append(k, v);
    alone.attend(q, outputs);
  }

  KvCacheConfig config_;
  std::mt19937_64 random_;
  std::normal_distribution<double> normal_;
  std::vector<Tokens> tokens_;
  std::vector<int64_t> last_;  // tokens of the last append
};

}  // namespace qkv::test
