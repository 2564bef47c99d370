// SPDX-License-Identifier: Apache-2.0
// Tier: test. The header of npy files: what is accepted, and a table of everything that is refused
// with its text.
#include "npy_header.h"

#include <gtest/gtest.h>

#include "support/files.h"

namespace {

using qkv::DType;
using qkv::NpyHeader;
using qkv::test::contains;
using qkv::test::error_text;

std::string file_of(const std::string& dict, size_t data_bytes, int major = 1) {
  std::string file = "\x93NUMPY";
  file += static_cast<char>(major);
  file += '\0';
  for (int i = 0; i < (major == 1 ? 2 : 4); ++i)
    file += static_cast<char>(dict.size() >> (8 * i) & 0xff);
  return file + dict + std::string(data_bytes, '\x01');
}

NpyHeader parse(const std::string& file) { return qkv::parse_npy_header(file, "F", "caller"); }
std::string refusal(const std::string& file) {
  return error_text([&] { parse(file); });
}

TEST(NpyHeader, Valid_AnyOrderQuotesAndSpaces) {
  for (const char* dict :
       {"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }   \n",
        "{'shape':(2,3),'descr':'<f4','fortran_order':False}",
        "  {\"fortran_order\" : False , \"shape\" : ( 2 , 3 , ) , \"descr\" : \"<f4\" , }\n",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2L, 3L), }"}) {
    for (const int major : {1, 2, 3}) {
      const std::string file = file_of(dict, 24, major);
      const NpyHeader header = parse(file);
      EXPECT_EQ(header.info.dtype, DType::f32);
      EXPECT_EQ(header.info.shape, (std::vector<int64_t>{2, 3}));
      EXPECT_FALSE(header.fortran_order);
      EXPECT_EQ(header.info.end_bytes, static_cast<int64_t>(file.size()));
      EXPECT_EQ(header.info.begin_bytes, header.info.end_bytes - 24);
    }
  }
}

TEST(NpyHeader, Valid_ShapesOfFewElements) {
  const auto shape_of = [](const std::string& shape, size_t bytes) {
    return parse(file_of("{'descr': '<f8', 'fortran_order': True, 'shape': " + shape + "}", bytes))
        .info.shape;
  };
  EXPECT_EQ(shape_of("()", 8), std::vector<int64_t>{});
  EXPECT_EQ(shape_of("(3,)", 24), std::vector<int64_t>{3});
  EXPECT_EQ(shape_of("(0,)", 0), std::vector<int64_t>{0});
  EXPECT_EQ(shape_of("(2, 0)", 0), (std::vector<int64_t>{2, 0}));
  EXPECT_EQ(shape_of("(1,1,1,1,1,1,1)", 8).size(), 7u);
}

TEST(NpyHeader, Valid_EveryDtypeOfTheTable) {
  for (const auto& row : qkv::kDTypes) {
    if (row.npy.empty()) continue;
    for (const char order : {'<', '|', '>'}) {
      if (row.bytes > 1 && order != '<') continue;
      const std::string dict = std::string("{'descr': '") + order + std::string(row.npy) +
                               "', 'fortran_order': False, 'shape': (2,)}";
      EXPECT_EQ(parse(file_of(dict, 2 * static_cast<size_t>(row.bytes))).info.dtype, row.dtype)
          << dict;
    }
  }
}

