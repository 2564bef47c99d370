// SPDX-License-Identifier: Apache-2.0
// Tier: test. The main of every test program. If QKV_ISA names an instruction set that this machine
// lacks, it says so and ends without a failure, before any test; CTest reports that as skipped.
#include <gtest/gtest.h>

#include <cstdio>
#include <string_view>

#include "isa.h"
#include "qkv/error.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  try {
    qkv::isa::ensure_initialised();
  } catch (const qkv::Error& error) {
    std::puts(error.what());
    return std::string_view(error.what()).find(qkv::isa::kCannotRun) == std::string_view::npos;
  }
  return RUN_ALL_TESTS();
}

// Read by ThreadSanitizer: the pool starts threads in a child after fork(), which its test checks.
extern "C" const char* __tsan_default_options() { return "die_after_fork=0"; }
