// SPDX-License-Identifier: Apache-2.0
// Tier: command line. Text for people (tables, readable quantities) and JSON for machines.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

namespace qkv::cli {

using Json = nlohmann::ordered_json;

/// Rows of cells, printed in columns: the first is left-aligned, the others right-aligned unless
/// told otherwise.
class Table {
 public:
  explicit Table(std::vector<std::string> header) : rows_{std::move(header)} {}
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  /// Columns from this one on are left-aligned too.
  void left_from(size_t column) { left_from_ = column; }
  std::string text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
  size_t left_from_ = SIZE_MAX;
};

/// "[80, 2, 4]"
std::string shape_text(std::span<const int64_t> shape);
/// "512 B", "1.50 MB" (powers of 1000).
std::string bytes_text(double bytes);
/// "2.13 us", "1.50 s".
std::string seconds_text(double seconds);
/// "2.2 Gflop"
std::string flop_text(double flop);

/// A number, or "nan", "inf", "-inf", which JSON has no numbers for.
Json json_number(double value);
void print_json(const Json& json);

}  // namespace qkv::cli
