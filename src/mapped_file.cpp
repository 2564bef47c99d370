// SPDX-License-Identifier: Apache-2.0
// Tier: call. Opens and maps files (POSIX), and keeps aligned copies of data at odd addresses.
#include "mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "file_error.h"

namespace qkv {
namespace {

constexpr std::align_val_t kAlignment{64};  // a cache line, and the widest vector

struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

}  // namespace

void FreeAligned::operator()(std::byte* p) const { ::operator delete[](p, kAlignment); }

AlignedBytes allocate_aligned(int64_t size_bytes) {
  return AlignedBytes(new (kAlignment) std::byte[static_cast<size_t>(size_bytes)]);
}

MappedFile MappedFile::open(const std::string& path, std::string_view caller) {
  // Without O_NONBLOCK the open of a pipe would wait for a writer before it can be refused.
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.fd < 0) file_error(caller, path, "cannot be opened: " + system_text(errno));
  struct stat status = {};
  if (::fstat(file.fd, &status) != 0) {
    file_error(caller, path, "cannot be examined: " + system_text(errno));
  }
  if (S_ISDIR(status.st_mode)) file_error(caller, path, "is a folder, a file is wanted");
  if (!S_ISREG(status.st_mode)) {
    file_error(caller, path, "is not a regular file and cannot be mapped; copy it to a file first");
  }
  MappedFile mapped;
  if (status.st_size == 0) return mapped;
  void* address =
      ::mmap(nullptr, static_cast<size_t>(status.st_size), PROT_READ, MAP_PRIVATE, file.fd, 0);
  if (address == MAP_FAILED) file_error(caller, path, "cannot be mapped: " + system_text(errno));
  mapped.data_ = static_cast<const std::byte*>(address);
  mapped.size_bytes_ = status.st_size;
  return mapped;
}

MappedFile MappedFile::copy_of(std::string_view bytes) {
  MappedFile file;
  if (bytes.empty()) return file;
  file.copy_ = allocate_aligned(static_cast<int64_t>(bytes.size()));
  std::memcpy(file.copy_.get(), bytes.data(), bytes.size());
  file.data_ = file.copy_.get();
  file.size_bytes_ = static_cast<int64_t>(bytes.size());
  return file;
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)),
      copy_(std::move(other.copy_)) {}

MappedFile::~MappedFile() {
  if (data_ == nullptr || copy_ != nullptr) return;
  ::munmap(const_cast<std::byte*>(data_), static_cast<size_t>(size_bytes_));
}

const void* AlignedCopies::get(const std::byte* data, int64_t size_bytes,
                               int64_t element_bytes) const {
  static constexpr struct alignas(64) { std::byte bytes[64]; } kNothing = {};
  if (size_bytes == 0) return kNothing.bytes;
  if (reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(element_bytes) == 0) return data;
  const std::lock_guard<std::mutex> lock(mutex_);
  AlignedBytes& copy = copies_[data];
  if (!copy) {
    copy = allocate_aligned(size_bytes);
    std::memcpy(copy.get(), data, static_cast<size_t>(size_bytes));
  }
  return copy.get();
}

}  // namespace qkv
