// SPDX-License-Identifier: Apache-2.0
#include "qkv/plan.h"

#include <gtest/gtest.h>

#include "call.h"

namespace qkv {
namespace {

TEST(Plan, Full_CountsPairsFlopAndBytes) {
  Problem p;
  p.batch = 2, p.num_heads = 8, p.num_kv_heads = 2, p.n_q = 100, p.n_kv = 300, p.head_dim_qk = 64,
  p.head_dim_v = 32;
  const Plan r = plan(p);
  EXPECT_EQ(r.path, "prefill");
  EXPECT_EQ(r.visible_pairs, 2 * 8 * 100 * 300);
  EXPECT_EQ(r.flop, 2 * r.visible_pairs * (64 + 32));
  EXPECT_EQ(r.bytes, 4 * (2 * 8 * 100 * 96 + 2 * 2 * 300 * 96));
  EXPECT_GT(r.scratch_bytes, 0);
  EXPECT_LT(r.scratch_bytes, 4 * 2 * 8 * 100 * 300);
  EXPECT_GT(r.expected_seconds, 0);
}

TEST(Plan, Causal_CountsVisiblePairsOnly) {
  Problem p;
  p.n_q = p.n_kv = 1000;
  EXPECT_EQ(plan(p, {.mask = Mask::causal_bottom_right()}).visible_pairs, 1000 * 1001 / 2);
}

// The lesson's MQA has more rows than decode takes, and few keys: the reason says which of the two decided.
TEST(Plan, ReasonNamesTheLimitThatDecided) {
  const auto plan_of = [](int64_t num_kv_heads, int64_t n_q, int64_t n_kv, DType dtype) {
    Problem p;
    p.batch = 10, p.num_heads = 8, p.num_kv_heads = num_kv_heads, p.n_q = n_q, p.n_kv = n_kv;
    p.head_dim_qk = p.head_dim_v = 16, p.dtype = p.dtype_kv = dtype;
    return plan(p);
  };
  const auto says = [](const Plan& p, const char* words) {
    return p.reason.find(words) != std::string::npos;
  };
  const Plan few_keys = plan_of(1, 2, 4, DType::f32), few_rows = plan_of(8, 2, 4, DType::f32);
  EXPECT_EQ(few_keys.path, "decode");
  EXPECT_TRUE(says(few_keys, "4 keys (at most 4) and 16 query rows")) << few_keys.reason;
  EXPECT_EQ(few_rows.path, "decode");
  EXPECT_TRUE(says(few_rows, "2 query rows share a KV head (at most ")) << few_rows.reason;
  for (const Plan& other :
       {plan_of(1, 2, 5, DType::f32), plan_of(1, 9, 4, DType::f32), plan_of(1, 2, 4, DType::f64)}) {
    EXPECT_EQ(other.path, "prefill") << other.reason;
  }
}

TEST(Plan, NoRows_IsEmpty) {
  Problem p;
  p.n_q = 0;
  const Plan r = plan(p);
  EXPECT_EQ(r.path, "empty");
  EXPECT_EQ(r.flop, 0);
}

TEST(Plan, SizesBeyond64Bits_AreRefused) {
  Problem p;
  p.batch = p.num_heads = p.num_kv_heads = int64_t{1} << 20;
  p.n_q = p.n_kv = int64_t{1} << 20;
  EXPECT_THROW(plan(p), Error);
  p = {};
  p.n_kv = -1;
  EXPECT_THROW(plan(p), Error);
  p = {};
  p.num_heads = 12, p.num_kv_heads = 8;
  EXPECT_THROW(plan(p), Error);
}

// Every size alone at the ends of 64 bits: a plan or an Error, never an overflow (ubsan would stop here).
TEST(Plan, OneHugeSize_IsPlannedOrRefused) {
  for (int64_t Problem::*size : {&Problem::batch, &Problem::num_heads, &Problem::n_q,
                                 &Problem::n_kv, &Problem::head_dim_qk, &Problem::head_dim_v}) {
    for (const int64_t huge : {INT64_MAX, INT64_MAX / 2 + 1, INT64_MAX / 256, int64_t{1} << 40}) {
      Problem p;
      p.*size = huge;
      try {
        const Plan r = plan(p);
        EXPECT_GE(r.flop, 0);
        EXPECT_GE(r.bytes, huge);
        EXPECT_GT(r.scratch_bytes, 0);
        EXPECT_GE(r.kv_splits, 1);
      } catch (const Error& e) {
        EXPECT_NE(std::string(e.what()).find("does not fit 64 bits"), std::string::npos)
            << e.what();
      }
    }
  }
}

TEST(Plan, ScratchOfALongPrefill_IsSmall) {
  Problem p;
  p.batch = 4096, p.num_heads = 64, p.num_kv_heads = 64, p.n_q = p.n_kv = 131072,
  p.head_dim_qk = p.head_dim_v = 128;
  EXPECT_LT(plan(p, {.num_threads = 64}).scratch_bytes, int64_t{1} << 28);
}

TEST(Plan, FormsOfTheWeightsThatNeedTheStates_CountThem) {
  Problem p;
  p.batch = 2, p.num_heads = 8, p.num_kv_heads = 2, p.n_q = 100, p.n_kv = 300;
  const int64_t without = plan(p).scratch_bytes;
  for (bool Problem::*want :
       {&Problem::want_mean_weights, &Problem::want_row_weights, &Problem::want_column_sums}) {
    Problem with = p;
    with.*want = true;
    EXPECT_EQ(plan(with).scratch_bytes, without + 2 * 8 * 100 * 2 * 4);
  }
}

// The cut covers every row and key once, whatever the shape.
TEST(Plan, Cut_CoversRowsAndKeys) {
  const kernels::KernelTable& table = kernels::active();
  for (const int64_t rows : {1, 31, 32, 33, 128, 129, 5000}) {
    for (const int64_t n_kv : {0, 1, 127, 128, 129, 511, 512, 513, 4096, 70001}) {
      for (const int64_t num_kv_heads : {1, 8, 100}) {
        const Cut c = cut(table, 0, num_kv_heads, rows, n_kv);
        EXPECT_GE(c.row_blocks * c.task_rows, rows);
        EXPECT_LT((c.row_blocks - 1) * c.task_rows, rows);
        EXPECT_GE(c.kv_splits * c.split_keys, n_kv);
        EXPECT_TRUE(n_kv == 0 || (c.kv_splits - 1) * c.split_keys < n_kv);
        EXPECT_EQ(c.split_keys % table.tile_kv, 0);
      }
    }
  }
}

}  // namespace
}  // namespace qkv
