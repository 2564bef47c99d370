// SPDX-License-Identifier: Apache-2.0
// Tier: call. Reads the header as a stream of JSON events, so that nesting, duplicate names and
// wrong types are seen where they stand, and nothing of the size of the header is built besides the
// table of tensors.
#include "safetensors_header.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "extents.h"
#include "file_error.h"

namespace qkv {
namespace {

using nlohmann::json;

// The format nests three levels deep; unknown fields of an entry may hold a little more.
constexpr int kMaxDepth = 16;

/// A character iterator that tells how far the parser has read.
class CountingIterator {
 public:
  using iterator_category = std::forward_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  CountingIterator() = default;
  CountingIterator(const char* p, const char** seen) : p_(p), seen_(seen) {}
  reference operator*() const { return *p_; }
  CountingIterator& operator++() {
    *seen_ = ++p_;
    return *this;
  }
  CountingIterator operator++(int) {
    CountingIterator before = *this;
    ++*this;
    return before;
  }
  friend bool operator==(const CountingIterator& a, const CountingIterator& b) {
    return a.p_ == b.p_;
  }

 private:
  const char* p_ = nullptr;
  const char** seen_ = nullptr;
};

/// Fields of an entry. `other` is read over.
enum class Field : uint8_t { dtype, shape, data_offsets, other };
constexpr std::array<std::string_view, 3> kFieldNames = {"dtype", "shape", "data_offsets"};

/// Receives the events of the JSON parser. A callback that returns false stops the parser; error_
/// then says why.
class HeaderReader {
 public:
  explicit HeaderReader(SafetensorsHeader* header) : header_(header) {}
  const std::string& error() const { return error_; }

  bool null() { return scalar("null"); }
  bool boolean(bool) { return scalar("a boolean"); }
  bool number_integer(json::number_integer_t) { return scalar("a negative number"); }
  bool number_float(json::number_float_t, const json::string_t&) {
    return scalar("a number that is not a whole number of 64 bits");
  }
  bool binary(json::binary_t&) { return scalar("binary"); }

  bool number_unsigned(json::number_unsigned_t value) {
    if (place_ != Place::list) return scalar("a number");
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return fail(field_text() + " holds " + std::to_string(value) + ", which is too large");
    }
    std::vector<int64_t>& list = field_ == Field::shape ? info_.shape : offsets_;
    const size_t limit = field_ == Field::shape ? kMaxFileAxes : 2;
    if (list.size() == limit) {
      return fail(field_text() + " has more than " + std::to_string(limit) + " numbers");
    }
    list.push_back(static_cast<int64_t>(value));
    return true;
  }

  bool string(json::string_t& value) {
    if (place_ == Place::metadata) {
      header_->metadata[key_] = value;
      return true;
    }
    if (place_ == Place::entry && field_ == Field::dtype) {
      for (const DTypeInfo& row : kDTypes) {
        if (row.safetensors == value) {
          info_.dtype = row.dtype;
          return true;
        }
      }
      return fail("unknown dtype " + in_quotes(value) + " of tensor " + in_quotes(info_.name));
    }
    return scalar("text");
  }

  bool start_object(std::size_t) {
    switch (place_) {
      case Place::file:
        place_ = Place::names;
        return true;
      case Place::names:
        if (key_ == kSafetensorsMetadataKey) {
          place_ = Place::metadata;
        } else {
          place_ = Place::entry;
          info_ = {};
          info_.name = key_;
          offsets_.clear();
          fields_seen_ = {};
          other_fields_.clear();
        }
        return true;
      case Place::metadata:
        return scalar("an object");
      case Place::entry:
        if (field_ != Field::other) return scalar("an object");
        return enter_other();
      case Place::list:
        return scalar("an object");
      case Place::other:
        return enter_other();
      case Place::done:
        break;
    }
    return false;
  }

  bool start_array(std::size_t) {
    if (place_ == Place::entry && (field_ == Field::shape || field_ == Field::data_offsets)) {
      place_ = Place::list;
      return true;
    }
    if (place_ == Place::other || (place_ == Place::entry && field_ == Field::other))
      return enter_other();
    return scalar("a list");
  }

