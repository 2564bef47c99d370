// SPDX-License-Identifier: Apache-2.0
// Tier: test. Files for tests: golden data of the tree, the larger shared sets, temporary folders,
// bytes, error texts.
#pragma once
#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <string_view>

#include "qkv/error.h"

namespace qkv::test {

/// A file of tests/data.
inline std::string data_path(const std::string& name) {
  return std::string(QKV_SOURCE_DIR) + "/tests/data/" + name;
}

/// The folder of the larger golden sets; empty where it is missing.
inline std::string shared_data_folder() {
  const char* given = std::getenv("QKV_SHARED_DATA");
  const std::string folder =
      given != nullptr ? given : std::string(QKV_SOURCE_DIR) + "/../shared/data";
  return std::filesystem::is_directory(folder) ? folder : "";
}

inline std::string read_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.good()) << path;
  std::ostringstream bytes;
  bytes << file.rdbuf();
  return std::move(bytes).str();
}

inline void write_bytes(const std::string& path, std::string_view bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  ASSERT_TRUE(file.good()) << path;
}

/// A new folder that is removed with all it holds.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "qkv-test-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary folder: " + name);
    path_ = name;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }
  /// Names of everything in the folder.
  std::vector<std::string> names() const {
    std::vector<std::string> out;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      out.push_back(entry.path().filename().string());
    }
    return out;
  }

 private:
  std::string path_;
};

/// The text of the qkv::Error that call() throws; "no error" if it returns.
template <class Call>
std::string error_text(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

inline testing::AssertionResult contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "\"" << text << "\" does not contain \"" << part << "\"";
}

inline std::string from_hex(std::string_view hex) {
  const auto digit = [](char c) { return c <= '9' ? c - '0' : c - 'a' + 10; };
  std::string bytes;
  for (size_t i = 0; i + 1 < hex.size(); i += 2) {
    bytes += static_cast<char>(digit(hex[i]) * 16 + digit(hex[i + 1]));
  }
  return bytes;
}

/// A damaged copy: some bytes replaced, flipped, removed, inserted or repeated, or the end cut off.
inline std::string damaged(std::string bytes, std::mt19937& random) {
  const auto below = [&](size_t n) {
    return std::uniform_int_distribution<size_t>(0, n - 1)(random);
  };
  for (size_t i = below(4) + 1; i-- > 0 && !bytes.empty();) {
    const size_t at = below(bytes.size());
    switch (below(7)) {
      case 0:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(8)));
        break;
      case 1:
        bytes[at] = static_cast<char>(below(256));
        break;
      case 2:
        bytes[at] = "0123456789{}[]()\",:-.eL'<>|\\ "[below(29)];
        break;
      case 3:
        bytes.resize(at);
        break;
      case 4:
        bytes.erase(at, below(16) + 1);
        break;
      case 5:
        bytes.insert(at, bytes.substr(at, below(24) + 1));
        break;
      default:
        bytes.insert(at, std::to_string(random()));
        break;
    }
  }
  return bytes;
}

}  // namespace qkv::test
