// SPDX-License-Identifier: Apache-2.0
// Tier: kernel. The decode family: no task is small enough for it yet.
#include "kernels/tables.h"

namespace qkv::kernels {

void fill_decode(KernelTable* table) { table->decode_rows = 0; }

}  // namespace qkv::kernels
