// SPDX-License-Identifier: Apache-2.0
// Tier: test. Blocks of a cache: counted references, copies between blocks of different strides.
#include "kv_block.h"

#include <gtest/gtest.h>

#include <vector>

#include "support/files.h"

namespace qkv {
namespace {

constexpr KvSizes kSizes{2, 3, 2, DType::f32, 3, 2};

TEST(KvBlock, CountsItsOwners) {
  KvBlockRef a(kSizes, 4);
  EXPECT_TRUE(a.is_own());
  KvBlockRef b = a;
  EXPECT_FALSE(a.is_own());
  EXPECT_FALSE(b.is_own());
  EXPECT_EQ(&*a, &*b);
  b = KvBlockRef();
  EXPECT_TRUE(a.is_own());
  EXPECT_EQ(a->slots, 4);
  EXPECT_EQ(a->bytes % 128, 0);
  EXPECT_GE(a->bytes, 2 * 4 * (3 + 2) * 4);
}

TEST(KvBlock, CopiesTheRowsOfAllHeads) {
  const KvBlockRef from(kSizes, 4);
  // The target is the caller's memory with wider rows.
  std::vector<float> k(2 * 6 * 5, -1), v(2 * 6 * 4, -1);
  KvBlockRef to(new KvBlock);
  to->slots = 6;
  to->k = reinterpret_cast<char*>(k.data()), to->v = reinterpret_cast<char*>(v.data());
  to->k_head_stride = 30, to->k_row_stride = 5, to->v_head_stride = 24, to->v_row_stride = 4;
  float* fk = reinterpret_cast<float*>(from->k);
  float* fv = reinterpret_cast<float*>(from->v);
  for (int i = 0; i < 2 * 4 * 3; ++i) fk[i] = static_cast<float>(i);
  for (int i = 0; i < 2 * 4 * 2; ++i) fv[i] = static_cast<float>(100 + i);
  copy_slots(kSizes, *from, 1, &*to, 3, 2);
  for (int h = 0; h < 2; ++h)
    for (int slot = 0; slot < 6; ++slot)
      for (int d = 0; d < 5; ++d) {
        const bool is_copied = slot >= 3 && slot < 5 && d < 3;
        EXPECT_EQ(k[static_cast<size_t>(h * 30 + slot * 5 + d)],
                  is_copied ? static_cast<float>((h * 4 + slot - 2) * 3 + d) : -1.0f);
        if (d < 4) {
          const bool is_v = slot >= 3 && slot < 5 && d < 2;
          EXPECT_EQ(v[static_cast<size_t>(h * 24 + slot * 4 + d)],
                    is_v ? static_cast<float>(100 + (h * 4 + slot - 2) * 2 + d) : -1.0f);
        }
      }
}

TEST(KvBlock, SizesThatDoNotFit_AreRefused) {
  EXPECT_NE(test::error_text([] { KvBlockRef block(kSizes, INT64_MAX / 4); }).find("too large"),
            std::string::npos);
}

}  // namespace
}  // namespace qkv
