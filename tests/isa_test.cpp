// SPDX-License-Identifier: Apache-2.0
// Tier: test. Instruction sets by name: what is forced is what a dynamic dispatch runs.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "isa_test.cpp"
// clang-format off
#include "kernels/targets.h"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include <cstdint>

HWY_BEFORE_NAMESPACE();
namespace qkv {
namespace HWY_NAMESPACE {
int64_t compiled_target() { return HWY_TARGET; }
}  // namespace HWY_NAMESPACE
}  // namespace qkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>

#include "isa.h"
#include "qkv/error.h"
#include "support/process.h"

namespace qkv {
HWY_EXPORT(compiled_target);

namespace {

int64_t dispatched_target() { return HWY_DYNAMIC_DISPATCH(compiled_target)(); }

// The sets that no machine of this architecture runs.
#if HWY_ARCH_X86
constexpr const char* kForeign = "neon";
#else
constexpr const char* kForeign = "avx2";
#endif

class Isa : public testing::Test {
 protected:
  void SetUp() override { before_ = isa::current().name; }
  void TearDown() override { isa::force(before_); }
  std::string before_;
};

std::string error_of_force(const char* name) {
  try {
    isa::force(name);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST_F(Isa, AtStart_TheSetOfTheEnvironmentIsInForce) {
  const char* wanted = std::getenv("QKV_ISA");
  if (wanted == nullptr || *wanted == '\0' || std::string(wanted) == "auto") {
    EXPECT_EQ(isa::current().name, isa::available().back());
  } else if (std::string(wanted) == "baseline") {
    EXPECT_EQ(isa::current().target_bit, HWY_STATIC_TARGET);
  } else {
    EXPECT_EQ(isa::current().name, wanted);
  }
  EXPECT_EQ(dispatched_target(), isa::current().target_bit);
}

TEST_F(Isa, EachAvailableSet_Forced_IsDispatchedTo) {
  for (const std::string& name : isa::available()) {
    isa::force(name);
    const isa::Choice choice = isa::current();
    EXPECT_EQ(choice.target_bit, dispatched_target()) << name;
    EXPECT_EQ(choice.target, hwy::TargetName(choice.target_bit)) << name;
    EXPECT_EQ(choice.reason, "set_isa");
    if (name != "baseline") {
      EXPECT_EQ(choice.name, name);
    }
  }
}

TEST_F(Isa, Baseline_IsWhatTheCompilerMayAssume) {
  isa::force("baseline");
  EXPECT_EQ(dispatched_target(), HWY_STATIC_TARGET);
}

TEST_F(Isa, Auto_AfterBaseline_IsTheBestAgain) {
  isa::force("baseline");
  isa::force("auto");
  EXPECT_EQ(isa::current().name, isa::available().back());
  EXPECT_EQ(isa::current().reason, "detected");
  EXPECT_EQ(dispatched_target(), isa::current().target_bit);
}

TEST_F(Isa, EveryChoice_StartsAnEpoch) {
  const uint32_t before = isa::epoch();
  EXPECT_GT(before, 0u);
  isa::ensure_initialised();
  EXPECT_EQ(isa::epoch(), before);
  isa::force("baseline");
  EXPECT_EQ(isa::epoch(), before + 1);
}

TEST_F(Isa, UnknownName_IsRefusedWithTheListOfNames) {
  isa::force("baseline");
  const uint32_t before = isa::epoch();
  const std::string text = error_of_force("avx1024");
  EXPECT_EQ(
      text,
      "set_isa: unknown instruction set \"avx1024\", expected one of auto, baseline, sse4, neon, "
      "avx2, avx512");
  EXPECT_EQ(isa::epoch(), before);
  EXPECT_EQ(dispatched_target(), HWY_STATIC_TARGET) << "a refused set must not change the choice";
}

TEST_F(Isa, SetOfAnotherMachine_IsRefusedWithWhatRunsHere) {
  const std::string text = error_of_force(kForeign);
  EXPECT_NE(text.find(std::string(isa::kCannotRun) + kForeign), std::string::npos) << text;
  EXPECT_NE(text.find(isa::available().back()), std::string::npos) << text;
}

TEST_F(Isa, Environment_Baseline_IsInForceFromTheStart) {
  const auto child = test::run_process("QKV_ISA=baseline " + test::this_program() +
                                       " --gtest_filter=Isa.AtStart*");
  EXPECT_EQ(child.exit_code, 0) << child.output;
  EXPECT_NE(child.output.find("[  PASSED  ] 1 test"), std::string::npos) << child.output;
}

TEST_F(Isa, Environment_UnknownName_FailsAtFirstUse) {
  const auto child = test::run_process("QKV_ISA=avx1024 " + test::this_program());
  EXPECT_EQ(child.exit_code, 1);
  EXPECT_EQ(child.output.rfind("QKV_ISA: unknown instruction set \"avx1024\"", 0), 0u)
      << child.output;
}

TEST_F(Isa, Environment_SetOfAnotherMachine_EndsWithTheSkipLineBeforeAnyTest) {
  const auto child =
      test::run_process(std::string("QKV_ISA=") + kForeign + " " + test::this_program());
  EXPECT_EQ(child.exit_code, 0);
  EXPECT_EQ(child.output.rfind("QKV_ISA: " + std::string(isa::kCannotRun) + kForeign, 0), 0u)
      << child.output;
  EXPECT_EQ(child.output.find("RUN"), std::string::npos) << child.output;
}

}  // namespace
}  // namespace qkv
#endif  // HWY_ONCE
