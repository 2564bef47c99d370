// SPDX-License-Identifier: Apache-2.0
// Tier: call. The write-sync-rename sequence (POSIX).
#include "atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "file_error.h"
#include "strided.h"

namespace qkv {
namespace {

constexpr mode_t kDefaultMode = 0666;        // the process's umask applies
constexpr mode_t kPermissionBits = 0777;     // set-user-id and the like are not carried over
constexpr int64_t kMaxWriteBytes = 1 << 30;  // Linux writes at most 2 GiB - 4 KiB per call
constexpr size_t kBufferBytes = 1 << 20;     // a write call per MiB costs nothing
constexpr int kMaxTemporaryNames = 100;

std::string random_name() {
  static constexpr char kLetters[] = "abcdefghijklmnopqrstuvwxyz0123456789";
  std::random_device random;
  std::string name = ".qkv-";
  for (int i = 0; i < 12; ++i) name += kLetters[random() % (sizeof(kLetters) - 1)];
  return name;
}

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

}  // namespace

AtomicFile::AtomicFile(const std::string& path, std::string_view caller)
    : caller_(caller), path_(path), target_(path) {
  if (path.empty()) throw Error(caller_ + ": the path to write to is empty");
  if (path.back() == '/') file_error(caller_, path_, "is a folder, a file name is wanted");
  struct stat status = {};
  bool exists = ::lstat(path.c_str(), &status) == 0;
  if (exists && S_ISLNK(status.st_mode)) {
    const std::unique_ptr<char, decltype(&std::free)> real(::realpath(path.c_str(), nullptr),
                                                           &std::free);
    if (!real) fail("is a symbolic link that leads nowhere", errno);
    target_ = real.get();
    exists = ::stat(target_.c_str(), &status) == 0;
  }
  if (exists && S_ISDIR(status.st_mode))
    file_error(caller_, path_, "is a folder, a file name is wanted");
  if (exists && !S_ISREG(status.st_mode)) {
    file_error(caller_, path_, "is not a regular file and cannot be replaced by one");
  }
  // Renaming needs only the folder's permission, but a file made read-only is not to be replaced.
  if (exists && ::faccessat(AT_FDCWD, target_.c_str(), W_OK, AT_EACCESS) != 0) {
    fail("cannot be written", errno);
  }
  folder_ = folder_of(target_);
  for (int attempt = 0; attempt < kMaxTemporaryNames && fd_ < 0; ++attempt) {
    temporary_ = (folder_ == "/" ? "/" : folder_ + "/") + random_name();
    fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, kDefaultMode);
    if (fd_ < 0 && errno != EEXIST && errno != EINTR) break;
  }
  if (fd_ < 0) fail("cannot be written", errno);
  // Best effort: on file systems without permissions the file is simply created with the default
  // ones.
  if (exists && ::fchmod(fd_, status.st_mode & kPermissionBits) != 0) errno = 0;
}

AtomicFile::~AtomicFile() {
  if (fd_ >= 0) ::close(fd_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void AtomicFile::write(const void* data, int64_t size_bytes) {
  const char* p = static_cast<const char*>(data);
  while (size_bytes > 0) {
    const ssize_t n = ::write(fd_, p, static_cast<size_t>(std::min(size_bytes, kMaxWriteBytes)));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("cannot be written beyond byte " + std::to_string(written_bytes_), errno);
    p += n;
    size_bytes -= n;
    written_bytes_ += n;
  }
}

void AtomicFile::commit() {
  if (::fsync(fd_) != 0) fail("cannot be written", errno);
  // Network file systems report a full disk as late as here.
  const int closed = ::close(fd_);
  fd_ = -1;
  if (closed != 0) fail("cannot be written", errno);
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail("cannot be replaced", errno);
  temporary_.clear();
  // The file is whole from here on. Syncing the folder makes the new name survive a power cut; not
  // every file system can.
  const int folder = ::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return;
  ::fsync(folder);
  ::close(folder);
}

void AtomicFile::fail(const std::string& what, int error_number) const {
  file_error(caller_, path_, what + ": " + system_text(error_number));
}

void write_c_order(const ConstTensor& tensor, AtomicFile* file) {
  if (tensor.is_contiguous()) {
    if (tensor.num_elements() > 0)
      file->write(tensor.data, tensor.num_elements() * size_bytes(tensor.dtype));
    return;
  }
  const auto element_bytes = static_cast<size_t>(size_bytes(tensor.dtype));
  std::vector<std::byte> buffer;
  const auto flush = [&] {
    file->write(buffer.data(), static_cast<int64_t>(buffer.size()));
    buffer.clear();
  };
  for_each_row(tensor, [&](const std::byte* first, int64_t count, int64_t step_bytes) {
    for (int64_t i = 0; i < count; ++i) {
      const std::byte* element = first + i * step_bytes;
      buffer.insert(buffer.end(), element, element + element_bytes);
      if (buffer.size() >= kBufferBytes) flush();
    }
  });
  flush();
}

}  // namespace qkv