TEST(NpyHeader, Refused_Frame) {
  const std::string dict = "{'descr': '<f4', 'fortran_order': False, 'shape': ()}";
  const std::string good = file_of(dict, 4);
  parse(good);
  for (size_t n = 0; n < good.size(); ++n) {
    EXPECT_TRUE(contains(refusal(good.substr(0, n)), "caller: F: byte ")) << n;
  }
  EXPECT_TRUE(contains(refusal("PK\x03\x04" + good), "byte 0: this is not an npy file"));
  EXPECT_TRUE(contains(refusal(file_of(dict, 4, 0)), "byte 6: npy version 0.0 is unknown"));
  EXPECT_TRUE(contains(refusal(file_of(dict, 4, 4)), "byte 6: npy version 4.0 is unknown"));
  std::string minor = good;
  minor[7] = '\x01';
  EXPECT_TRUE(contains(refusal(minor), "npy version 1.1 is unknown"));
  std::string longer = good;
  longer[8] = '\x7f';
  EXPECT_TRUE(contains(refusal(longer), "byte 8: the header claims 127 bytes, but only 57 follow"));
  std::string huge = file_of(dict, 4, 2);
  huge[11] = '\xff';
  EXPECT_TRUE(contains(refusal(huge), "more than the 1048576 allowed"));
  EXPECT_TRUE(
      contains(refusal(good + "x"), "an array of f32 [] needs 4 bytes, but 5 follow the header"));
}

