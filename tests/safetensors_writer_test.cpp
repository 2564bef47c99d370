// SPDX-License-Identifier: Apache-2.0
// Tier: test. save_safetensors(): byte for byte the reference implementation's files, strided
// views, refusals.
#include <gtest/gtest.h>

#include "qkv/weights.h"
#include "support/files.h"
#include "support/tensor_values.h"

namespace {

using qkv::ConstTensor;
using qkv::DType;
using qkv::NamedTensor;
using qkv::SafetensorsFile;
using qkv::save_safetensors;
using qkv::test::contains;
using qkv::test::data_path;
using qkv::test::error_text;
using qkv::test::numbers;
using qkv::test::read_bytes;
using qkv::test::TemporaryFolder;

/// All tensors that a view can have, in reverse order: the writer sorts.
std::vector<NamedTensor> tensors_of(const SafetensorsFile& file) {
  std::vector<NamedTensor> tensors;
  for (size_t i = file.tensors().size(); i-- > 0;) {
    tensors.push_back({file.tensors()[i].name, file.tensor(file.tensors()[i].name)});
  }
  return tensors;
}

TEST(SafetensorsWriter, GoldenFiles_ComeOutByteForByte) {
  const TemporaryFolder folder;
  int n_files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(data_path("layers"))) {
    if (entry.path().extension() != ".safetensors") continue;
    const SafetensorsFile file = SafetensorsFile::open(entry.path().string());
    // The reference implementation does not sort the metadata: only files with at most one key can
    // be compared.
    if (file.metadata().size() > 1) continue;
    save_safetensors(folder / "x", tensors_of(file), file.metadata());
    EXPECT_TRUE(read_bytes(folder / "x") == read_bytes(entry.path().string())) << entry.path();
    ++n_files;
  }
  EXPECT_GT(n_files, 50);
  for (const char* name : {"files/all_dtypes.safetensors", "files/no_metadata.safetensors",
                           "files/no_tensors.safetensors"}) {
    const SafetensorsFile file = SafetensorsFile::open(data_path(name));
    save_safetensors(folder / "x", tensors_of(file), file.metadata());
    EXPECT_TRUE(read_bytes(folder / "x") == read_bytes(data_path(name))) << name;
  }
}

TEST(SafetensorsWriter, StridedViews_AreWrittenInCOrder) {
  const TemporaryFolder folder;
  float x[24];
  for (int i = 0; i < 24; ++i) x[i] = static_cast<float>(i);
  const std::vector<NamedTensor> tensors = {
      {"transposed", {x, {4, 3, 2}, {1, 4, 12}}},
      {"reversed", {x + 23, {2, 3}, {-12, -4}}},
      {"broadcast", {x + 5, {2, 2}, {0, 0}}},
      {"column", {x + 1, {6}, {4}}},
      {"scalar", {x + 7, {}}},
      {"empty", {static_cast<const float*>(nullptr), {3, 0}}}};
  save_safetensors(folder / "x", tensors, {{"a", "b"}, {"c", "d"}});
  const SafetensorsFile file = SafetensorsFile::open(folder / "x");
  EXPECT_EQ(file.metadata(), (std::map<std::string, std::string>{{"a", "b"}, {"c", "d"}}));
  ASSERT_EQ(file.tensors().size(), tensors.size());
  for (const NamedTensor& t : tensors) {
    const ConstTensor got = file.tensor(t.name);
    EXPECT_EQ(shape_text(got), shape_text(t.tensor)) << t.name;
    EXPECT_TRUE(got.is_contiguous());
    EXPECT_EQ(numbers(got), numbers(t.tensor)) << t.name;
  }
}

TEST(SafetensorsWriter, Data_IsAligned) {
  const TemporaryFolder folder;
  const uint8_t byte = 1;
  const double number = 2;
  const qkv::bf16_t half = {3};
  save_safetensors(folder / "x",
                   {{"a", {&byte, {1}}}, {"bb", {&half, {1}}}, {"ccc", {&number, {1}}}});
  const SafetensorsFile file = SafetensorsFile::open(folder / "x");
  for (const qkv::TensorInfo& info : file.tensors())
    EXPECT_EQ(info.begin_bytes % size_bytes(info.dtype), 0) << info.name;
  EXPECT_EQ(file.tensors()[0].name, "ccc");
  EXPECT_EQ(file.tensors()[0].begin_bytes % 8, 0);
}

TEST(SafetensorsWriter, WrongArguments_AreRefusedBeforeAnythingIsWritten) {
  const TemporaryFolder folder;
  const std::string path = folder / "x";
  const float x[4] = {};
  const auto refusal = [&](const std::vector<NamedTensor>& tensors,
                           const std::map<std::string, std::string>& metadata = {}) {
    return error_text([&] { save_safetensors(path, tensors, metadata); });
  };
  EXPECT_EQ(refusal({{"a", {x, {4}}}, {"a", {x, {2}}}}),
            "save_safetensors: " + path + ": the name \"a\" appears twice");
  EXPECT_TRUE(contains(refusal({{"__metadata__", {x, {4}}}}), "cannot be named \"__metadata__\""));
  EXPECT_TRUE(contains(refusal({{"a\xff", {x, {4}}}}), "the name \"a\\xff\" is not UTF-8"));
  EXPECT_TRUE(contains(refusal({{"\xed\xa0\x80", {x, {4}}}}), "is not UTF-8"));
  EXPECT_TRUE(contains(refusal({{"\xc0\x80", {x, {4}}}}), "is not UTF-8"));
  EXPECT_TRUE(contains(refusal({{"\xf4\x90\x80\x80", {x, {4}}}}), "is not UTF-8"));
  EXPECT_TRUE(contains(refusal({{"a\xe2\x82", {x, {4}}}}), "is not UTF-8"));
  EXPECT_TRUE(contains(refusal({{"a", {x, {4}}}}, {{"k\xff", "v"}}), "metadata key"));
  EXPECT_TRUE(contains(refusal({{"a", {x, {4}}}}, {{"k", "v\xff"}}), "metadata value"));
  EXPECT_TRUE(contains(refusal({{"a", {}}}), "tensor \"a\" has no data"));
  EXPECT_TRUE(contains(refusal({{"a", {static_cast<const float*>(nullptr), {4}}}}),
                       "tensor \"a\" has no data"));
  const int64_t huge = int64_t{1} << 31;
  EXPECT_TRUE(contains(refusal({{"a", {x, {huge, huge}, {0, 0}}}}), "is too large for a file"));
  EXPECT_TRUE(contains(refusal({}, {{"k", std::string(100'000'000, 'x')}}),
                       "more than the 100000000 allowed"));
  EXPECT_TRUE(folder.names().empty());
  save_safetensors(path, {{"\xf0\x9f\x98\x80", {x, {4}}}});
  EXPECT_EQ(SafetensorsFile::open(path).tensors()[0].name, "\xf0\x9f\x98\x80");
}

}  // namespace
