// SPDX-License-Identifier: Apache-2.0
// Tier: command line. Parts shared by the options of the verbs.
#include "flags.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <numeric>

#include "qkv/error.h"

namespace qkv::cli {

int64_t parse_size(std::string_view text, int64_t least, std::string_view what) {
  int64_t value = 0;
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (status == std::errc::result_out_of_range) {
    throw Error(fmt::format("{}: '{}' does not fit 64 bits", what, text));
  }
  if (status != std::errc() || end != text.data() + text.size() || value < least) {
    throw Error(
        fmt::format("{}: '{}' is not a whole number >= {}, such as {}", what, text, least, 8));
  }
  return value;
}

CLI::Option* add_size(CLI::App& app, const std::string& flag, int64_t* value, int64_t least,
                      const std::string& help) {
  const std::string shown = flag.substr(0, flag.find(','));
  return app
      .add_option_function<std::string>(
          flag,
          [value, least, shown](const std::string& text) {
            *value = parse_size(text, least, shown);
          },
          help)
      ->type_name("N");
}

int checked_threads(int64_t num_threads) {
  constexpr int64_t kMost = 4096;
  if (num_threads <= kMost) return static_cast<int>(num_threads);
  throw Error(fmt::format("--num-threads: {} is more than {}", num_threads, kMost));
}

DType parse_float_dtype(std::string_view text, std::string_view what) {
  std::string known;
  for (const DTypeInfo& row : kDTypes) {
    if (!row.is_float) continue;
    if (row.name == text) return row.dtype;
    known += (known.empty() ? "" : ", ") + std::string(row.name);
  }
  throw Error(fmt::format("{}: '{}' is not an element type; use one of {}", what, text, known));
}

namespace {

// Levenshtein distance.
size_t distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t changed = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({changed, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

}  // namespace

std::string nearest(std::string_view word, const std::vector<std::string>& candidates) {
  std::string best;
  size_t least = std::max<size_t>(2, word.size() / 3) + 1;
  for (const std::string& candidate : candidates) {
    const size_t d = distance(word, candidate);
    if (d < least) least = d, best = candidate;
  }
  return best;
}

std::string one_line(std::string_view text) {
  std::string line(text);
  while (!line.empty() && line.back() == '\n') line.pop_back();
  for (char& c : line) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return line;
}

}  // namespace qkv::cli
