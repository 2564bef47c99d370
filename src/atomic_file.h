// SPDX-License-Identifier: Apache-2.0
// Tier: call. Writes a file that appears whole or not at all: a temporary file in the same folder,
// synced, then renamed.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "qkv/tensor.h"

namespace qkv {

/// Until commit() returns, the file that was at path (if any) is untouched; if commit() is not
/// reached, the temporary file is removed. A symbolic link at path is followed. A device, pipe or
/// folder at path is refused. An existing file's permissions are kept. Errors name caller and path.
class AtomicFile {
 public:
  AtomicFile(const std::string& path, std::string_view caller);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, int64_t size_bytes);
  void write(std::string_view text) { write(text.data(), static_cast<int64_t>(text.size())); }
  void commit();

 private:
  [[noreturn]] void fail(const std::string& what, int error_number) const;

  std::string caller_;
  std::string path_;    // as the caller gave it, for errors
  std::string target_;  // the same file behind all symbolic links
  std::string folder_;
  std::string temporary_;
  int fd_ = -1;
  int64_t written_bytes_ = 0;
};

/// The elements in C order, without padding. tensor may have any strides.
void write_c_order(const ConstTensor& tensor, AtomicFile* file);

}  // namespace qkv
