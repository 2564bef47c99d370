// SPDX-License-Identifier: Apache-2.0
// Tier: command line. Parts shared by the options of the verbs: sizes, element types, suggestions
// for a misspelled word.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "qkv/dtype.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace qkv::cli {

/// A whole number >= least and nothing else: no sign, no unit, no fraction. Throws Error that names
/// `what`.
int64_t parse_size(std::string_view text, int64_t least, std::string_view what);

/// Adds an option that takes such a number.
CLI::Option* add_size(CLI::App& app, const std::string& flag, int64_t* value, int64_t least,
                      const std::string& help);

/// The value of --num-threads for the library; 0 = default. Throws Error for a number no machine
/// has.
int checked_threads(int64_t num_threads);

/// "f32", "f64", "bf16", "f16".
DType parse_float_dtype(std::string_view text, std::string_view what);

/// The candidate closest to word, or "" if none is close.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);

/// Control characters become '?': an error stays one line whatever a file name holds.
std::string one_line(std::string_view text);

}  // namespace qkv::cli
