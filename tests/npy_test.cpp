// SPDX-License-Identifier: Apache-2.0
// Tier: test. NpyFile and save_npy(): recorded cases, NumPy's own files, odd addresses, damaged
// files.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "qkv/weights.h"
#include "support/files.h"
#include "support/tensor_values.h"

namespace {

using qkv::ConstTensor;
using qkv::DType;
using qkv::Error;
using qkv::NpyFile;
using qkv::save_npy;
using qkv::test::contains;
using qkv::test::data_path;
using qkv::test::error_text;
using qkv::test::numbers;
using qkv::test::read_bytes;
using qkv::test::TemporaryFolder;

/// Shape and elements of a nested list of numbers.
void flatten(const nlohmann::json& list, size_t depth, std::vector<int64_t>* shape,
             std::vector<double>* values) {
  if (!list.is_array()) {
    values->push_back(list.get<double>());
    return;
  }
  if (shape->size() == depth) shape->push_back(static_cast<int64_t>(list.size()));
  for (const auto& item : list) flatten(item, depth + 1, shape, values);
}

TEST(Npy, RecordedCases) {
  std::ifstream lines(data_path("file_cases.jsonl"));
  int n_runs = 0;
  for (std::string line; std::getline(lines, line);) {
    const nlohmann::json test_case = nlohmann::json::parse(line);
    for (const auto& run : test_case["runs"]) {
      if (run["op"] != "read_npy") continue;
      ++n_runs;
      const NpyFile file = NpyFile::from_bytes(qkv::test::from_hex(run["hex"].get<std::string>()));
      std::vector<int64_t> shape;
      std::vector<double> values;
      flatten(run["expect"]["array"], 0, &shape, &values);
      EXPECT_EQ(file.info().shape, shape) << run;
      EXPECT_EQ(numbers(file.tensor()), values) << run;
    }
  }
  EXPECT_EQ(n_runs, 7);
}

/// x[i][j][k] = 12 i + 4 j + k - first, shape [2, 3, 4]: the array of the golden files.
void expect_cube(const NpyFile& file, DType dtype, double first) {
  EXPECT_EQ(file.info().dtype, dtype);
  const ConstTensor t = file.tensor();
  EXPECT_EQ(t.dtype, dtype);
  EXPECT_EQ(shape_text(t), "[2, 3, 4]") << file.path();
  std::vector<double> want(24);
  for (size_t i = 0; i < 24; ++i) want[i] = static_cast<double>(i) + first;
  EXPECT_EQ(numbers(t), want) << file.path();
}

TEST(Npy, NumPyFiles_EveryVersionAndDtype) {
  for (const char* name : {"f4_v1", "f4_v2", "f4_v3"}) {
    const NpyFile file = NpyFile::open(data_path(std::string("files/") + name + ".npy"));
    expect_cube(file, DType::f32, -5);
    EXPECT_FALSE(file.fortran_order());
    EXPECT_TRUE(file.tensor().is_contiguous());
  }
  for (const auto& row : qkv::kDTypes) {
    if (row.npy.empty() || row.dtype == DType::f32 || row.dtype == DType::boolean) continue;
    const bool is_unsigned = row.npy[0] == 'u';
    expect_cube(NpyFile::open(data_path("files/" + std::string(row.npy) + ".npy")), row.dtype,
                is_unsigned ? 0 : -5);
  }
  const std::vector<double> bools = numbers(NpyFile::open(data_path("files/b1.npy")).tensor());
  ASSERT_EQ(bools.size(), 24u);
  for (size_t i = 0; i < 24; ++i) EXPECT_EQ(bools[i], i % 2 == 1 ? 1 : 0);
}

TEST(Npy, NumPyFiles_FortranOrderIsAViewWithItsStrides) {
  const NpyFile file = NpyFile::open(data_path("files/fortran.npy"));
  EXPECT_TRUE(file.fortran_order());
  expect_cube(file, DType::f64, -5);
  EXPECT_EQ(file.tensor().stride[0], 1);
  EXPECT_EQ(file.tensor().stride[1], 2);
  EXPECT_EQ(file.tensor().stride[2], 6);
}

TEST(Npy, NumPyFiles_ScalarEmptyAndFiveAxes) {
  const ConstTensor scalar = NpyFile::open(data_path("files/scalar.npy")).tensor();
  EXPECT_EQ(scalar.rank, 0);
  const NpyFile empty = NpyFile::open(data_path("files/empty.npy"));
  EXPECT_EQ(shape_text(empty.tensor()), "[2, 0, 3]");
  const NpyFile five = NpyFile::open(data_path("files/rank5.npy"));
  EXPECT_EQ(five.info().shape, (std::vector<int64_t>{2, 2, 2, 2, 2}));
  EXPECT_TRUE(
      contains(error_text([&] { (void)five.tensor(); }), "[2, 2, 2, 2, 2] has 5 axes, at most 4"));
}

TEST(Npy, NumPyFiles_RefusedWithTheReason) {
  const std::pair<const char*, const char*> table[] = {
      {"big_endian", "big endian"},   {"object", "pickled"},        {"records", "records"},
      {"unicode_records", "records"}, {"complex", "unknown dtype"}, {"text", "unknown dtype"},
      {"datetime", "unknown dtype"}};
  for (const auto& [name, text] : table) {
    const std::string path = data_path(std::string("files/") + name + ".npy");
    const std::string error = error_text([&] { NpyFile::open(path); });
    EXPECT_TRUE(contains(error, "NpyFile::open: " + path + ": byte "));
    EXPECT_TRUE(contains(error, text));
  }
}

TEST(Npy, OddAddresses_AreAlignedForTheReader) {
  for (size_t pad = 0; pad < 8; ++pad) {
    const std::string dict =
        "{'descr':'<f8','fortran_order':False,'shape':(2,)}" + std::string(pad, ' ');
    std::string bytes("\x93NUMPY\x01\0", 8);
    bytes += static_cast<char>(dict.size());
    bytes += '\0';
    bytes += dict;
    const double values[] = {1.5, -2.25};
    bytes.append(reinterpret_cast<const char*>(values), sizeof values);
    const NpyFile file = NpyFile::from_bytes(bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(file.tensor().data) % alignof(double), 0u);
    EXPECT_EQ(numbers(file.tensor()), (std::vector<double>{1.5, -2.25}));
  }
}

TEST(Npy, BooleanThatIsNeither0Nor1_IsRefused) {
  std::string bytes = read_bytes(data_path("files/b1.npy"));
  bytes[130] = '\x07';
  const NpyFile file = NpyFile::from_bytes(bytes, "F");
  EXPECT_EQ(error_text([&] { (void)file.tensor(); }),
            "NpyFile::tensor: F: byte 130: a boolean is 7, 0 or 1 is wanted");
}

TEST(Npy, Save_ReadsBack) {
  const TemporaryFolder folder;
  float x[24];
  for (int i = 0; i < 24; ++i) x[i] = static_cast<float>(i) - 3;
  const bool flags[] = {true, false};
  const uint64_t large[] = {~uint64_t{0}};
  const std::vector<ConstTensor> tensors = {{x, {2, 3, 4}},
                                            {x, {24}},
                                            {x + 3, {}},
                                            {x, {4, 3, 2}, {1, 4, 12}},
                                            {x + 23, {4}, {-2}},
                                            {x, {2, 0}},
                                            {flags, {2}},
                                            {large, {1}},
                                            {x + 1, {1, 2, 2, 2}, {99, 0, 1, 3}}};
  for (const ConstTensor& t : tensors) {
    save_npy(folder / "x.npy", t);
    const NpyFile file = NpyFile::open(folder / "x.npy");
    EXPECT_EQ(file.info().dtype, t.dtype);
    EXPECT_EQ(file.info().begin_bytes % 64, 0);
    EXPECT_EQ(shape_text(file.tensor()), shape_text(t));
    EXPECT_EQ(numbers(file.tensor()), numbers(t));
  }
}

TEST(Npy, Save_GoldenFilesComeOutByteForByte) {
  const TemporaryFolder folder;
  for (const char* name : {"f4_v1", "f2", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8",
                           "b1", "scalar", "empty"}) {
    const std::string path = data_path(std::string("files/") + name + ".npy");
    save_npy(folder / "x.npy", NpyFile::open(path).tensor());
    EXPECT_TRUE(read_bytes(folder / "x.npy") == read_bytes(path)) << name;
  }
}

TEST(Npy, Save_WrongArgumentsAreRefused) {
  const TemporaryFolder folder;
  const qkv::bf16_t half[] = {{0}};
  EXPECT_TRUE(contains(error_text([&] {
                         save_npy(folder / "x.npy", {half, {1}});
                       }),
                       "npy has no dtype bf16"));
  EXPECT_TRUE(contains(error_text([&] { save_npy(folder / "x.npy", {}); }), "there is no data"));
  const float x = 0;
  const int64_t huge = int64_t{1} << 31;
  EXPECT_TRUE(contains(error_text([&] {
                         save_npy(folder / "x.npy", {&x, {huge, huge}, {0, 0}});
                       }),
                       "too large"));
  EXPECT_TRUE(contains(error_text([&] {
                         save_npy(folder / "none/x.npy", {&x, {1}});
                       }),
                       "cannot be written"));
  EXPECT_TRUE(folder.names().empty());
}

/// Every element of every damaged file that is still accepted is read; run under asan.
TEST(Npy, Damaged_IsRefusedOrSafe) {
  std::mt19937 random(2026);
  int n_refused = 0, n_read = 0;
  for (const char* name : {"f4_v1", "f4_v3", "fortran", "scalar", "b1", "empty"}) {
    const std::string whole = read_bytes(data_path(std::string("files/") + name + ".npy"));
    for (int i = 0; i < 2000; ++i) {
      try {
        const NpyFile file = NpyFile::from_bytes(qkv::test::damaged(whole, random));
        const ConstTensor t = file.tensor();
        EXPECT_EQ(numbers(t).size(), static_cast<size_t>(t.num_elements()));
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
