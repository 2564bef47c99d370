// SPDX-License-Identifier: Apache-2.0
// Tier: call. Whether text is UTF-8: names in files must be, and error texts always are.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace qkv {

/// True for well-formed UTF-8: no overlong forms, no surrogates, nothing above U+10FFFF.
inline bool is_utf8(std::string_view text) {
  size_t i = 0;
  while (i < text.size()) {
    const auto lead = static_cast<unsigned char>(text[i++]);
    if (lead < 0x80) continue;
    const size_t rest = lead >= 0xc2 && lead <= 0xdf   ? 1
                        : lead >= 0xe0 && lead <= 0xef ? 2
                        : lead >= 0xf0 && lead <= 0xf4 ? 3
                                                       : 0;
    if (rest == 0 || text.size() - i < rest) return false;
    uint32_t code = lead & (0x3fu >> rest);
    for (size_t k = 0; k < rest; ++k) {
      const auto byte = static_cast<unsigned char>(text[i++]);
      if ((byte & 0xc0) != 0x80) return false;
      code = code << 6 | (byte & 0x3fu);
    }
    if (rest == 2 && (code < 0x800 || (code >= 0xd800 && code <= 0xdfff))) return false;
    if (rest == 3 && (code < 0x10000 || code > 0x10ffff)) return false;
  }
  return true;
}

}  // namespace qkv
