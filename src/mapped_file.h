// SPDX-License-Identifier: Apache-2.0
// Tier: call. The bytes of a file for reading: a read-only mapping, or a copy of bytes in memory.
// Used by the parsers of safetensors and npy, which check every offset before they look at the
// bytes behind it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

namespace qkv {

struct FreeAligned {
  void operator()(std::byte* p) const;
};
/// Bytes at an address that every element type may have.
using AlignedBytes = std::unique_ptr<std::byte[], FreeAligned>;
AlignedBytes allocate_aligned(int64_t size_bytes);

/// A file that another process truncates while it is mapped faults on access, as with every
/// mapping. Files that qkv writes are replaced by renaming, which never disturbs a mapping.
class MappedFile {
 public:
  /// Throws Error, naming caller, if path is not a regular file that can be read.
  static MappedFile open(const std::string& path, std::string_view caller);
  static MappedFile copy_of(std::string_view bytes);

  MappedFile(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  const std::byte* data() const { return data_; }
  int64_t size_bytes() const { return size_bytes_; }
  std::string_view text() const {
    return {reinterpret_cast<const char*>(data_), static_cast<size_t>(size_bytes_)};
  }

 private:
  MappedFile() = default;

  const std::byte* data_ = nullptr;
  int64_t size_bytes_ = 0;
  AlignedBytes copy_;  // empty: data_ is a mapping
};

/// Gives typed access to data at any address: where an address does not suit the element type, the
/// bytes are copied once, on first use, and the copy is kept. Thread-safe.
class AlignedCopies {
 public:
  /// element_bytes is a power of two.
  const void* get(const std::byte* data, int64_t size_bytes, int64_t element_bytes) const;

 private:
  mutable std::mutex mutex_;
  mutable std::map<const std::byte*, AlignedBytes> copies_;
};

}  // namespace qkv
