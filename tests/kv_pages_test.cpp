// SPDX-License-Identifier: Apache-2.0
// Tier: test. Pages of a cache: pieces that never overlap, come back and are used again.
#include "kv_pages.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <set>
#include <thread>
#include <vector>

namespace qkv {
namespace {

constexpr int64_t kBytes = 3 * kernels::kAlignment;

TEST(KvPages, SlabsDouble_UpToTheirMost) {
  KvPages pages;
  std::vector<void*> taken;
  std::vector<int64_t> sizes;
  for (int i = 0; i < 40; ++i) {
    taken.push_back(pages.take(kBytes));
    if (sizes.empty() || sizes.back() != pages.num_pieces()) sizes.push_back(pages.num_pieces());
  }
  EXPECT_EQ(sizes, (std::vector<int64_t>{1, 2, 4, 8, 16, 32, 64}));
  for (void* piece : taken) pages.give_back(piece);

  KvPages large;  // two pieces fill a slab
  taken.clear();
  for (int i = 0; i < 6; ++i) taken.push_back(large.take(KvPages::kSlabBytes / 2));
  EXPECT_EQ(large.num_pieces(), 6);
  for (void* piece : taken) large.give_back(piece);

  KvPages empty;  // of a cache without heads
  void *one = empty.take(0), *other = empty.take(0);
  EXPECT_NE(one, other);
  empty.give_back(one), empty.give_back(other);

  KvPages huge;  // one piece is more than a slab
  void* piece = huge.take(2 * KvPages::kSlabBytes);
  EXPECT_EQ(huge.num_pieces(), 1);
  huge.give_back(piece);
}

// Random takes and returns: a piece in use keeps what was written, and is nobody else's.
TEST(KvPages, PiecesInUse_KeepTheirContents) {
  std::mt19937_64 random(1);
  KvPages pages;
  std::vector<std::pair<char*, char>> taken;
  const auto is_filled = [](const std::pair<char*, char>& p) {
    for (int64_t i = 0; i < kBytes; ++i)
      if (p.first[i] != p.second) return false;
    return true;
  };
  for (int step = 0; step < 20000; ++step) {
    const bool grows = (step / 2000) % 2 == 0;
    if (taken.empty() || random() % 10 < (grows ? 7u : 3u)) {
      auto* piece = static_cast<char*>(pages.take(kBytes));
      EXPECT_EQ(reinterpret_cast<uintptr_t>(piece) % kernels::kAlignment, 0u);
      taken.emplace_back(piece, static_cast<char>(random()));
      std::memset(piece, taken.back().second, kBytes);
    } else {
      const size_t at = random() % taken.size();
      ASSERT_TRUE(is_filled(taken[at]));
      pages.give_back(taken[at].first);
      taken[at] = taken.back();
      taken.pop_back();
    }
  }
  for (const auto& p : taken) ASSERT_TRUE(is_filled(p)), pages.give_back(p.first);
}

TEST(KvPages, ReturnedPieces_AreUsedAgainAndWholeSlabsFreed) {
  KvPages pages;
  std::vector<void*> taken;
  for (int i = 0; i < 1000; ++i) taken.push_back(pages.take(kBytes));
  const int64_t most = pages.num_pieces();
  EXPECT_LT(most, 2100);
  for (void* piece : taken) pages.give_back(piece);
  EXPECT_LT(pages.num_pieces(), most);
  EXPECT_GT(pages.num_pieces(), 0);  // one slab stays for what comes next
  for (int round = 0; round < 100; ++round) {
    void* piece = pages.take(kBytes);
    pages.give_back(piece);
    EXPECT_LT(pages.num_pieces(), most);
  }
}

TEST(KvPages, ThreadsTakeAndReturnAtOnce) {
  KvPages pages;
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t)
    threads.emplace_back([&pages, t] {
      std::vector<char*> taken;
      for (int i = 0; i < 2000; ++i) {
        if (i % 3 != 2) {
          taken.push_back(static_cast<char*>(pages.take(kBytes)));
          std::memset(taken.back(), t, kBytes);
        } else {
          EXPECT_EQ(taken.back()[kBytes - 1], t);
          pages.give_back(taken.back());
          taken.pop_back();
        }
      }
      for (char* piece : taken) pages.give_back(piece);
    });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace qkv
