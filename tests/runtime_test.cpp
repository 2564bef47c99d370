// SPDX-License-Identifier: Apache-2.0
// Tier: test. Process-wide defaults: threads, instruction set, and what info() says.
#include "qkv/runtime.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>

#include "isa.h"
#include "machine.h"
#include "qkv/qkv.h"
#include "support/process.h"

namespace qkv {
namespace {

TEST(Runtime, NumThreads_WithoutEnvironment_IsTheUsableCores) {
  const char* wanted = std::getenv("QKV_NUM_THREADS");
  EXPECT_EQ(default_num_threads(),
            wanted != nullptr && *wanted != '\0' ? std::stoi(wanted) : machine::usable_cores());
}

TEST(Runtime, NumThreads_OfTheEnvironment_IsTheDefault) {
  for (const char* n : {"1", "3", "200"}) {
    const auto child =
        test::run_process(std::string("QKV_NUM_THREADS=") + n + " " + test::this_program() +
                          " --gtest_filter=Runtime.NumThreads_WithoutEnvironment*");
    EXPECT_EQ(child.exit_code, 0) << child.output;
    EXPECT_NE(child.output.find("[  PASSED  ] 1 test"), std::string::npos) << child.output;
  }
}

TEST(Runtime, NumThreads_BadEnvironment_IsRefused) {
  const char* wanted = std::getenv("QKV_NUM_THREADS");
  if (wanted != nullptr && std::string(wanted).rfind("bad", 0) == 0) {
    try {
      default_num_threads();
      FAIL() << "accepted " << wanted;
    } catch (const Error& error) {
      EXPECT_EQ(error.what(), "QKV_NUM_THREADS: expected a number of threads from 1, got \"" +
                                  std::string(wanted) + "\"");
    }
    set_num_threads(2);
    EXPECT_EQ(default_num_threads(), 2) << "set_num_threads comes before the environment";
    return;
  }
  const auto child = test::run_process("QKV_NUM_THREADS=bad3 " + test::this_program() +
                                       " --gtest_filter=Runtime.NumThreads_BadEnvironment*");
  EXPECT_EQ(child.exit_code, 0) << child.output;
  for (const char* n : {"0", "-1", "3x", "99999999999999"}) {
    const auto refused = test::run_process(std::string("QKV_NUM_THREADS=") + n + " " +
                                           test::this_program() + " --gtest_filter=Runtime.Info*");
    EXPECT_EQ(refused.exit_code, 1) << n;
    EXPECT_NE(refused.output.find("QKV_NUM_THREADS: expected a number of threads"),
              std::string::npos)
        << refused.output;
  }
}

TEST(Runtime, SetNumThreads_HoldsUntilZero) {
  const int before = default_num_threads();
  set_num_threads(5);
  EXPECT_EQ(default_num_threads(), 5);
  EXPECT_EQ(info().num_threads, 5);
  set_num_threads(0);
  EXPECT_EQ(default_num_threads(), before);
}

TEST(Runtime, SetNumThreads_Negative_IsRefused) {
  const int before = default_num_threads();
  EXPECT_THROW(set_num_threads(-1), Error);
  EXPECT_EQ(default_num_threads(), before);
}

TEST(Runtime, DefaultExecutor_RunsEveryTaskOnce) {
  int counts[100] = {};
  default_executor().run(
      100, 3, [](void* context, int64_t i) { static_cast<int*>(context)[i]++; }, counts);
  for (int count : counts) EXPECT_EQ(count, 1);
  EXPECT_EQ(&default_executor(), &default_executor());
}

TEST(Runtime, SetIsa_ChangesWhatInfoSays) {
  const std::string before = info().isa;
  set_isa("baseline");
  EXPECT_EQ(info().isa_reason, "set_isa");
  EXPECT_EQ(info().isa_target, isa::current().target);
  EXPECT_THROW(set_isa("no such set"), Error);
  EXPECT_EQ(info().isa_target, isa::current().target);
  set_isa(before);
}

TEST(Runtime, Info_SaysWhatRuns) {
  const Info info = qkv::info();
  EXPECT_EQ(info.version, QKV_VERSION);
  EXPECT_NE(std::find(info.isa_available.begin(), info.isa_available.end(), info.isa),
            info.isa_available.end());
  EXPECT_EQ(info.isa_available.front(), "baseline");
  EXPECT_FALSE(info.isa_target.empty());
  EXPECT_FALSE(info.cpu.empty());
  EXPECT_EQ(info.num_threads, default_num_threads());
  EXPECT_EQ(info.compiler, machine::compiler());
  EXPECT_EQ(info.l2_bytes, machine::caches().l2_bytes);
}

}  // namespace
}  // namespace qkv
