// SPDX-License-Identifier: Apache-2.0
// Tier: test. Fuzz target: any bytes as a safetensors file. Whatever is accepted must be readable to the last byte,
// and be refused or consistent as a layer.
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

void read_all(const qkv::SafetensorsFile& file) {
  int64_t end = 0;
  unsigned sum = 0;
  for (const qkv::TensorInfo& info : file.tensors()) {
    require(end == 0 || info.begin_bytes == end);
    end = info.end_bytes;
    require(file.find(info.name) == &info);
    const auto* bytes = static_cast<const unsigned char*>(file.data(info));
    for (int64_t i = 0; i < info.end_bytes - info.begin_bytes; ++i) sum += bytes[i];
    try {
      const qkv::ConstTensor t = file.tensor(info.name);
      require(t.num_elements() * size_bytes(t.dtype) == info.end_bytes - info.begin_bytes);
      require(reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(size_bytes(t.dtype)) ==
              0);
      if (qkv::info(t.dtype).is_float) {
        require(static_cast<int64_t>(to_f32(t).size()) == t.num_elements());
      }
    } catch (const qkv::Error&) {
      require(info.shape.size() > 4 || info.dtype == qkv::DType::boolean);
    }
  }
  volatile unsigned keep = sum;
  (void)keep;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  try {
    const qkv::SafetensorsFile file = qkv::SafetensorsFile::from_bytes(bytes);
    read_all(file);
    for (const int64_t num_heads : {0, 1, 2}) {
      qkv::LoadLayerOptions options;
      options.num_heads = num_heads;
      try {
        load_layer(file, options).check("consistent");
      } catch (const qkv::Error& error) {
        require(!std::string_view(error.what()).starts_with("consistent"));
      }
    }
  } catch (const qkv::Error& error) {
    require(std::string_view(error.what()).find('\n') == std::string_view::npos);
  }
  return 0;
}
