// SPDX-License-Identifier: Apache-2.0
// Tier: kernel. Each kernel family is one translation unit; it hands its functions for the target
// in force to kernels.cpp.
#pragma once
#include "kernels/kernels.h"

namespace qkv::kernels {

/// Fills its own fields of the table with the functions of the target in force.
void fill_prefill(KernelTable* table);   // prefill.cpp
void fill_decode(KernelTable* table);    // decode.cpp
void fill_backward(KernelTable* table);  // backward.cpp
void fill_linear(KernelTable* table);    // linear.cpp

}  // namespace qkv::kernels
