// SPDX-License-Identifier: Apache-2.0
// Tier: call. The form of errors about files: "function: path: byte 12: what is wrong", always one
// printable line.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <system_error>

#include "qkv/error.h"
#include "utf8.h"

namespace qkv {

/// Text made printable: control characters, and all bytes above 127 if the text is not UTF-8,
/// become \x1f.
inline std::string printable(std::string_view text) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  const bool keep_high = is_utf8(text);
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f || (byte >= 0x80 && !keep_high)) {
      out += "\\x";
      out += kDigits[byte >> 4];
      out += kDigits[byte & 15];
    } else {
      out += c;
    }
  }
  return out;
}

/// Text from a file as an error shows it: printable, in double quotes, cut if it is long.
inline std::string in_quotes(std::string_view text) {
  constexpr size_t kMaxShownBytes = 120;
  if (text.size() <= kMaxShownBytes) return '"' + printable(text) + '"';
  size_t end = kMaxShownBytes;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  return '"' + printable(text.substr(0, end)) + "...\"";
}

[[noreturn]] inline void file_error(std::string_view caller, std::string_view path,
                                    const std::string& text) {
  throw Error(std::string(caller) + ": " + printable(path) + ": " + text);
}

/// offset_bytes counts from the start of the file.
[[noreturn]] inline void file_error_at(std::string_view caller, std::string_view path,
                                       int64_t offset_bytes, const std::string& text) {
  file_error(caller, path, "byte " + std::to_string(offset_bytes) + ": " + text);
}

/// "No space left on device".
inline std::string system_text(int error_number) {
  return std::generic_category().message(error_number);
}

}  // namespace qkv