TEST(NpyHeader, Refused_WithTheReason) {
  const auto dict = [](const std::string& descr, const std::string& order,
                       const std::string& shape) {
    return "{'descr': " + descr + ", 'fortran_order': " + order + ", 'shape': " + shape + ", }\n";
  };
  std::string many_axes = "(1";
  for (int i = 0; i < 64; ++i) many_axes += ",1";
  many_axes += ")";
  const struct {
    std::string header;
    size_t data_bytes;
    std::string text;
  } table[] = {
      {"", 0, "must have '{' here, got its end"},
      {"[]", 0, "must have '{' here, got \"[\""},
      {"{", 0, "text in quotes is wanted"},
      {"{}", 0, "the header has no key 'descr'"},
      {"{'descr': '<f4'}", 0, "the header has no key 'fortran_order'"},
      {"{'descr': '<f4', 'fortran_order': False}", 0, "the header has no key 'shape'"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': ()", 4,
       "must have '}' here, got its end"},
      {"{'descr': '<f4' 'fortran_order': False}", 4, "must have '}' here, got \"'\""},
      {"{'descr' '<f4'}", 4, "must have ':' here"},
      {"{descr: '<f4'}", 4, "text in quotes is wanted"},
      {"{'descr", 4, "does not end"},
      {"{'de\\x73cr': '<f4'}", 4, "holds an escape"},
      {"{'other': 1}", 4, "byte 11: unknown key \"other\""},
      {"{'descr': '<f4', 'descr': '<f4'}", 4, "the key \"descr\" appears twice"},
      {dict("'<f4'", "False", "()") + "x", 4, "goes on behind its dict"},
      {dict("'<f4'", "False", "()") + std::string(3, '\0'), 4, "goes on behind its dict"},
      {"{'descr': __import__('os'), ", 4, "text in quotes is wanted"},
      // dtype
      {dict("'>f4'", "False", "()"), 4, "dtype \">f4\" is big endian"},
      {dict("'>i2'", "False", "()"), 2, "dtype \">i2\" is big endian"},
      {dict("'|O'", "False", "()"), 8, "pickled Python objects, which can run code"},
      {dict("'O'", "False", "()"), 8, "pickled Python objects"},
      {dict("'<O'", "False", "()"), 8, "pickled Python objects"},
      {dict("[('x', '<f4')]", "False", "()"), 4, "records (a list of fields) are not supported"},
      {dict("'<c8'", "False", "()"), 8, "unknown dtype \"<c8\""},
      {dict("'<U3'", "False", "()"), 12, "unknown dtype \"<U3\""},
      {dict("'|V2'", "False", "()"), 2, "unknown dtype \"|V2\""},
      {dict("'<M8[D]'", "False", "()"), 8, "unknown dtype"},
      {dict("'<f3'", "False", "()"), 3, "unknown dtype"},
      {dict("'<f44'", "False", "()"), 4, "unknown dtype"},
      {dict("'f4'", "False", "()"), 4, "has no byte order"},
      {dict("'=f4'", "False", "()"), 4, "has no byte order"},
      {dict("'|f4'", "False", "()"), 4, "has no byte order"},
      {dict("''", "False", "()"), 4, "has no byte order"},
      {dict("4", "False", "()"), 4, "text in quotes is wanted"},
      // fortran_order
      {dict("'<f4'", "0", "()"), 4, "fortran_order must be True or False"},
      {dict("'<f4'", "'False'", "()"), 4, "fortran_order must be True or False"},
      {dict("'<f4'", "Falsehood", "()"), 4, "must have '}' here"},
      // shape
      {dict("'<f4'", "False", "(1)"), 4, "a shape of one axis is written (n,)"},
      {dict("'<f4'", "False", "[1]"), 4, "must have '(' here"},
      {dict("'<f4'", "False", "1"), 4, "must have '(' here"},
      {dict("'<f4'", "False", "(-1,)"), 4, "whole numbers from 0 are wanted"},
      {dict("'<f4'", "False", "(+1,)"), 4, "whole numbers from 0 are wanted"},
      {dict("'<f4'", "False", "(1.0,)"), 4, "a shape of one axis is written (n,)"},
      {dict("'<f4'", "False", "(,)"), 4, "whole numbers from 0 are wanted"},
      {dict("'<f4'", "False", "(1,,1)"), 4, "whole numbers from 0 are wanted"},
      {dict("'<f4'", "False", "(1, 2"), 4, "whole numbers from 0 are wanted"},
      {dict("'<f4'", "False", "((1,),)"), 4, "whole numbers from 0 are wanted"},
      {dict("'<f4'", "False", "(None,)"), 4, "whole numbers from 0 are wanted"},
      {dict("'<f4'", "False", "(0x4,)"), 4, "a shape of one axis"},
      {dict("'<f4'", "False", "(9223372036854775808,)"), 4, "too large"},
      {dict("'<f4'", "False", "(99999999999999999999999999,)"), 4, "too large"},
      {dict("'<f4'", "False", "(4294967296, 4294967296)"), 0, "more elements than fit 64 bits"},
      {dict("'<f4'", "False", "(4611686018427387905,)"), 4, "more elements than fit 64 bits"},
      {dict("'<f4'", "False", "(0, 4294967296, 4294967296)"), 0, "more elements than fit 64 bits"},
      {dict("'<f4'", "False", many_axes), 4, "more than 64 axes"},
      {dict("'<f4'", "False", "(1000, 1000)"), 4,
       "an array of f32 [1000, 1000] needs 4000000 bytes, but 4 follow"},
  };
  for (const auto& bad : table) {
    const std::string error = refusal(file_of(bad.header, bad.data_bytes));
    EXPECT_TRUE(contains(error, "caller: F: byte ")) << bad.header;
    EXPECT_TRUE(contains(error, bad.text)) << bad.header;
    EXPECT_EQ(error.find('\n'), std::string::npos) << "one line: " << error;
  }
}

TEST(NpyHeader, Format_ReadsBackAndAligns) {
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{}, {7}, {2, 3}, {0, 5}, {123456, 0, 123456, 123456}}) {
    for (const DType dtype : {DType::f16, DType::boolean, DType::i64}) {
      qkv::TensorInfo info;
      info.dtype = dtype;
      info.shape = shape;
      const std::string text = qkv::format_npy_header(info);
      EXPECT_EQ(text.size() % 64, 0u);
      EXPECT_EQ(text.back(), '\n');
      int64_t n = size_bytes(dtype);
      for (const int64_t extent : shape) n *= extent;
      const NpyHeader header = parse(text + std::string(static_cast<size_t>(n), '\0'));
      EXPECT_EQ(header.info.dtype, dtype);
      EXPECT_EQ(header.info.shape, shape);
      EXPECT_FALSE(header.fortran_order);
    }
  }
}

}  // namespace
