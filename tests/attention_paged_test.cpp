// SPDX-License-Identifier: Apache-2.0
// Tier: test. attention_paged(): the bits of attention() on the tokens of each entry, whatever the pages.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "qkv/kv_cache.h"
#include "support/all_outputs.h"
#include "support/files.h"

namespace qkv::test {
namespace {

TEST(AttentionPaged, TheBitsOfAttention_SlotsBehindALengthAreNotRead) {
  std::mt19937_64 random(1);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f64})
    for (const int64_t page_size : {1, 16, 50})
      for (const int64_t n_q : {1, 40}) {
        const int64_t lengths[] = {170, 0, 99}, max_pages = 170 / page_size + 2;
        const int64_t num_pages = 3 * max_pages;
        const DType q_dtype = dtype == DType::f64 ? DType::f64 : DType::f32;
        TestTensor q(q_dtype, {3, 4, n_q, 24});
        q.fill_random(random);
        // Pages in any order; what no token fills stays NaN.
        TestTensor k(dtype, {num_pages, page_size, 2, 24}), v(dtype, {num_pages, page_size, 2, 16});
        std::vector<int64_t> order(static_cast<size_t>(num_pages));
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), random);
        std::vector<int32_t> table(static_cast<size_t>(3 * max_pages), -7);
        std::vector<Problem> alone;
        size_t next = 0;
        for (int64_t b = 0; b < 3; ++b) {
          Problem p = make_problem({1, 4, 2, n_q, lengths[b], 24, 16}, q_dtype, random, dtype);
          for (int64_t h = 0; h < 4; ++h)
            for (int64_t i = 0; i < n_q; ++i)
              for (int64_t d = 0; d < 24; ++d) p.q.set(0, h, i, d, q.get(b, h, i, d));
          for (int64_t t = 0; t < lengths[b]; ++t) {
            int32_t& page = table[static_cast<size_t>(b * max_pages + t / page_size)];
            if (t % page_size == 0) page = static_cast<int32_t>(order[next++]);
            for (int64_t h = 0; h < 2; ++h) {
              for (int64_t d = 0; d < 24; ++d)
                k.set(page, t % page_size, h, d, p.k.get(0, h, t, d));
              for (int64_t d = 0; d < 16; ++d)
                v.set(page, t % page_size, h, d, p.v.get(0, h, t, d));
            }
          }
          alone.push_back(std::move(p));
        }
        const std::vector<int64_t> rows = {0, n_q - 1, n_q / 2};
        const AllOutputs all(q_dtype, {3, 4, 2, n_q, 170, 24, 16}, rows, 5);
        attention_paged(q, k, v, ConstTensor(table.data(), {3, max_pages}),
                        ConstTensor(lengths, {3}), all.view());
        expect_padding(all, 1, 0, n_q);
        expect_no_columns(all, 1, 0), expect_no_columns(all, 2, lengths[2]);
        for (const int64_t b : {0, 2}) {
          AttentionOptions o;
          o.mask = Mask::causal_bottom_right();
          const Problem& p = alone[static_cast<size_t>(b)];
          const AllOutputs one(q_dtype, p.extents, rows, 5);
          attention(p.q, p.k, p.v, one.view(), o);
          expect_part(all, b, 0, 0, one, "page_size " + std::to_string(page_size));
        }
      }
}

TEST(AttentionPaged, Errors) {
  TestTensor q(DType::f32, {1, 2, 1, 8}), k(DType::f32, {3, 4, 2, 8}), v(DType::f32, {3, 4, 2, 6});
  TestTensor out(DType::f32, {1, 2, 1, 6}), few(DType::f32, {3, 4, 1, 6});
  const auto refused = [&](const ConstTensor& values, std::vector<int64_t> table, int64_t length,
                           const std::string& words) {
    const std::string text = error_text([&] {
      attention_paged(q, k, values,
                      ConstTensor(table.data(), {1, static_cast<int64_t>(table.size())}),
                      ConstTensor(&length, {1}), {.out = out.view()});
    });
    EXPECT_NE(text.find(words), std::string::npos) << words << " in: " << text;
    EXPECT_TRUE(std::isnan(out.get(0, 0, 0, 0)));
  };
  refused(v, {0, 3}, 5, "block_table names page 3 of 3 for token 4 of entry 0");
  refused(v, {-1, 0}, 5, "block_table names page -1");
  refused(v, {0, 1}, 9, "a length must lie in [0, max_pages * page_size], got 9");
  refused(v, {0, 1}, -1, "got -1");
  refused(v, {0, 1}, 0, "the queries are the last 1 tokens, but the longest length is 0");
  refused(few, {0, 1}, 5, "k_pages and v_pages need [num_pages, page_size, num_kv_heads, dim]");
  const std::vector<float> table = {0};
  const int64_t length = 1;
  EXPECT_NE(error_text([&] {
              attention_paged(q, k, v, ConstTensor(table.data(), {1, 1}), ConstTensor(&length, {1}),
                              {.out = out.view()});
            }).find("need integers"),
            std::string::npos);
}

}  // namespace
}  // namespace qkv::test