  bool key(json::string_t& name) {
    switch (place_) {
      case Place::names:
        key_ = name;
        if (!names_seen_.insert(name).second)
          return fail("the name " + in_quotes(name) + " appears twice");
        return true;
      case Place::metadata:
        key_ = name;
        if (header_->metadata.count(name) != 0) {
          return fail("the metadata key " + in_quotes(name) + " appears twice");
        }
        return true;
      case Place::entry:
        return entry_key(name);
      default:
        return true;  // inside an unknown field
    }
  }

  bool end_object() {
    switch (place_) {
      case Place::names:
        place_ = Place::done;
        return true;
      case Place::metadata:
        place_ = Place::names;
        return true;
      case Place::entry:
        place_ = Place::names;
        return end_entry();
      default:
        leave_other();
        return true;
    }
  }

  bool end_array() {
    if (place_ == Place::list) {
      place_ = Place::entry;
    } else {
      leave_other();
    }
    return true;
  }

  bool parse_error(std::size_t, const std::string& last_token, const nlohmann::detail::exception&) {
    return fail("the header is not valid JSON (UTF-8) at " + in_quotes(last_token));
  }

 private:
  enum class Place : uint8_t { file, names, metadata, entry, list, other, done };

  bool fail(const std::string& text) {
    error_ = text;
    return false;
  }

  std::string field_text() const {
    return std::string(kFieldNames[static_cast<size_t>(field_)]) + " of tensor " +
           in_quotes(info_.name);
  }

  /// A value where it may not stand, unless it belongs to an unknown field.
  bool scalar(const char* what) {
    const std::string is_wrong = std::string(" is ") + what;
    switch (place_) {
      case Place::file:
        return fail("the header must be an object, it" + is_wrong);
      case Place::names:
        if (key_ == kSafetensorsMetadataKey)
          return fail(std::string(kSafetensorsMetadataKey) + is_wrong + ", an object is wanted");
        return fail("the entry of tensor " + in_quotes(key_) + is_wrong + ", an object is wanted");
      case Place::metadata:
        return fail("metadata " + in_quotes(key_) + is_wrong + ", text is wanted");
      case Place::entry:
        if (field_ == Field::other) return true;
        return fail(field_text() + is_wrong +
                    (field_ == Field::dtype ? ", text is wanted" : ", a list is wanted"));
      case Place::list:
        return fail(field_text() + " holds " + what + ", whole numbers from 0 are wanted");
      default:
        return true;
    }
  }

  bool enter_other() {
    place_ = Place::other;
    if (++other_depth_ > kMaxDepth) return fail("the header is nested too deeply");
    return true;
  }

  void leave_other() {
    if (--other_depth_ == 0) place_ = Place::entry;
  }

  bool entry_key(const std::string& name) {
    const auto known = std::find(kFieldNames.begin(), kFieldNames.end(), name);
    field_ = static_cast<Field>(known - kFieldNames.begin());
    const bool is_new = field_ == Field::other
                            ? other_fields_.insert(name).second
                            : !std::exchange(fields_seen_[static_cast<size_t>(field_)], true);
    if (!is_new)
      return fail(in_quotes(name) + " of tensor " + in_quotes(info_.name) + " appears twice");
    return true;
  }

  bool end_entry() {
    for (size_t f = 0; f < kFieldNames.size(); ++f) {
      if (!fields_seen_[f]) {
        return fail("tensor " + in_quotes(info_.name) + " has no " + std::string(kFieldNames[f]));
      }
    }
    const std::string tensor = "tensor " + in_quotes(info_.name) + " ";
    if (offsets_.size() != 2) {
      return fail("data_offsets of " + tensor + "must hold 2 numbers, got " +
                  std::to_string(offsets_.size()));
    }
    info_.begin_bytes = offsets_[0];
    info_.end_bytes = offsets_[1];
    const std::string range =
        "[" + std::to_string(offsets_[0]) + ", " + std::to_string(offsets_[1]) + ")";
    if (info_.end_bytes < info_.begin_bytes)
      return fail("data_offsets " + range + " of " + tensor + "are reversed");
    const std::optional<int64_t> bytes = tensor_bytes(info_.shape, info_.dtype);
    const std::string shape = std::string(name(info_.dtype)) + " " + shape_text(info_.shape);
    if (!bytes) return fail(tensor + shape + " has more elements than fit 64 bits");
    if (*bytes != info_.end_bytes - info_.begin_bytes) {
      return fail(tensor + shape + " needs " + std::to_string(*bytes) +
                  " bytes, but its data_offsets " + range + " hold " +
                  std::to_string(info_.end_bytes - info_.begin_bytes));
    }
    header_->tensors.push_back(std::move(info_));
    return true;
  }

