// SPDX-License-Identifier: Apache-2.0
// Tier: test. Files of layers for tests: named f32 tensors, numbered so that every element can be recognised.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "qkv/weights.h"
#include "support/files.h"

namespace qkv::test {

/// Tensors by name; element i of the n-th tensor that is added is 1000 n + i.
class LayerFile {
 public:
  LayerFile& add(const std::string& name, const std::vector<int64_t>& shape) {
    int64_t n = 1;
    for (const int64_t extent : shape) n *= extent;
    std::vector<float>& values = values_[name];
    for (int64_t i = 0; i < n; ++i) values.push_back(static_cast<float>(1000 * count_ + i));
    ++count_;
    shapes_[name] = shape;
    return *this;
  }
  LayerFile& remove(const std::string& name) {
    EXPECT_EQ(shapes_.erase(name), 1u) << name;
    return *this;
  }
  LayerFile& metadata(const std::string& key, const std::string& value) {
    metadata_[key] = value;
    return *this;
  }
  const std::vector<float>& values(const std::string& name) const { return values_.at(name); }
  /// Rows [begin, begin + count) of a tensor.
  std::vector<float> rows(const std::string& name, int64_t begin, int64_t count) const {
    const std::vector<int64_t>& shape = shapes_.at(name);
    const int64_t row = shape.size() == 2 ? shape[1] : 1;
    const auto first = values_.at(name).begin() + begin * row;
    return {first, first + count * row};
  }

  SafetensorsFile open() const {
    const TemporaryFolder folder;
    std::vector<NamedTensor> tensors;
    for (const auto& [name, shape] : shapes_) {
      tensors.push_back({name, {values_.at(name).data(), DType::f32, shape}});
    }
    save_safetensors(folder / "f", tensors, metadata_);
    return SafetensorsFile::from_bytes(read_bytes(folder / "f"), "F");
  }

 private:
  std::map<std::string, std::vector<float>> values_;
  std::map<std::string, std::vector<int64_t>> shapes_;
  std::map<std::string, std::string> metadata_;
  int64_t count_ = 1;
};

}  // namespace qkv::test
