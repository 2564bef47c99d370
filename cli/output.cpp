// SPDX-License-Identifier: Apache-2.0
// Tier: command line. Text for people and JSON for machines.
#include "output.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace qkv::cli {

std::string Table::text() const {
  std::vector<size_t> widths;
  for (const auto& row : rows_) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  std::string text;
  for (const auto& row : rows_) {
    std::string line;
    for (size_t c = 0; c < row.size(); ++c) {
      const bool left = c == 0 || c >= left_from_;
      line += c == 0 ? "" : "  ";
      line += left ? fmt::format("{:<{}}", row[c], widths[c])
                   : fmt::format("{:>{}}", row[c], widths[c]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

std::string shape_text(std::span<const int64_t> shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

namespace {

std::string scaled(double value, std::span<const char* const> units) {
  size_t u = 0;
  while (value >= 999.5 && u + 1 < units.size()) value /= 1000, ++u;
  const bool is_small = value < 99.95 && u > 0;
  return (is_small ? fmt::format("{:.3g} ", value) : fmt::format("{:.0f} ", value)) + units[u];
}

}  // namespace

std::string bytes_text(double bytes) {
  static constexpr const char* kUnits[] = {"B", "kB", "MB", "GB", "TB", "PB", "EB"};
  return scaled(bytes, kUnits);
}

std::string flop_text(double flop) {
  static constexpr const char* kUnits[] = {"flop",  "kflop", "Mflop", "Gflop",
                                           "Tflop", "Pflop", "Eflop"};
  return scaled(flop, kUnits);
}

std::string seconds_text(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.3g} us", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.3g} ms", seconds * 1e3);
  return fmt::format("{:.3g} s", seconds);
}

Json json_number(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

void print_json(const Json& json) {
  fmt::print("{}\n", json.dump(2, ' ', false, Json::error_handler_t::replace));
}

}  // namespace qkv::cli