  SafetensorsHeader* header_;
  std::string error_;
  Place place_ = Place::file;
  int other_depth_ = 0;
  std::string key_;
  std::set<std::string> names_seen_;

  TensorInfo info_;  // the entry that is being read
  std::vector<int64_t> offsets_;
  Field field_ = Field::other;
  std::array<bool, 3> fields_seen_ = {};
  std::set<std::string> other_fields_;
};

std::string range_text(const TensorInfo& info) {
  return in_quotes(info.name) + " at [" + std::to_string(info.begin_bytes) + ", " +
         std::to_string(info.end_bytes) + ")";
}

}  // namespace

SafetensorsHeader parse_safetensors_header(std::string_view file, const std::string& path,
                                           std::string_view caller) {
  const auto fail = [&](int64_t offset_bytes, const std::string& text) {
    file_error_at(caller, path, offset_bytes, text);
  };
  const auto file_bytes = static_cast<int64_t>(file.size());
  if (file_bytes < kSafetensorsLengthBytes) {
    fail(0,
         "the file has " + std::to_string(file_bytes) +
             " bytes, too few for the length of a header; it is cut off or not a safetensors file");
  }
  uint64_t length = 0;
  for (size_t i = kSafetensorsLengthBytes; i-- > 0;)
    length = length << 8 | static_cast<unsigned char>(file[i]);
  if (length > static_cast<uint64_t>(kMaxSafetensorsHeaderBytes)) {
    fail(0, "the header claims " + std::to_string(length) + " bytes, more than the " +
                std::to_string(kMaxSafetensorsHeaderBytes) +
                " allowed; is this a safetensors file?");
  }
  const auto header_bytes = static_cast<int64_t>(length);
  if (header_bytes > file_bytes - kSafetensorsLengthBytes) {
    fail(0, "the header claims " + std::to_string(length) + " bytes, but only " +
                std::to_string(file_bytes - kSafetensorsLengthBytes) +
                " follow; the file is cut off or not a safetensors file");
  }
  const std::string_view text =
      file.substr(kSafetensorsLengthBytes, static_cast<size_t>(header_bytes));
  if (text.empty() || text.front() != '{')
    fail(kSafetensorsLengthBytes, "the header must begin with '{'");
  // The JSON parser takes a zero byte for the end of the text, which would hide what follows.
  if (const size_t zero = text.find('\0'); zero != std::string_view::npos) {
    fail(kSafetensorsLengthBytes + static_cast<int64_t>(zero), "the header holds a zero byte");
  }

  SafetensorsHeader header;
  HeaderReader reader(&header);
  const char* seen = text.data();
  if (!json::sax_parse(CountingIterator(text.data(), &seen),
                       CountingIterator(text.data() + text.size(), &seen), &reader)) {
    fail(kSafetensorsLengthBytes + (seen - text.data()), reader.error());
  }

  std::vector<TensorInfo>& tensors = header.tensors;
  std::sort(tensors.begin(), tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return std::tie(a.begin_bytes, a.end_bytes, a.name) <
           std::tie(b.begin_bytes, b.end_bytes, b.name);
  });
  const int64_t data_begin = kSafetensorsLengthBytes + header_bytes;
  const int64_t data_bytes = file_bytes - data_begin;
  int64_t covered = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    TensorInfo& info = tensors[i];
    if (info.end_bytes > data_bytes) {
      fail(file_bytes, "the data ends after " + std::to_string(data_bytes) + " bytes, but tensor " +
                           range_text(info) + " lies beyond; the file is cut off");
    }
    if (info.begin_bytes < covered) {
      fail(data_begin + info.begin_bytes,
           "tensors " + range_text(tensors[i - 1]) + " and " + range_text(info) + " overlap");
    }
    if (info.begin_bytes > covered) {
      fail(data_begin + covered, "data bytes [" + std::to_string(covered) + ", " +
                                     std::to_string(info.begin_bytes) + ") belong to no tensor");
    }
    covered = info.end_bytes;
  }
  if (covered != data_bytes) {
    fail(data_begin + covered,
         std::to_string(data_bytes - covered) + " bytes follow the last tensor");
  }
  for (TensorInfo& info : tensors) {
    info.begin_bytes += data_begin;
    info.end_bytes += data_begin;
  }
  return header;
}

}  // namespace qkv
