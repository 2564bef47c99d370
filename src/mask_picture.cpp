// SPDX-License-Identifier: Apache-2.0
// Tier: call. What a mask looks like: its name, and pictures in text and SVG.
#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "mask_terms.h"

namespace qkv {
namespace {

using Term = Mask::Term;
using Kind = Mask::Term::Kind;

constexpr int64_t kMaxPictureCells = int64_t{1}
                                     << 26;  // 64 Mi: larger pictures are of no use to anyone

std::string name_of(const Term& t) {
  const std::string alignment = t.alignment == Alignment::top_left ? "top_left" : "bottom_right";
  switch (t.kind) {
    case Kind::causal:
      return "causal_" + alignment;
    case Kind::window:
      return "window(" + std::to_string(t.a) + ", " + std::to_string(t.b) + ", " + alignment + ")";
    case Kind::prefix:
      return "prefix(" + std::to_string(t.a) + ")";
    case Kind::chunk:
      return "chunk(" + std::to_string(t.a) + ")";
    case Kind::lengths: {
      constexpr size_t kMaxListed = 8;
      std::string list;
      for (size_t e = 0; e < std::min(t.lengths->size(), kMaxListed); ++e)
        list += (e == 0 ? "" : ", ") + std::to_string((*t.lengths)[e]);
      return "lengths(" + list + (t.lengths->size() > kMaxListed ? ", ...)" : ")");
    }
    case Kind::documents:
      return "documents(" + std::to_string(t.documents->n_q) + " queries, " +
             std::to_string(t.documents->n_kv) + " keys)";
    case Kind::dense:
      return "dense(" + std::string(name(t.dense.dtype)) + " " + shape_text(t.dense) + ")";
  }
  return {};
}

// Throws unless the picture exists and can be drawn; returns its cells, row-major [n_q, n_kv].
std::vector<uint8_t> cells_of(const Mask& mask, const MaskShape& shape, int64_t b, int64_t h,
                              const char* caller) {
  const std::string text = shape_text(shape);
  if (b < 0 || b >= shape.batch || h < 0 || h >= shape.num_heads)
    throw Error(std::string(caller) + ": no such batch entry or head, got " + std::to_string(b) +
                ", " + std::to_string(h) + " and scores " + text);
  if (shape.n_kv > 0 && shape.n_q > kMaxPictureCells / shape.n_kv)
    throw Error(std::string(caller) + ": a picture has at most 2^26 cells, got scores " + text);
  mask.check(shape, caller);
  return mask.to_dense(shape, b, h);
}

// The name as text of an SVG file: " & " joins terms.
std::string escaped(const std::string& text) {
  std::string out;
  for (char c : text) out += c == '&' ? std::string("&amp;") : std::string(1, c);
  return out;
}

}  // namespace

std::string Mask::name() const {
  std::string all;
  for (const Term& t : terms()) all += (all.empty() ? "" : " & ") + name_of(t);
  return all.empty() ? "full" : all;
}

std::string Mask::to_text(const MaskShape& shape, int64_t b, int64_t h) const {
  const std::vector<uint8_t> cells = cells_of(*this, shape, b, h, "Mask::to_text");
  std::string picture;
  picture.reserve(static_cast<size_t>(shape.n_q * (shape.n_kv + 1)));
  for (int64_t i = 0; i < shape.n_q; ++i) {
    for (int64_t j = 0; j < shape.n_kv; ++j)
      picture += cells[static_cast<size_t>(i * shape.n_kv + j)] ? 'x' : '.';
    picture += '\n';
  }
  return picture;
}

// One unit per cell and one path per run of visible keys; the viewer scales it.
std::string Mask::to_svg(const MaskShape& shape, int64_t b, int64_t h) const {
  const std::vector<uint8_t> cells = cells_of(*this, shape, b, h, "Mask::to_svg");
  constexpr int64_t kCellPixels = 12, kMaxPixels = 960;
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" viewBox=\"0 0 {n_kv} {n_q}\" "
      "shape-rendering=\"crispEdges\">\n<title>{}: {n_q} queries, {n_kv} keys</title>\n"
      "<rect width=\"{n_kv}\" height=\"{n_q}\" fill=\"#e8e8e8\"/>\n<path fill=\"#2060a0\" d=\"",
      std::clamp<int64_t>(shape.n_kv, 1, kMaxPixels / kCellPixels) * kCellPixels, escaped(name()),
      fmt::arg("n_kv", shape.n_kv), fmt::arg("n_q", shape.n_q));
  for (int64_t i = 0; i < shape.n_q; ++i) {
    const auto row = cells.begin() + i * shape.n_kv, end = row + shape.n_kv;
    for (auto lo = std::find(row, end, 1); lo != end;) {
      const auto hi = std::find(lo, end, 0);
      fmt::format_to(std::back_inserter(svg), "M{} {}h{run}v1h-{run}z", lo - row, i,
                     fmt::arg("run", hi - lo));
      lo = std::find(hi, end, 1);
    }
  }
  return svg + "\"/>\n</svg>\n";
}

}  // namespace qkv
