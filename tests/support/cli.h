// SPDX-License-Identifier: Apache-2.0
// Tier: test. The built command line, and small safetensors files for it.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "qkv/weights.h"
#include "support/command.h"

namespace qkv::test {

inline CommandResult run_qkv(std::vector<std::string> args, const CommandSetting& setting = {}) {
  args.insert(args.begin(), QKV_CLI_PATH);
  return run_command(args, setting);
}

/// What every refusal looks like: exit 2, nothing on stdout, one line on stderr that holds the
/// words.
inline void expect_refused(const CommandResult& result, const std::vector<std::string>& words) {
  EXPECT_EQ(result.exit_code, 2) << result.out << result.err;
  EXPECT_EQ(result.out, "");
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  EXPECT_FALSE(result.err.empty() || result.err.back() != '\n') << result.err;
  for (const std::string& word : words)
    EXPECT_NE(result.err.find(word), std::string::npos) << word << " in: " << result.err;
}

/// A safetensors file from the text of its header; header_bytes overrides the length written in
/// front.
inline std::string safetensors_bytes(const std::string& header, size_t data_bytes,
                                     int64_t header_bytes = -1) {
  uint64_t n = header_bytes < 0 ? header.size() : static_cast<uint64_t>(header_bytes);
  std::string bytes;
  for (int i = 0; i < 8; ++i, n >>= 8) bytes += static_cast<char>(n & 0xff);
  return bytes + header + std::string(data_bytes, '\0');
}

}  // namespace qkv::test
