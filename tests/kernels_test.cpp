// SPDX-License-Identifier: Apache-2.0
#include "kernels/kernels.h"

#include <gtest/gtest.h>

#include "isa.h"

namespace qkv {
namespace {

TEST(Kernels, ActiveTable_IsOfTheInstructionSetInForce) {
  for (const std::string& name : isa::available()) {
    isa::force(name);
    EXPECT_EQ(kernels::active().target, isa::current().target);
    EXPECT_EQ(kernels::active().task_rows[0] % kernels::active().tile_q[0], 0);
  }
  isa::force("auto");
}

}  // namespace
}  // namespace qkv
