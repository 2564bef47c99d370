// SPDX-License-Identifier: Apache-2.0
// Tier: test. The header of safetensors files: what is accepted, and a table of everything that is
// refused with its text.
#include "safetensors_header.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "support/files.h"

namespace {

using qkv::DType;
using qkv::SafetensorsHeader;
using qkv::test::contains;
using qkv::test::error_text;

std::string length_text(uint64_t n) {
  std::string text;
  for (int i = 0; i < 8; ++i) text += static_cast<char>(n >> (8 * i) & 0xff);
  return text;
}

/// A file with this header and so many bytes of data.
std::string file_of(const std::string& header, size_t data_bytes) {
  return length_text(header.size()) + header + std::string(data_bytes, '\x01');
}

std::string entry(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return fmt::format(R"({{"dtype":{},"shape":{},"data_offsets":{}}})", dtype, shape, offsets);
}

SafetensorsHeader parse(const std::string& file) {
  return qkv::parse_safetensors_header(file, "F", "caller");
}

std::string refusal(const std::string& file) {
  return error_text([&] { parse(file); });
}

TEST(SafetensorsHeader, Valid_TensorsInOrderOfOffsetsAndMetadata) {
  const std::string header =
      R"({"b":{"dtype":"F16","shape":[2,3],"data_offsets":[4,16]},"__metadata__":{"k":"v","":"\u00e9"},)"
      R"("a":{"data_offsets":[0,4],"shape":[],"dtype":"F32"},"":{"dtype":"BOOL","shape":[1],"data_offsets":[16,17]}}   )";
  const SafetensorsHeader got = parse(file_of(header, 17));
  const auto begin = static_cast<int64_t>(8 + header.size());
  ASSERT_EQ(got.tensors.size(), 3u);
  EXPECT_EQ(got.tensors[0].name, "a");
  EXPECT_EQ(got.tensors[0].dtype, DType::f32);
  EXPECT_TRUE(got.tensors[0].shape.empty());
  EXPECT_EQ(got.tensors[0].begin_bytes, begin);
  EXPECT_EQ(got.tensors[0].end_bytes, begin + 4);
  EXPECT_EQ(got.tensors[1].name, "b");
  EXPECT_EQ(got.tensors[1].dtype, DType::f16);
  EXPECT_EQ(got.tensors[1].shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(got.tensors[2].name, "");
  EXPECT_EQ(got.tensors[2].dtype, DType::boolean);
  EXPECT_EQ(got.metadata, (std::map<std::string, std::string>{{"k", "v"}, {"", "\xc3\xa9"}}));
}

TEST(SafetensorsHeader, Valid_EveryDtypeOfTheTable) {
  for (const auto& row : qkv::kDTypes) {
    const std::string tag = '"' + std::string(row.safetensors) + '"';
    const std::string bytes = fmt::format("[0,{}]", 3 * row.bytes);
    const auto got = parse(
        file_of(R"({"t":)" + entry(tag, "[3]", bytes) + "}", 3 * static_cast<size_t>(row.bytes)));
    EXPECT_EQ(got.tensors.at(0).dtype, row.dtype) << row.name;
  }
}

TEST(SafetensorsHeader, Valid_EmptyTensorsNoTensorsManyAxes) {
  EXPECT_TRUE(parse(file_of("{}", 0)).tensors.empty());
  EXPECT_TRUE(parse(file_of(R"({"__metadata__":{}})", 0)).metadata.empty());
  const auto got =
      parse(file_of(R"({"z":)" + entry(R"("F64")", "[3,0,288230376151711744]", "[0,0]") +
                        R"(,"y":)" + entry(R"("U8")", "[1,1,1,1,1,2]", "[0,2]") + "}",
                    2));
  ASSERT_EQ(got.tensors.size(), 2u);
  EXPECT_EQ(got.tensors[0].name, "z") << "an empty tensor may share an offset";
  EXPECT_EQ(got.tensors[1].shape.size(), 6u);
}

TEST(SafetensorsHeader, Valid_UnknownFieldsAreReadOver) {
  const std::string header =
      R"({"t":{"note":[1,-2,3.5,true,null,{"a":{"b":[[]]}}],"dtype":"U8","shape":[1],"x":"y","n":-1,"data_offsets":[0,1]}})";
  EXPECT_EQ(parse(file_of(header, 1)).tensors.at(0).name, "t");
}

TEST(SafetensorsHeader, Length_MustBeTrue) {
  const std::string tail = "{}";
  EXPECT_TRUE(contains(refusal(""), "caller: F: byte 0: the file has 0 bytes"));
  EXPECT_TRUE(contains(refusal("\x02\0\0\0\0\0\0"), "byte 0"));
  EXPECT_TRUE(contains(refusal(length_text(3) + tail), "claims 3 bytes, but only 2 follow"));
  EXPECT_TRUE(
      contains(refusal(length_text(100000000) + tail), "claims 100000000 bytes, but only 2"));
  EXPECT_TRUE(contains(refusal(length_text(100000001) + tail), "more than the 100000000 allowed"));
  for (const uint64_t n : {~uint64_t{0}, ~uint64_t{0} - 7, uint64_t{1} << 63, uint64_t{1} << 32}) {
    EXPECT_TRUE(contains(refusal(length_text(n) + tail), "more than the 100000000 allowed")) << n;
  }
  EXPECT_TRUE(contains(refusal(length_text(0)), "byte 8: the header must begin with '{'"));
}

TEST(SafetensorsHeader, LargestHeader_IsRead) {
  std::string header = R"({"__metadata__":{"k":")";
  header.resize(static_cast<size_t>(qkv::kMaxSafetensorsHeaderBytes) - 3, 'x');
  header += R"("}})";
  EXPECT_EQ(parse(file_of(header, 0)).metadata.at("k").size(), header.size() - 25);
}

