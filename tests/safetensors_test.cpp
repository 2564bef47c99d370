// SPDX-License-Identifier: Apache-2.0
// Tier: test. SafetensorsFile: recorded cases, files of the reference implementation, odd
// addresses, damaged files.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "qkv/weights.h"
#include "support/files.h"
#include "support/tensor_values.h"

namespace {

using qkv::ConstTensor;
using qkv::DType;
using qkv::Error;
using qkv::SafetensorsFile;
using qkv::test::contains;
using qkv::test::data_path;
using qkv::test::error_text;
using qkv::test::numbers;
using qkv::test::read_bytes;

TEST(Safetensors, RecordedCases) {
  std::ifstream lines(data_path("file_cases.jsonl"));
  int n_runs = 0;
  for (std::string line; std::getline(lines, line);) {
    const nlohmann::json test_case = nlohmann::json::parse(line);
    for (const auto& run : test_case["runs"]) {
      if (run["op"] != "open_safetensors") continue;
      ++n_runs;
      const std::string where =
          test_case["id"].get<std::string>() + " " + run["hex"].get<std::string>();
      const std::string bytes = qkv::test::from_hex(run["hex"].get<std::string>());
      const auto& expect = run["expect"];
      if (expect.value("reject", false)) {
        EXPECT_THROW(SafetensorsFile::from_bytes(bytes), Error) << where;
        continue;
      }
      const SafetensorsFile file = SafetensorsFile::from_bytes(bytes);
      const auto shapes = expect.value("shapes", nlohmann::json::object());
      for (const auto& [name, values] : expect["tensors"].items()) {
        const auto want = values.is_array() ? values.get<std::vector<double>>()
                                            : std::vector<double>{values.get<double>()};
        EXPECT_EQ(numbers(file.tensor(name)), want) << where << name;
      }
      for (const auto& [name, shape] : shapes.items()) {
        EXPECT_EQ(file.find(name)->shape, shape.get<std::vector<int64_t>>()) << where << name;
      }
    }
  }
  EXPECT_EQ(n_runs, 25);
}

TEST(Safetensors, EveryDtype_HoldsTheBytesOfTheReferenceImplementation) {
  const SafetensorsFile file = SafetensorsFile::open(data_path("files/all_dtypes.safetensors"));
  EXPECT_EQ(file.path(), data_path("files/all_dtypes.safetensors"));
  EXPECT_EQ(file.tensors().size(), 16u);
  EXPECT_EQ(file.metadata().at("key \"\xc3\xbc\""), "value\n\xe2\x82\xac");
  const std::pair<const char*, DType> names[] = {
      {"t.bool", DType::boolean},  {"t.uint8", DType::u8},    {"t.int8", DType::i8},
      {"t.uint16", DType::u16},    {"t.int16", DType::i16},   {"t.float16", DType::f16},
      {"t.bfloat16", DType::bf16}, {"t.uint32", DType::u32},  {"t.int32", DType::i32},
      {"t.float32", DType::f32},   {"t.float64", DType::f64}, {"t.uint64", DType::u64},
      {"t.int64", DType::i64}};
  for (const auto& [name, dtype] : names) {
    const ConstTensor t = file.tensor(name);
    EXPECT_EQ(t.dtype, dtype);
    EXPECT_EQ(shape_text(t), "[3, 5]");
    EXPECT_TRUE(t.is_contiguous());
    const auto* bytes = static_cast<const uint8_t*>(t.data);
    for (size_t i = 0; i < 15 * static_cast<size_t>(size_bytes(dtype)); ++i) {
      const size_t want =
          dtype == DType::boolean ? i % 2 : (7 * i + std::string_view(name).size() - 2) % 251;
      ASSERT_EQ(bytes[i], want) << name << i;
    }
  }
  EXPECT_EQ(numbers(file.tensor("scalar")), std::vector<double>{2.5});
  EXPECT_EQ(file.tensor("scalar").rank, 0);
  EXPECT_EQ(shape_text(file.tensor("empty")), "[2, 0, 3]");
  EXPECT_EQ(numbers(file.tensor("q\"\\/\b\f\n\r\t\x01\x7f \xc3\xbc\xe2\x82\xac\xf0\x9f\x98\x80")),
            std::vector<double>{42});
}

TEST(Safetensors, Absent_IsNullOrAnError) {
  const SafetensorsFile file = SafetensorsFile::open(data_path("files/no_metadata.safetensors"));
  EXPECT_TRUE(file.metadata().empty());
  EXPECT_EQ(file.find("b"), nullptr);
  EXPECT_EQ(error_text([&] { (void)file.tensor("b\n"); }),
            "SafetensorsFile::tensor: " + file.path() + ": there is no tensor \"b\\x0a\"");
}

TEST(Safetensors, MoreThanFourAxes_AreListedButNotViewed) {
  const SafetensorsFile file = SafetensorsFile::open(data_path("files/six_axes.safetensors"));
  const qkv::TensorInfo* info = file.find("x");
  ASSERT_NE(info, nullptr);
  EXPECT_EQ(info->shape, (std::vector<int64_t>{1, 2, 1, 2, 1, 1}));
  EXPECT_EQ(std::memcmp(file.data(*info), "abcd", 4), 0);
  EXPECT_TRUE(contains(error_text([&] { (void)file.tensor("x"); }),
                       "tensor \"x\" [1, 2, 1, 2, 1, 1] has 6 axes, at most 4 are supported"));
}

TEST(Safetensors, NoTensors_IsAFile) {
  EXPECT_TRUE(SafetensorsFile::open(data_path("files/no_tensors.safetensors")).tensors().empty());
}

TEST(Safetensors, MissingFile_SaysSo) {
  EXPECT_EQ(
      error_text([] { SafetensorsFile::open("/none/x.safetensors"); }),
      "SafetensorsFile::open: /none/x.safetensors: cannot be opened: No such file or directory");
}

/// Files whose data starts at every remainder of 8.
TEST(Safetensors, OddAddresses_AreAlignedForTheReader) {
  const qkv::test::TemporaryFolder folder;
  const double values[] = {1.5, -2.25};
  for (size_t pad = 0; pad < 8; ++pad) {
    std::string header =
        R"({"x":{"dtype":"F64","shape":[2],"data_offsets":[0,16]}})" + std::string(pad, ' ');
    std::string bytes(8, '\0');
    bytes[0] = static_cast<char>(header.size());
    bytes += header;
    bytes.append(reinterpret_cast<const char*>(values), sizeof values);
    qkv::test::write_bytes(folder / "x", bytes);
    for (const SafetensorsFile& file :
         {SafetensorsFile::from_bytes(bytes), SafetensorsFile::open(folder / "x")}) {
      const ConstTensor t = file.tensor("x");
      EXPECT_EQ(reinterpret_cast<uintptr_t>(t.data) % alignof(double), 0u);
      EXPECT_EQ(static_cast<const double*>(t.data)[0], 1.5);
      EXPECT_EQ(static_cast<const double*>(t.data)[1], -2.25);
      EXPECT_EQ(file.tensor("x").data, t.data) << "one copy, kept";
    }
  }
}

TEST(Safetensors, Views_OutliveTheFirstHandle) {
  ConstTensor t;
  std::vector<SafetensorsFile> kept;
  {
    const SafetensorsFile file = SafetensorsFile::open(data_path("files/no_metadata.safetensors"));
    t = file.tensor("a");
    kept.push_back(file);
  }
  EXPECT_EQ(numbers(t), std::vector<double>{2.5});
}

TEST(Safetensors, BooleanThatIsNeither0Nor1_IsRefused) {
  std::string bytes = read_bytes(data_path("files/all_dtypes.safetensors"));
  bytes.back() = '\x02';
  const SafetensorsFile file = SafetensorsFile::from_bytes(bytes, "F");
  EXPECT_EQ(error_text([&] { (void)file.tensor("t.bool"); }),
            "SafetensorsFile::tensor: F: byte " + std::to_string(bytes.size() - 1) +
                ": a boolean is 2, 0 or 1 is wanted");
}

TEST(Safetensors, Truncated_AtEveryByte_IsRefused) {
  const std::string bytes = read_bytes(data_path("files/all_dtypes.safetensors"));
  for (size_t n = 0; n < bytes.size(); ++n) {
    ASSERT_THROW(SafetensorsFile::from_bytes(std::string_view(bytes).substr(0, n)), Error) << n;
  }
}

/// Every tensor of every damaged file that is still accepted is read to its last byte; run under
/// asan.
TEST(Safetensors, Damaged_IsRefusedOrSafe) {
  std::mt19937 random(2026);
  int n_refused = 0, n_read = 0;
  for (const char* name :
       {"files/all_dtypes.safetensors", "layers/single_token/weights.safetensors"}) {
    const std::string whole = read_bytes(data_path(name));
    for (int i = 0; i < 5000; ++i) {
      const std::string bytes = qkv::test::damaged(whole, random);
      try {
        const SafetensorsFile file = SafetensorsFile::from_bytes(bytes);
        for (const qkv::TensorInfo& info : file.tensors()) {
          try {
            const ConstTensor t = file.tensor(info.name);
            EXPECT_EQ(numbers(t).size(), static_cast<size_t>(t.num_elements()));
          } catch (const Error&) {  // more than 4 axes, or a boolean that is none
          }
        }
        ++n_read;
      } catch (const Error&) {
        ++n_refused;
      }
    }
  }
  EXPECT_GT(n_refused, 1000);
  EXPECT_GT(n_read, 100);
}

}  // namespace
