// SPDX-License-Identifier: Apache-2.0
// Tier: test. Files that appear whole or not at all: every way in which writing ends early leaves
// the folder as it was.
#include "atomic_file.h"

#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>

#include "support/files.h"

namespace {

using qkv::AtomicFile;
using qkv::test::contains;
using qkv::test::error_text;
using qkv::test::read_bytes;
using qkv::test::TemporaryFolder;
using Names = std::vector<std::string>;

void save(const std::string& path, std::string_view text) {
  AtomicFile file(path, "caller");
  file.write(text);
  file.commit();
}

int mode_of(const std::string& path) {
  struct stat status = {};
  EXPECT_EQ(stat(path.c_str(), &status), 0);
  return static_cast<int>(status.st_mode & 0777);
}

TEST(AtomicFile, Commit_MakesTheFileAppear) {
  const TemporaryFolder folder;
  {
    AtomicFile file(folder / "a", "caller");
    file.write("one");
    EXPECT_FALSE(std::filesystem::exists(folder / "a"));
    file.write(" two");
    file.write("");
    file.commit();
  }
  EXPECT_EQ(read_bytes(folder / "a"), "one two");
  EXPECT_EQ(folder.names(), Names{"a"});
  const mode_t mask = umask(0);
  umask(mask);
  EXPECT_EQ(mode_of(folder / "a"), static_cast<int>(0666 & ~mask)) << "as any new file";
}

TEST(AtomicFile, NoCommit_LeavesTheOldFileAlone) {
  const TemporaryFolder folder;
  { AtomicFile(folder / "a", "caller").write("never"); }
  EXPECT_EQ(folder.names(), Names{});
  save(folder / "a", "old");
  { AtomicFile(folder / "a", "caller").write("never"); }
  EXPECT_EQ(read_bytes(folder / "a"), "old");
  EXPECT_EQ(folder.names(), Names{"a"});
}

TEST(AtomicFile, Replace_KeepsPermissions) {
  const TemporaryFolder folder;
  save(folder / "a", "old");
  ASSERT_EQ(chmod((folder / "a").c_str(), 0640), 0);
  save(folder / "a", "new");
  EXPECT_EQ(read_bytes(folder / "a"), "new");
  EXPECT_EQ(mode_of(folder / "a"), 0640);
}

TEST(AtomicFile, SymbolicLink_IsFollowed) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder / "sub");
  save(folder / "sub/target", "old");
  std::filesystem::create_symlink("sub/target", folder / "link");
  save(folder / "link", "new");
  EXPECT_EQ(read_bytes(folder / "sub/target"), "new");
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
  std::filesystem::create_symlink("nowhere", folder / "lost");
  EXPECT_TRUE(contains(error_text([&] { save(folder / "lost", "x"); }), "leads nowhere"));
}

TEST(AtomicFile, LongName_NeedsNoLongerTemporaryName) {
  const TemporaryFolder folder;
  const std::string name(255, 'n');
  save(folder / name, "x");
  EXPECT_EQ(folder.names(), Names{name});
}

TEST(AtomicFile, WrongPaths_AreRefused) {
  const TemporaryFolder folder;
  save(folder / "a", "old");
  EXPECT_EQ(error_text([&] { save("", "x"); }), "caller: the path to write to is empty");
  EXPECT_TRUE(contains(error_text([&] { save(folder / "new/", "x"); }), "is a folder"));
  EXPECT_TRUE(contains(error_text([&] { save(folder.path(), "x"); }), "is a folder"));
  EXPECT_EQ(error_text([&] { save(folder / "none/b", "x"); }),
            "caller: " + folder / "none/b" + ": cannot be written: No such file or directory");
  EXPECT_TRUE(contains(error_text([&] { save(folder / "a/b", "x"); }), "Not a directory"));
  EXPECT_TRUE(contains(error_text([&] { save("/proc/b", "x"); }), "cannot be written"));
  EXPECT_TRUE(contains(error_text([&] { save(folder / std::string(256, 'n'), "x"); }), "too long"));
  EXPECT_EQ(folder.names(), Names{"a"});
  EXPECT_EQ(read_bytes(folder / "a"), "old");
}

// Nodes of the test's own: as root, code that is wrong would replace a real device.
TEST(AtomicFile, DeviceOrPipe_IsRefusedAndKept) {
  const TemporaryFolder folder;
  ASSERT_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);
  std::filesystem::create_symlink("pipe", folder / "link");
  const std::string refusal = ": is not a regular file and cannot be replaced by one";
  EXPECT_EQ(error_text([&] { save(folder / "pipe", "x"); }),
            "caller: " + folder / "pipe" + refusal);
  EXPECT_EQ(error_text([&] { save(folder / "link", "x"); }),
            "caller: " + folder / "link" + refusal);
  EXPECT_TRUE(std::filesystem::is_fifo(folder / "pipe"));
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
  EXPECT_EQ(folder.names().size(), 2u);
}