struct Bad {
  std::string header;
  size_t data_bytes;
  std::string text;
};

TEST(SafetensorsHeader, Refused_WithTheReason) {
  const std::string good = entry(R"("F32")", "[1]", "[0,4]");
  const auto tensor = [](const std::string& e) { return R"({"t":)" + e + "}"; };
  const std::string deep_lists = std::string(100, '[') + std::string(100, ']');
  std::string deep_objects;
  for (int i = 0; i < 100; ++i) deep_objects += R"({"a":)";
  deep_objects.append("1").append(100, '}');
  std::string many_axes = "[1";
  for (int i = 0; i < 64; ++i) many_axes += ",1";
  const std::vector<Bad> table = {
      // Not JSON, or not the JSON of the format.
      {" {}", 0, "must begin with '{'"},
      {"\xef\xbb\xbf{}", 0, "must begin with '{'"},
      {"[]", 0, "must begin with '{'"},
      {"{", 0, "not valid JSON"},
      {"{} {}", 0, "not valid JSON"},
      {R"({"t":})", 0, "not valid JSON"},
      {R"({"__metadata__":{},})", 0, "not valid JSON"},
      {R"({t:{}})", 0, "not valid JSON"},
      {R"(/* */{})", 0, "must begin"},
      {R"({/* */})", 0, "not valid JSON"},
      {R"({"t":NaN})", 0, "not valid JSON"},
      {std::string("{}\0\0", 4), 0, "byte 10: the header holds a zero byte"},
      {std::string("{}\0{\"hidden\":1}", 16), 0, "byte 10: the header holds a zero byte"},
      {"{\"a\xff\":" + good + "}", 4, "not valid JSON"},
      {"{\"\xc0\xaf\":" + good + "}", 4, "not valid JSON"},
      {"{\"\xed\xa0\x80\":" + good + "}", 4, "not valid JSON"},
      {R"({"\ud800":)" + good + "}", 4, "not valid JSON"},
      {"{\"a\nb\":" + good + "}", 4, "not valid JSON"},
      {R"({"t":1})", 0, "the entry of tensor \"t\" is a number, an object is wanted"},
      {R"({"t":null})", 0, "is null"},
      {R"({"t":[]})", 0, "is a list"},
      {R"({"t":"x"})", 0, "is text"},
      {tensor(R"({"dtype":"F32","x":)" + deep_lists + "}"), 0, "nested too deeply"},
      {tensor(R"({"dtype":"F32","x":)" + deep_objects + "}"), 0, "nested too deeply"},
      {tensor(R"({"shape":)" + deep_lists + "}"), 0, "shape of tensor \"t\" holds a list"},
      // Metadata.
      {R"({"__metadata__":{"a":1}})", 0, "metadata \"a\" is a number, text is wanted"},
      {R"({"__metadata__":{"a":null}})", 0, "metadata \"a\" is null"},
      {R"({"__metadata__":{"a":{}}})", 0, "metadata \"a\" is an object"},
      {R"({"__metadata__":{"a":["x"]}})", 0, "metadata \"a\" is a list"},
      {R"({"__metadata__":{"a":true}})", 0, "metadata \"a\" is a boolean"},
      {R"({"__metadata__":[]})", 0, "__metadata__ is a list, an object is wanted"},
      {R"({"__metadata__":null})", 0, "__metadata__ is null"},
      {R"({"__metadata__":{"a":"1","a":"2"}})", 0, "the metadata key \"a\" appears twice"},
      {R"({"__metadata__":{},"__metadata__":{}})", 0, "the name \"__metadata__\" appears twice"},
      // Names and fields.
      {R"({"t":)" + good + R"(,"t":)" + good + "}", 4, "the name \"t\" appears twice"},
      {R"({"t":)" + good + R"(,"\u0074":)" + entry(R"("F32")", "[1]", "[4,8]") + "}", 8,
       "\"t\" appears twice"},
      {tensor(R"({"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]})"), 4,
       "\"dtype\" of tensor \"t\" appears twice"},
      {tensor(R"({"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]})"), 4,
       "\"shape\" of tensor \"t\" appears twice"},
      {tensor(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4],"data_offsets":[0,4]})"), 4,
       "\"data_offsets\" of tensor \"t\" appears twice"},
      {tensor(R"({"x":1,"x":2,"dtype":"F32","shape":[1],"data_offsets":[0,4]})"), 4,
       "\"x\" of tensor \"t\" appears twice"},
      {tensor(R"({"shape":[1],"data_offsets":[0,4]})"), 4, "tensor \"t\" has no dtype"},
      {tensor(R"({"dtype":"F32","data_offsets":[0,4]})"), 4, "tensor \"t\" has no shape"},
      {tensor(R"({"dtype":"F32","shape":[1]})"), 4, "tensor \"t\" has no data_offsets"},
      // dtype.
      {tensor(entry(R"("F8_E4M3")", "[4]", "[0,4]")), 4,
       "unknown dtype \"F8_E4M3\" of tensor \"t\""},
      {tensor(entry(R"("f32")", "[1]", "[0,4]")), 4, "unknown dtype \"f32\""},
      {tensor(entry(R"("")", "[1]", "[0,4]")), 4, "unknown dtype \"\""},
      {tensor(entry("4", "[1]", "[0,4]")), 4, "dtype of tensor \"t\" is a number, text is wanted"},
      {tensor(entry("null", "[1]", "[0,4]")), 4, "dtype of tensor \"t\" is null"},
      // shape.
      {tensor(entry(R"("F32")", "1", "[0,4]")), 4,
       "shape of tensor \"t\" is a number, a list is wanted"},
      {tensor(entry(R"("F32")", "[-1]", "[0,4]")), 4,
       "shape of tensor \"t\" holds a negative number"},
      {tensor(entry(R"("F32")", "[-0]", "[0,4]")), 4,
       "shape of tensor \"t\" holds a negative number"},
      {tensor(entry(R"("F32")", "[1.0]", "[0,4]")), 4,
       "shape of tensor \"t\" holds a number that is not a whole"},
      {tensor(entry(R"("F32")", "[1e0]", "[0,4]")), 4,
       "shape of tensor \"t\" holds a number that is not a whole"},
      {tensor(entry(R"("F32")", "[\"1\"]", "[0,4]")), 4, "shape of tensor \"t\" holds text"},
      {tensor(entry(R"("F32")", "[null]", "[0,4]")), 4, "shape of tensor \"t\" holds null"},
      {tensor(entry(R"("F32")", "[true]", "[0,4]")), 4, "shape of tensor \"t\" holds a boolean"},
      {tensor(entry(R"("F32")", "[[1]]", "[0,4]")), 4, "shape of tensor \"t\" holds a list"},
      {tensor(entry(R"("F32")", "[{}]", "[0,4]")), 4, "shape of tensor \"t\" holds an object"},
      {tensor(entry(R"("F32")", "[9223372036854775808]", "[0,4]")), 4,
       "9223372036854775808, which is too large"},
      {tensor(entry(R"("F32")", "[18446744073709551617]", "[0,4]")), 4,
       "not a whole number of 64 bits"},
      {tensor(entry(R"("F32")", "[1e999]", "[0,4]")), 4, "not valid JSON"},
      {tensor(entry(R"("F32")", many_axes, "[0,4]")), 4, "more than 64 numbers"},
      {tensor(entry(R"("F32")", "[4294967296,4294967296]", "[0,0]")), 0,
       "more elements than fit 64 bits"},
      {tensor(entry(R"("F32")", "[4611686018427387905]", "[0,4]")), 4,
       "more elements than fit 64 bits"},
      {tensor(entry(R"("F32")", "[0,4294967296,4294967296]", "[0,0]")), 0,
       "more elements than fit 64 bits"},
      {tensor(entry(R"("F32")", "[1000,1000]", "[0,4]")), 4,
       "f32 [1000, 1000] needs 4000000 bytes, but its data_offsets [0, 4) hold 4"},
      {tensor(entry(R"("F32")", "[1]", "[0,0]")), 0, "needs 4 bytes"},
      {tensor(entry(R"("F32")", "[0]", "[0,4]")), 4, "needs 0 bytes"},
      // data_offsets.
      {tensor(entry(R"("F32")", "[1]", "{}")), 4,
       "data_offsets of tensor \"t\" is an object, a list is wanted"},
      {tensor(entry(R"("F32")", "[1]", "[0]")), 4, "must hold 2 numbers, got 1"},
      {tensor(entry(R"("F32")", "[1]", "[0,4,8]")), 4,
       "data_offsets of tensor \"t\" has more than 2 numbers"},
      {tensor(entry(R"("F32")", "[1]", "[-4,0]")), 4,
       "data_offsets of tensor \"t\" holds a negative number"},
      {tensor(entry(R"("F32")", "[1]", "[0,4.0]")), 4,
       "data_offsets of tensor \"t\" holds a number that is not a whole"},
      {tensor(entry(R"("F32")", "[1]", "[4,0]")), 4,
       "data_offsets [4, 0) of tensor \"t\" are reversed"},
      {tensor(entry(R"("F32")", "[1]", "[18446744073709551612,18446744073709551615]")), 4,
       "too large"},
      {tensor(entry(R"("F32")", "[1]", "[9223372036854775800,9223372036854775804]")), 4,
       "the file is cut off"},
      // The layout of the data.
      {tensor(entry(R"("F32")", "[2]", "[0,8]")), 4,
       "the data ends after 4 bytes, but tensor \"t\" at [0, 8) lies beyond"},
      {tensor(entry(R"("F32")", "[1]", "[4,8]")), 8, "data bytes [0, 4) belong to no tensor"},
      {tensor(good), 5, "1 bytes follow the last tensor"},
      {"{}", 1, "1 bytes follow the last tensor"},
      {R"({"a":)" + good + R"(,"b":)" + entry(R"("F32")", "[1]", "[2,6]") + "}", 6,
       "tensors \"a\" at [0, 4) and \"b\" at [2, 6) overlap"},
      {R"({"a":)" + good + R"(,"b":)" + good + "}", 4, "overlap"},
      {R"({"a":)" + entry(R"("U8")", "[8]", "[0,8]") + R"(,"b":)" +
           entry(R"("U8")", "[2]", "[2,4]") + "}",
       8, "overlap"},
      {R"({"a":)" + good + R"(,"b":)" + entry(R"("F32")", "[0]", "[2,2]") + "}", 4, "overlap"},
      {R"({"a":)" + good + R"(,"b":)" + entry(R"("F32")", "[1]", "[5,9]") + "}", 9,
       "data bytes [4, 5) belong to no tensor"},
  };
  for (const Bad& bad : table) {
    const std::string error = refusal(file_of(bad.header, bad.data_bytes));
    EXPECT_TRUE(contains(error, "caller: F: byte ")) << bad.header;
    EXPECT_TRUE(contains(error, bad.text)) << bad.header;
    EXPECT_EQ(error.find('\n'), std::string::npos) << "one line: " << error;
  }
}

TEST(SafetensorsHeader, Offset_PointsAtTheMistake) {
  const std::string before = R"({"a":)" + entry(R"("F32")", "[1]", "[0,4]") + R"(,"b":{"dtype":)";
  const std::string error =
      refusal(file_of(before + R"("F9","shape":[1],"data_offsets":[4,8]}})", 8));
  EXPECT_TRUE(contains(error, fmt::format("byte {}: unknown dtype \"F9\"", 8 + before.size() + 4)));
}

TEST(SafetensorsHeader, NamesInErrors_ArePrintableAndShort) {
  const std::string error =
      refusal(file_of(R"({"a\n\u0007\"b)" + std::string(10000, 'x') + R"(":1})", 0));
  EXPECT_TRUE(contains(error, R"("a\x0a\x07)"));
  EXPECT_LT(error.size(), 300u);
}

TEST(SafetensorsHeader, DeepNesting_NeedsNoStack) {
  const std::string header = R"({"t":{"x":)" + std::string(20'000'000, '[');
  EXPECT_TRUE(contains(refusal(file_of(header, 0)), "nested too deeply"));
}

}  // namespace
