// SPDX-License-Identifier: Apache-2.0
// Tier: test. Fuzz target: any bytes as an npy file. Whatever is accepted must be readable to the last element by its
// strides.
#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "qkv/weights.h"

namespace {

/// Ends the process, so that the fuzzer keeps the input.
void require(bool holds) {
  if (!holds) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  try {
    const qkv::NpyFile file = qkv::NpyFile::from_bytes(bytes);
    const qkv::TensorInfo& info = file.info();
    require(info.end_bytes == static_cast<int64_t>(size));
    const qkv::ConstTensor t = file.tensor();
    require(t.num_elements() * size_bytes(t.dtype) == info.end_bytes - info.begin_bytes);
    require(reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(size_bytes(t.dtype)) == 0);
    if (qkv::info(t.dtype).is_float) {
      require(static_cast<int64_t>(to_f32(t).size()) == t.num_elements());
    }
  } catch (const qkv::Error& error) {
    require(std::string_view(error.what()).find('\n') == std::string_view::npos);
  }
  return 0;
}
