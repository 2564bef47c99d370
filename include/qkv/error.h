// SPDX-License-Identifier: Apache-2.0
// Tier: call. The one exception type of the library.
#pragma once
#include <stdexcept>
#include <string>

#if defined(QKV_SHARED) && defined(__GNUC__)
#define QKV_EXPORT __attribute__((visibility("default")))
#else
#define QKV_EXPORT
#endif

namespace qkv {

/// A caller's mistake or a broken file. The text names the function, says what is wrong and shows the shapes (or the path
/// and the byte offset). It is thrown before any output is written.
class QKV_EXPORT Error : public std::invalid_argument {
 public:
  explicit Error(const std::string& text) : std::invalid_argument(text) {}
};

}  // namespace qkv
