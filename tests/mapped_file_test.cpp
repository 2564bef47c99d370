// SPDX-License-Identifier: Apache-2.0
// Tier: test. Mapping of files, refusal of what is not one, and aligned copies.
#include "mapped_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <thread>
#include <utility>
#include <vector>

#include "support/files.h"

namespace {

using qkv::AlignedCopies;
using qkv::MappedFile;
using qkv::test::contains;
using qkv::test::error_text;
using qkv::test::TemporaryFolder;

TEST(MappedFile, Open_MapsTheBytes) {
  const TemporaryFolder folder;
  std::string bytes(10000, 'x');
  bytes[9999] = 'y';
  qkv::test::write_bytes(folder / "a", bytes);
  const MappedFile file = MappedFile::open(folder / "a", "caller");
  EXPECT_EQ(file.size_bytes(), 10000);
  EXPECT_EQ(file.text(), bytes);
}

TEST(MappedFile, Move_LeavesNothingBehind) {
  const TemporaryFolder folder;
  qkv::test::write_bytes(folder / "a", "abc");
  MappedFile first = MappedFile::open(folder / "a", "caller");
  const MappedFile second = std::move(first);
  EXPECT_EQ(first.size_bytes(), 0);  // NOLINT: the state after a move is what is tested
  EXPECT_EQ(second.text(), "abc");
}

TEST(MappedFile, Replaced_KeepsTheOldBytes) {
  const TemporaryFolder folder;
  qkv::test::write_bytes(folder / "a", "old");
  const MappedFile file = MappedFile::open(folder / "a", "caller");
  qkv::test::write_bytes(folder / "b", "new bytes");
  std::filesystem::rename(folder / "b", folder / "a");
  EXPECT_EQ(file.text(), "old");
}

TEST(MappedFile, EmptyFile_HasNoBytes) {
  const TemporaryFolder folder;
  qkv::test::write_bytes(folder / "a", "");
  EXPECT_EQ(MappedFile::open(folder / "a", "caller").text(), "");
  EXPECT_EQ(MappedFile::copy_of("").text(), "");
}

TEST(MappedFile, NotAFile_IsRefused) {
  const TemporaryFolder folder;
  EXPECT_EQ(error_text([&] { MappedFile::open(folder / "none", "caller"); }),
            "caller: " + folder / "none" + ": cannot be opened: No such file or directory");
  EXPECT_TRUE(
      contains(error_text([&] { MappedFile::open(folder.path(), "caller"); }), "is a folder"));
  ASSERT_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_TRUE(contains(error_text([&] { MappedFile::open(folder / "pipe", "caller"); }),
                       "is not a regular file"))
      << "and the call must not wait for a writer";
  EXPECT_TRUE(contains(error_text([&] { MappedFile::open("/dev/zero", "caller"); }),
                       "is not a regular file"));
}

TEST(AlignedCopies, OddAddresses_AreCopiedOnce) {
  alignas(64) std::byte bytes[32];
  for (int i = 0; i < 32; ++i) bytes[i] = std::byte(i);
  const AlignedCopies copies;
  EXPECT_EQ(copies.get(bytes + 8, 16, 8), bytes + 8) << "aligned: no copy";
  EXPECT_EQ(copies.get(bytes + 3, 5, 1), bytes + 3);
  const void* copy = copies.get(bytes + 3, 16, 8);
  ASSERT_NE(copy, bytes + 3);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(copy) % 8, 0u);
  EXPECT_EQ(std::memcmp(copy, bytes + 3, 16), 0);
  EXPECT_EQ(copies.get(bytes + 3, 16, 8), copy);
  const void* nothing = copies.get(bytes + 3, 0, 8);
  ASSERT_NE(nothing, nullptr);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(nothing) % 64, 0u);
}

TEST(AlignedCopies, ManyThreads_ShareOneCopy) {
  alignas(64) std::byte bytes[64] = {};
  const AlignedCopies copies;
  const void* seen[8] = {};
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 1; i < 50; i += 2) copies.get(bytes + i % 8, 8, 8);
      seen[t] = copies.get(bytes + 1, 8, 8);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const void* p : seen) EXPECT_EQ(p, seen[0]);
}

}  // namespace
