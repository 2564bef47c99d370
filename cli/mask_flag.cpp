// SPDX-License-Identifier: Apache-2.0
// Tier: command line. The value of --mask: one table row per kind.
#include "mask_flag.h"

#include <fmt/format.h>

#include "flags.h"
#include "qkv/error.h"

namespace qkv::cli {
namespace {

std::string_view trim(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (;;) {
    const size_t at = text.find(separator);
    parts.push_back(trim(text.substr(0, at)));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

std::vector<int64_t> numbers(std::string_view text, std::string_view what) {
  std::vector<int64_t> values;
  for (std::string_view part : split(text, ',')) values.push_back(parse_size(part, 0, what));
  return values;
}

// A window end: a number of keys, or none for no bound.
int64_t window_end(std::string_view text) {
  if (text == "none" || text == "-1") return -1;
  return parse_size(text, 0, "--mask window");
}

Mask window_mask(std::string_view text) {
  const auto parts = split(text, ',');
  Alignment alignment = Alignment::bottom_right;
  if (parts.size() == 3 && parts[2] == "top-left") {
    alignment = Alignment::top_left;
  } else if (parts.size() != 2 && !(parts.size() == 3 && parts[2] == "bottom-right")) {
    throw Error(
        fmt::format("--mask window: '{}' is not left,right or left,right,top-left|bottom-right, "
                    "such as window:64,0",
                    text));
  }
  return Mask::window(window_end(parts[0]), window_end(parts[1]), alignment);
}

Mask lengths_mask(std::string_view text) { return Mask::lengths(numbers(text, "--mask lengths")); }

Mask documents_mask(std::string_view text) {
  const auto parts = split(text, '/');
  if (parts.size() > 2) {
    throw Error(
        fmt::format("--mask documents: '{}' is not ids or q_ids/kv_ids, such as "
                    "documents:0,0,1,1/0,0,0,1,1",
                    text));
  }
  const std::vector<int64_t> q_ids = numbers(parts.front(), "--mask documents");
  const std::vector<int64_t> kv_ids = numbers(parts.back(), "--mask documents");
  return Mask::documents(ConstTensor(q_ids.data(), {static_cast<int64_t>(q_ids.size())}),
                         ConstTensor(kv_ids.data(), {static_cast<int64_t>(kv_ids.size())}));
}

struct Kind {
  std::string_view name;
  std::string_view argument;  // empty: takes none
  std::string_view meaning;
  Mask (*make)(std::string_view argument);
};

constexpr Kind kKinds[] = {
    {"full", "", "every key (the default)", [](std::string_view) { return Mask::full(); }},
    {"causal-top-left", "", "keys j <= i",
     [](std::string_view) { return Mask::causal_top_left(); }},
    {"causal-bottom-right", "",
     "keys j <= p with p = i + n_kv - n_q: the last query sees the last key",
     [](std::string_view) { return Mask::causal_bottom_right(); }},
    {"window", "L,R", "keys p - L <= j <= p + R; 'none' = no bound; ',top-left' makes p = i",
     window_mask},
    {"prefix", "N", "keys j < N or j <= p",
     [](std::string_view text) { return Mask::prefix(parse_size(text, 0, "--mask prefix")); }},
    {"chunk", "N", "keys in the chunk of N tokens that holds p",
     [](std::string_view text) { return Mask::chunk(parse_size(text, 1, "--mask chunk")); }},
    {"lengths", "N,N,...", "keys j < the length of the batch entry", lengths_mask},
    {"documents", "IDS/IDS", "keys whose id equals the query's (one list if both are the same)",
     documents_mask},
};

std::string form(const Kind& kind) {
  return std::string(kind.name) + (kind.argument.empty() ? "" : ":") + std::string(kind.argument);
}

Mask parse_one(std::string_view text) {
  const size_t colon = text.find(':');
  const std::string_view name = text.substr(0, colon);
  std::vector<std::string> names;
  for (const Kind& kind : kKinds) {
    names.emplace_back(kind.name);
    if (kind.name != name) continue;
    if (kind.argument.empty() != (colon == std::string_view::npos)) {
      throw Error(fmt::format("--mask: '{}' is written {}", text, form(kind)));
    }
    return kind.make(kind.argument.empty() ? std::string_view() : text.substr(colon + 1));
  }
  if (name == "causal") {
    throw Error(
        "--mask: 'causal' has two meanings; say causal-top-left (key j <= i) or "
        "causal-bottom-right (the last query sees the last key)");
  }
  const std::string close = nearest(name, names);
  std::string known;
  for (const Kind& kind : kKinds) known += (known.empty() ? "" : ", ") + form(kind);
  throw Error(fmt::format(
      "--mask: unknown mask '{}'{}", name,
      close.empty() ? "; use one of " + known : fmt::format(", did you mean '{}'?", close)));
}

}  // namespace

Mask parse_mask(std::string_view text) {
  Mask mask;
  for (std::string_view part : split(text, '&')) mask = mask & parse_one(part);
  return mask;
}

Mask parse_masks(const std::vector<std::string>& texts) {
  Mask mask;
  for (const std::string& text : texts) mask = mask & parse_mask(text);
  return mask;
}

std::string mask_help() {
  std::string text = "Masks (several --mask, or several joined with &, all apply):\n";
  for (const Kind& kind : kKinds) text += fmt::format("  {:<20} {}\n", form(kind), kind.meaning);
  return text;
}

}  // namespace qkv::cli