TEST(AtomicFile, NoPermission_IsRefused) {
  const TemporaryFolder folder;
  save(folder / "a", "old");
  ASSERT_EQ(chmod((folder / "a").c_str(), 0444), 0);
  const uid_t user = geteuid();
  if (user == 0) {  // root may write everywhere: be nobody for a moment
    constexpr uid_t kNobody = 65534;
    ASSERT_EQ(chown(folder.path().c_str(), kNobody, static_cast<gid_t>(-1)), 0);
    ASSERT_EQ(chown((folder / "a").c_str(), kNobody, static_cast<gid_t>(-1)), 0);
    ASSERT_EQ(seteuid(kNobody), 0);
  }
  const std::string read_only_file = error_text([&] { save(folder / "a", "x"); });
  EXPECT_EQ(chmod(folder.path().c_str(), 0555), 0);
  const std::string read_only_folder = error_text([&] { save(folder / "b", "x"); });
  EXPECT_EQ(chmod(folder.path().c_str(), 0755), 0);
  ASSERT_EQ(seteuid(user), 0);
  EXPECT_EQ(read_only_file, "caller: " + folder / "a" + ": cannot be written: Permission denied");
  EXPECT_EQ(read_only_folder, "caller: " + folder / "b" + ": cannot be written: Permission denied");
  EXPECT_EQ(folder.names(), Names{"a"});
  EXPECT_EQ(read_bytes(folder / "a"), "old");
}

TEST(AtomicFile, FileSizeLimit_LeavesNothing) {
  const TemporaryFolder folder;
  save(folder / "a", "old");
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit limit = {10000, before.rlim_max};
  auto* const handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  const std::string error = error_text([&] { save(folder / "a", std::string(20000, 'x')); });
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(error,
            "caller: " + folder / "a" + ": cannot be written beyond byte 10000: File too large");
  EXPECT_EQ(read_bytes(folder / "a"), "old");
  EXPECT_EQ(folder.names(), Names{"a"});
}

TEST(AtomicFile, FullDisk_LeavesNothing) {
  const TemporaryFolder folder;
  const std::string disk = folder / "disk";
  std::filesystem::create_directory(disk);
  if (mount("tmpfs", disk.c_str(), "tmpfs", 0, "size=64k") != 0) {
    GTEST_SKIP() << "mounting a small disk needs root";
  }
  save(disk + "/a", "old");
  const std::string error = error_text([&] { save(disk + "/b", std::string(200000, 'x')); });
  const std::string replaced = error_text([&] { save(disk + "/a", std::string(200000, 'x')); });
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(disk)) {
    names.push_back(entry.path().filename().string());
  }
  const std::string kept = read_bytes(disk + "/a");
  EXPECT_EQ(umount(disk.c_str()), 0);
  EXPECT_TRUE(contains(error, "caller: " + disk + "/b: cannot be written beyond byte "));
  EXPECT_TRUE(contains(error, "No space left on device"));
  EXPECT_TRUE(contains(replaced, "No space left on device"));
  EXPECT_EQ(names, Names{"a"});
  EXPECT_EQ(kept, "old");
}

TEST(AtomicFile, WriteCOrder_AnyStrides) {
  const TemporaryFolder folder;
  const uint16_t x[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
  const auto written = [&](const qkv::ConstTensor& t) {
    AtomicFile file(folder / "t", "caller");
    write_c_order(t, &file);
    file.commit();
    const std::string bytes = read_bytes(folder / "t");
    std::vector<uint16_t> values(bytes.size() / 2);
    if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  };
  using Values = std::vector<uint16_t>;
  EXPECT_EQ(written({x, {2, 3}}), (Values{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(written({x, {2, 3}, {1, 2}}), (Values{0, 2, 4, 1, 3, 5}));
  EXPECT_EQ(written({x + 11, {2, 2, 3}, {-6, -3, -1}}),
            (Values{11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0}));
  EXPECT_EQ(written({x + 7, {3, 2}, {0, 0}}), (Values{7, 7, 7, 7, 7, 7}));
  EXPECT_EQ(written({x, {2, 1, 2, 2}, {6, 99, 3, 2}}), (Values{0, 2, 3, 5, 6, 8, 9, 11}));
  EXPECT_EQ(written({x + 3, {}}), Values{3});
  EXPECT_EQ(written({x, {4, 0}, {1, 1}}), Values{});
  // More than one buffer of the writer.
  const std::vector<uint16_t> large = written({x, {3, 700000}, {1, 0}});
  ASSERT_EQ(large.size(), 2100000u);
  EXPECT_EQ(large[699999], 0);
  EXPECT_EQ(large[700000], 1);
  EXPECT_EQ(large.back(), 2);
}

}  // namespace
