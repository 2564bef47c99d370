// SPDX-License-Identifier: Apache-2.0
// Memory whose first or last byte touches a page that may not be touched: reading one element too
// far ends the test.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <span>
#include <utility>

namespace qkv::test {

/// Which end of the data lies at a forbidden page.
enum class Guard : uint8_t { behind, before };

/// Filled with 0xFF: NaN in every floating-point type. Data that ends at a page is as aligned as
/// its size allows.
class GuardedBuffer {
 public:
  GuardedBuffer() = default;
  explicit GuardedBuffer(size_t bytes, Guard guard = Guard::behind) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t inner = (bytes + page - 1) / page * page;
    mapped_bytes_ = inner + 2 * page;
    void* mapped = mmap(nullptr, mapped_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    mapped_ = static_cast<std::byte*>(mapped);
    if (inner > 0 && mprotect(mapped_ + page, inner, PROT_READ | PROT_WRITE) != 0)
      throw std::bad_alloc();
    data_ = mapped_ + page + (guard == Guard::behind ? inner - bytes : 0);
    if (bytes > 0) std::memset(data_, 0xFF, bytes);
  }
  GuardedBuffer(GuardedBuffer&& o) noexcept { swap(o); }
  GuardedBuffer& operator=(GuardedBuffer&& o) noexcept {
    swap(o);
    return *this;
  }
  ~GuardedBuffer() {
    if (mapped_) munmap(mapped_, mapped_bytes_);
  }

  std::byte* data() const { return data_; }

 private:
  void swap(GuardedBuffer& o) {
    std::swap(mapped_, o.mapped_);
    std::swap(mapped_bytes_, o.mapped_bytes_);
    std::swap(data_, o.data_);
  }
  std::byte* mapped_ = nullptr;
  size_t mapped_bytes_ = 0;
  std::byte* data_ = nullptr;
};

/// Floats that end at a forbidden page.
class GuardedFloats {
 public:
  explicit GuardedFloats(int64_t n, float value = 0)
      : n_(static_cast<size_t>(n)), buffer_(n_ * sizeof(float)) {
    std::fill(span().begin(), span().end(), value);
  }
  float* data() const { return reinterpret_cast<float*>(buffer_.data()); }
  float& operator[](int64_t i) const { return data()[i]; }
  std::span<float> span() const { return {data(), n_}; }

 private:
  size_t n_;
  GuardedBuffer buffer_;
};

}  // namespace qkv::test
