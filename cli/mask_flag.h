// SPDX-License-Identifier: Apache-2.0
// Tier: command line. The value of --mask.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "qkv/mask.h"

namespace qkv::cli {

/// One mask or several joined with &: "causal-bottom-right", "window:64,0", "causal-top-left &
/// lengths:3,5". Throws Error that says what is wrong and what would be right.
Mask parse_mask(std::string_view text);

/// Masks of several --mask flags: all apply.
Mask parse_masks(const std::vector<std::string>& texts);

/// For --help: one line per kind, with its meaning.
std::string mask_help();

}  // namespace qkv::cli
