// SPDX-License-Identifier: Apache-2.0
// Tier: test. What the machine has, read from files laid out here and from this machine's own.
#include "machine.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace qkv {
namespace {

namespace fs = std::filesystem;

class Machine : public testing::Test {
 protected:
  void SetUp() override {
    root_ =
        fs::temp_directory_path() / ("qkv_machine_test_" + std::to_string(getpid()) + "_" +
                                     testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::create_directories(root_);
  }
  void TearDown() override { fs::remove_all(root_); }
  void write(const std::string& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  double cpus(const std::string& membership) {
    return machine::cgroup_cpus(membership, root_.string());
  }
  fs::path root_;
};

TEST_F(Machine, CgroupV2_OwnQuota_Counts) {
  write("a/b/cpu.max", "150000 100000\n");
  EXPECT_EQ(cpus("0::/a/b\n"), 1.5);
  EXPECT_EQ(cpus("0::/a\n"), 0);
}

TEST_F(Machine, CgroupV2_ParentWithLess_Counts) {
  write("a/cpu.max", "50000 100000\n");
  write("a/b/cpu.max", "400000 100000\n");
  EXPECT_EQ(cpus("0::/a/b\n"), 0.5);
}

TEST_F(Machine, CgroupV2_RootOfAContainer_Counts) {
  write("cpu.max", "200000 100000\n");
  EXPECT_EQ(cpus("0::/\n"), 2);
  EXPECT_EQ(cpus("0::/not/mounted/here\n"), 2);
}

TEST_F(Machine, CgroupV2_Max_IsNoLimit) {
  write("cpu.max", "max 100000\n");
  EXPECT_EQ(cpus("0::/\n"), 0);
}

TEST_F(Machine, CgroupV1_Quota_Counts) {
  write("cpu,cpuacct/a/cpu.cfs_quota_us", "300000\n");
  write("cpu,cpuacct/a/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cpus("5:memory:/a\n4:cpu,cpuacct:/a\n"), 3);
  EXPECT_EQ(cpus("5:memory:/a\n"), 0);
}

TEST_F(Machine, CgroupV1_MinusOne_IsNoLimit) {
  write("cpu/cpu.cfs_quota_us", "-1\n");
  write("cpu/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cpus("4:cpu,cpuacct:/\n"), 0);
}

TEST_F(Machine, Cgroup_BrokenFiles_AreNoLimit) {
  write("cpu.max", "soon\n");
  EXPECT_EQ(cpus("0::/\n"), 0);
  EXPECT_EQ(cpus("nonsense\n::\n\n"), 0);
  EXPECT_EQ(cpus(""), 0);
}

TEST_F(Machine, UsableCores_FollowsTheAffinity) {
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  EXPECT_GE(machine::usable_cores(), 1);
  EXPECT_LE(machine::usable_cores(), CPU_COUNT(&before));
  int first = 0;
  while (!CPU_ISSET(first, &before)) first++;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(first, &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  EXPECT_EQ(machine::usable_cores(), 1);
  ASSERT_EQ(sched_setaffinity(0, sizeof before, &before), 0);
}

TEST_F(Machine, Caches_OfSysfs_InstructionsDoNotCount) {
  const char* levels[][3] = {{"1", "Data", "48K"},
                             {"1", "Instruction", "32K"},
                             {"2", "Unified", "2048K"},
                             {"3", "Unified", "96M"}};
  for (int i = 0; i < 4; i++) {
    const std::string index = "index" + std::to_string(i) + "/";
    write(index + "level", levels[i][0]);
    write(index + "type", levels[i][1]);
    write(index + "size", levels[i][2]);
  }
  const machine::Caches caches = machine::caches(root_.string());
  EXPECT_EQ(caches.l1d_bytes, 48 << 10);
  EXPECT_EQ(caches.l2_bytes, 2 << 20);
  EXPECT_EQ(caches.l3_bytes, 96 << 20);
}

TEST_F(Machine, CpuName_IsTheModelName) {
  write("cpuinfo", "processor\t: 0\nmodel\t\t: 17\nmodel name\t: Some CPU 9000 @ 3 GHz\n");
  EXPECT_EQ(machine::cpu_name((root_ / "cpuinfo").string()), "Some CPU 9000 @ 3 GHz");
  EXPECT_EQ(machine::cpu_name((root_ / "missing").string()), "unknown");
}

TEST_F(Machine, Compiler_NamesAVersion) {
  const std::string text = machine::compiler();
#if defined(__clang__)
  EXPECT_EQ(text.rfind("clang " + std::to_string(__clang_major__) + ".", 0), 0u) << text;
#else
  EXPECT_EQ(text.rfind("gcc " + std::to_string(__GNUC__) + ".", 0), 0u) << text;
#endif
}

}  // namespace
}  // namespace qkv
