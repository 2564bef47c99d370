// SPDX-License-Identifier: Apache-2.0
#include "dense_tiles.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "mask_terms.h"

namespace qkv {
namespace {

constexpr float kHidden = -std::numeric_limits<float>::infinity();

// What a table must say, element by element.
void expect_tiles(const ConstTensor& t, const std::vector<float>& values, int64_t planes,
                  int64_t n_q, int64_t n_kv) {
  for (const int threads : {1, 3}) {
    AttentionOptions options;
    options.num_threads = threads;
    const DenseTiles tiles = make_dense_tiles(t, options);
    for (int64_t p = 0; p < planes; ++p) {
      for (int64_t ti = 0; ti * 16 < n_q; ++ti) {
        for (int64_t tj = 0; tj * 128 < n_kv; ++tj) {
          bool visible = false, not_zero = false;
          for (int64_t i = ti * 16; i < std::min(n_q, ti * 16 + 16); ++i) {
            for (int64_t j = tj * 128; j < std::min(n_kv, tj * 128 + 128); ++j) {
              const float x = values[static_cast<size_t>((p * n_q + i) * n_kv + j)];
              visible |= x != kHidden, not_zero |= x != 0;
            }
          }
          const int want = (visible ? 1 : 0) | (not_zero ? 2 : 0);
          ASSERT_EQ(tiles.bits[static_cast<size_t>(p * tiles.head_stride + ti * tiles.token_stride +
                                                   tj * tiles.key_stride)],
                    want)
              << "plane " << p << " tile " << ti << " " << tj;
        }
      }
    }
  }
}

std::vector<float> causal_with_noise(int64_t planes, int64_t n_q, int64_t n_kv) {
  std::vector<float> x(static_cast<size_t>(planes * n_q * n_kv), 0);
  for (int64_t r = 0; r < planes * n_q; ++r)
    for (int64_t j = r % n_q + 1; j < n_kv; ++j) x[static_cast<size_t>(r * n_kv + j)] = kHidden;
  x[0] = 0.5f;
  return x;
}

TEST(DenseTiles, Table_SaysWhatTheElementsSay) {
  const int64_t planes = 3, n_q = 333, n_kv = 700;
  const std::vector<float> x = causal_with_noise(planes, n_q, n_kv);
  expect_tiles(ConstTensor(x.data(), {1, planes, n_q, n_kv}), x, planes, n_q, n_kv);
  std::vector<double> d(x.begin(), x.end());
  expect_tiles(ConstTensor(d.data(), {1, planes, n_q, n_kv}), x, planes, n_q, n_kv);
  std::vector<bf16_t> b;
  std::vector<f16_t> h;
  for (const float e : x) b.push_back(to_bf16(e)), h.push_back(to_f16(e));
  expect_tiles(ConstTensor(b.data(), {1, planes, n_q, n_kv}), x, planes, n_q, n_kv);
  expect_tiles(ConstTensor(h.data(), {1, planes, n_q, n_kv}), x, planes, n_q, n_kv);
}

TEST(DenseTiles, Boolean_TrueIsVisibleAndZero) {
  const int64_t n_q = 100, n_kv = 300;
  std::vector<float> x = causal_with_noise(1, n_q, n_kv);
  x[0] = 0;
  std::vector<uint8_t> m;
  for (const float e : x) m.push_back(e == 0);
  expect_tiles(ConstTensor(static_cast<const void*>(m.data()), DType::boolean,
                           std::vector<int64_t>{n_q, n_kv}),
               x, 1, n_q, n_kv);
}

TEST(DenseTiles, RepeatedAxes_AreReadOnce) {
  const std::vector<float> row(1000, kHidden);
  const DenseTiles tiles =
      make_dense_tiles(ConstTensor(row.data(), {4, 8, int64_t{1} << 40, 1000}, {0, 0, 0, 1}), {});
  EXPECT_EQ(tiles.bits.size(), 8u);
  EXPECT_EQ(tiles.token_stride, 0);
  for (const uint8_t bits : tiles.bits) EXPECT_EQ(bits, DenseTiles::kSomeNotZero);
}

// The table changes what is computed, not what comes out: a mask by table, by name and in pieces too small for a table.
TEST(DenseTiles, CausalAsArray_SameBitsAsByName) {
  const int64_t heads = 2, n = 400, d = 16;
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<float> q(heads * n * d), k(q.size()), v(q.size()), by_name(q.size()),
      by_array(q.size());
  for (auto* x : {&q, &k, &v})
    for (float& e : *x) e = normal(random);
  std::vector<float> bias = causal_with_noise(1, n, n);
  bias[0] = 0;
  std::vector<uint8_t> allow;
  for (const float e : bias) allow.push_back(e == 0);
  const auto run = [&](const AttentionOptions& options, std::vector<float>* out) {
    attention(ConstTensor(q.data(), {1, heads, n, d}), ConstTensor(k.data(), {1, heads, n, d}),
              ConstTensor(v.data(), {1, heads, n, d}),
              {.out = Tensor(out->data(), {1, heads, n, d})}, options);
  };
  run({.mask = Mask::causal_top_left()}, &by_name);
  const Mask array = Mask::dense(ConstTensor(static_cast<const void*>(allow.data()), DType::boolean,
                                             std::vector<int64_t>{n, n}));
  for (const AttentionOptions& options :
       {AttentionOptions{.mask = array}, AttentionOptions{.mask = array.prepared()},
        AttentionOptions{.bias = ConstTensor(bias.data(), {n, n})},
        AttentionOptions{.mask = Mask::full() & array.prepared(),
        .bias = ConstTensor(bias.data(), {1, 1, n, n})}}) {
    std::fill(by_array.begin(), by_array.end(), -1.0f);
    run(options, &by_array);
    EXPECT_EQ(std::memcmp(by_array.data(), by_name.data(), by_name.size() * sizeof(float)), 0);
  }
}

}  // namespace
}  // namespace qkv
