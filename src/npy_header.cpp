// SPDX-License-Identifier: Apache-2.0
// Tier: call. Reads exactly the dict literals that NumPy writes (versions 1 to 3, any order of the
// keys), nothing more of Python.
#include "npy_header.h"

#include <optional>

#include "extents.h"
#include "file_error.h"

namespace qkv {
namespace {

constexpr std::string_view kMagic("\x93NUMPY", 6);
constexpr int64_t kMaxHeaderBytes = 1 << 20;  // NumPy itself stops at 10,000 by default
constexpr int64_t kDataAlignment = 64;

/// A cursor over the dict literal. Every failure names the byte at which it stands.
class DictReader {
 public:
  DictReader(std::string_view file, int64_t begin, int64_t end, const std::string& path,
             std::string_view caller)
      : file_(file), at_(begin), end_(end), path_(path), caller_(caller) {}

  NpyHeader read() {
    NpyHeader header;
    bool has_descr = false, has_order = false, has_shape = false;
    expect('{');
    while (!accept('}')) {
      const int64_t key_at = skip_space();
      const std::string_view key = text();
      expect(':');
      bool* seen = key == "descr"           ? &has_descr
                   : key == "fortran_order" ? &has_order
                   : key == "shape"         ? &has_shape
                                            : nullptr;
      if (seen == nullptr) fail_at(key_at, "unknown key " + in_quotes(key));
      if (*seen) fail_at(key_at, "the key " + in_quotes(key) + " appears twice");
      *seen = true;
      if (seen == &has_descr) {
        header.info.dtype = descr();
      } else if (seen == &has_order) {
        header.fortran_order = truth();
      } else {
        header.info.shape = tuple();
      }
      if (!accept(',')) {
        expect('}');
        break;
      }
    }
    if (!has_descr || !has_order || !has_shape) {
      fail_at(at_, std::string("the header has no key '") +
                       (!has_descr   ? "descr"
                        : !has_order ? "fortran_order"
                                     : "shape") +
                       "'");
    }
    if (skip_space() != end_) fail_at(at_, "the header goes on behind its dict");
    return header;
  }

 private:
  [[noreturn]] void fail_at(int64_t offset_bytes, const std::string& text) const {
    file_error_at(caller_, path_, offset_bytes, text);
  }

  char peek() const { return at_ < end_ ? file_[static_cast<size_t>(at_)] : '\0'; }

  int64_t skip_space() {
    while (at_ < end_ && (peek() == ' ' || peek() == '\n' || peek() == '\t' || peek() == '\r'))
      ++at_;
    return at_;
  }

  bool accept(char c) {
    skip_space();
    if (at_ == end_ || peek() != c) return false;
    ++at_;
    return true;
  }

  void expect(char c) {
    if (!accept(c)) {
      fail_at(at_,
              std::string("the header must have '") + c + "' here, got " +
                  (at_ < end_ ? in_quotes(file_.substr(static_cast<size_t>(at_), 1)) : "its end"));
    }
  }

  std::string_view text() {
    const int64_t begin = skip_space();
    const char quote = peek();
    if (quote != '\'' && quote != '"') fail_at(begin, "text in quotes is wanted here");
    ++at_;
    while (at_ < end_ && peek() != quote && peek() != '\\' && peek() != '\n') ++at_;
    if (peek() != quote || at_ == end_)
      fail_at(begin, "text in quotes does not end, or holds an escape");
    ++at_;
    return file_.substr(static_cast<size_t>(begin + 1), static_cast<size_t>(at_ - begin - 2));
  }

  bool truth() {
    const int64_t begin = skip_space();
    for (const bool value : {true, false}) {
      const std::string_view word = value ? "True" : "False";
      if (file_.substr(static_cast<size_t>(begin), static_cast<size_t>(end_ - begin))
              .substr(0, word.size()) == word) {
        at_ += static_cast<int64_t>(word.size());
        return value;
      }
    }
    fail_at(begin, "fortran_order must be True or False");
  }

  DType descr() {
    const int64_t begin = skip_space();
    if (peek() == '[')
      fail_at(begin, "records (a list of fields) are not supported, save each field by itself");
    const std::string_view all = text();
    const std::string shown = "dtype " + in_quotes(all);
    const char order = all.empty() ? '\0' : all[0];
    const std::string_view type = all.substr(all.empty() ? 0 : 1);
    if (type == "O" || all == "O") {
      fail_at(begin,
              shown + " holds pickled Python objects, which can run code; they are not read");
    }
    if (order != '<' && order != '>' && order != '|')
      fail_at(begin, shown + " has no byte order, is this an npy file?");
    for (const DTypeInfo& row : kDTypes) {
      if (row.npy.empty() || row.npy != type) continue;
      if (row.bytes > 1 && order == '>') {
        fail_at(
            begin,
            shown +
                " is big endian; save it as little endian: x.astype(x.dtype.newbyteorder('<'))");
      }
      if (row.bytes > 1 && order == '|') fail_at(begin, shown + " has no byte order");
      return row.dtype;
    }
    fail_at(begin, "unknown " + shown + ", known are f2 f4 f8 i1 i2 i4 i8 u1 u2 u4 u8 b1");
  }

  std::vector<int64_t> tuple() {
    std::vector<int64_t> shape;
    expect('(');
    while (!accept(')')) {
      if (shape.size() == kMaxFileAxes)
        fail_at(at_, "the shape has more than " + std::to_string(kMaxFileAxes) + " axes");
      shape.push_back(extent());
      if (!accept(',')) {
        // (3) is a number in Python, not a tuple.
        if (shape.size() == 1) fail_at(at_, "a shape of one axis is written (n,)");
        expect(')');
        break;
      }
    }
    return shape;
  }

  int64_t extent() {
    const int64_t begin = skip_space();
    int64_t value = 0;
    while (peek() >= '0' && peek() <= '9') {
      if (__builtin_mul_overflow(value, int64_t{10}, &value) ||
          __builtin_add_overflow(value, int64_t{peek() - '0'}, &value)) {
        fail_at(begin, "an extent of the shape is too large");
      }
      ++at_;
    }
    if (at_ == begin) fail_at(begin, "whole numbers from 0 are wanted in the shape");
    if (peek() == 'L') ++at_;  // a long of Python 2, in old files
    return value;
  }

  std::string_view file_;
  int64_t at_, end_;
  const std::string& path_;
  std::string_view caller_;
};

}  // namespace

NpyHeader parse_npy_header(std::string_view file, const std::string& path,
                           std::string_view caller) {
  const auto fail = [&](int64_t offset_bytes, const std::string& text) {
    file_error_at(caller, path, offset_bytes, text);
  };
  const auto file_bytes = static_cast<int64_t>(file.size());
  const auto byte = [&](int64_t i) {
    return static_cast<unsigned char>(file[static_cast<size_t>(i)]);
  };
  if (file.substr(0, kMagic.size()) != kMagic)
    fail(0, "this is not an npy file: it does not begin with \\x93NUMPY");
  if (file_bytes < 8) fail(file_bytes, "the file is cut off in its version");
  const int major = byte(6), minor = byte(7);
  if (major < 1 || major > 3 || minor != 0) {
    fail(6, "npy version " + std::to_string(major) + "." + std::to_string(minor) +
                " is unknown, known are 1.0, 2.0 and 3.0");
  }
  const int64_t length_bytes = major == 1 ? 2 : 4;
  const int64_t dict_begin = 8 + length_bytes;
  if (file_bytes < dict_begin) fail(file_bytes, "the file is cut off in the length of its header");
  int64_t header_bytes = 0;
  for (int64_t i = length_bytes; i-- > 0;) header_bytes = header_bytes << 8 | byte(8 + i);
  if (header_bytes > kMaxHeaderBytes) {
    fail(8, "the header claims " + std::to_string(header_bytes) + " bytes, more than the " +
                std::to_string(kMaxHeaderBytes) + " allowed");
  }
  if (header_bytes > file_bytes - dict_begin) {
    fail(8, "the header claims " + std::to_string(header_bytes) + " bytes, but only " +
                std::to_string(file_bytes - dict_begin) + " follow; the file is cut off");
  }
  const int64_t data_begin = dict_begin + header_bytes;
  NpyHeader header = DictReader(file, dict_begin, data_begin, path, caller).read();
  const std::string shape =
      std::string(name(header.info.dtype)) + " " + shape_text(header.info.shape);
  const std::optional<int64_t> bytes = tensor_bytes(header.info.shape, header.info.dtype);
  if (!bytes) fail(dict_begin, "an array of " + shape + " has more elements than fit 64 bits");
  if (*bytes != file_bytes - data_begin) {
    fail(data_begin, "an array of " + shape + " needs " + std::to_string(*bytes) + " bytes, but " +
                         std::to_string(file_bytes - data_begin) + " follow the header");
  }
  header.info.begin_bytes = data_begin;
  header.info.end_bytes = file_bytes;
  return header;
}

std::string format_npy_header(const TensorInfo& t) {
  std::string dict = "{'descr': '";
  dict += info(t.dtype).bytes == 1 ? '|' : '<';
  dict += info(t.dtype).npy;
  dict += "', 'fortran_order': False, 'shape': (";
  for (size_t a = 0; a < t.shape.size(); ++a) {
    dict += std::to_string(t.shape[a]);
    if (a + 1 < t.shape.size()) dict += ", ";
  }
  dict += t.shape.size() == 1 ? ",), }" : "), }";
  const size_t before = kMagic.size() + 4;
  const size_t unpadded = before + dict.size() + 1;
  dict.append((kDataAlignment - unpadded % kDataAlignment) % kDataAlignment, ' ');
  dict += '\n';
  std::string out(kMagic);
  out += '\x01';
  out += '\0';
  out += static_cast<char>(dict.size() & 0xff);
  out += static_cast<char>(dict.size() >> 8);
  return out + dict;
}

}  // namespace qkv
