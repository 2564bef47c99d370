// SPDX-License-Identifier: Apache-2.0
// Tier: call. rope() and alibi_slopes(), and the table of sines and cosines that the cache uses too.
#include "qkv/rope.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "check.h"
#include "convert_row.h"
#include "positions.h"
#include "rope_table.h"

namespace qkv {
namespace {

const Check kCheck("rope");
constexpr int64_t kNoPosition = std::numeric_limits<int64_t>::min();

template <class T>
void turn_all(const ConstTensor& x, const Tensor& out, const ConstTensor& positions,
              RopeTable* table) {
  const int64_t dim = x.shape[3], in_bytes = size_bytes(x.dtype), out_bytes = size_bytes(out.dtype);
  std::vector<T> row(static_cast<size_t>(dim));
  for (int64_t b = 0; b < x.shape[0]; ++b) {
    if (b == 0 || (positions.rank == 2 && positions.shape[0] > 1))
      table->fill(positions_of(positions, b));
    for (int64_t h = 0; h < x.shape[1]; ++h)
      for (int64_t i = 0; i < x.shape[2]; ++i) {
        const int64_t from = b * x.stride[0] + h * x.stride[1] + i * x.stride[2];
        const int64_t to = b * out.stride[0] + h * out.stride[1] + i * out.stride[2];
        load_row(static_cast<const char*>(x.data) + from * in_bytes, x.dtype, dim, row.data());
        table->turn(i, row.data());
        store_row(row.data(), dim, static_cast<char*>(out.data) + to * out_bytes, out.dtype);
      }
  }
}

}  // namespace

RopeTable::RopeTable(const RopeOptions& o, int64_t dim, const char* caller) : style_(o.style) {
  const int64_t rot_dim = o.rot_dim < 0 ? dim : o.rot_dim;
  if (rot_dim % 2 != 0 || rot_dim > dim)
    throw Error(fmt::format("{}: rot_dim must be even and at most the head dim {}, got {}", caller,
                            dim, rot_dim));
  if (!(o.base > 0) || !std::isfinite(o.base))
    throw Error(
        fmt::format("{}: base of rope must be positive and finite, got {}", caller, o.base));
  half_ = rot_dim / 2;
  for (int64_t i = 0; i < half_; ++i)
    frequency_.push_back(
        std::pow(o.base, -2.0 * static_cast<double>(i) / static_cast<double>(rot_dim)));
}

void RopeTable::resize(int64_t n) {
  cos_.resize(static_cast<size_t>(n * half_));
  sin_.resize(cos_.size());
  positions_.assign(static_cast<size_t>(n), kNoPosition);
}

void RopeTable::set(int64_t r, int64_t position) {
  int64_t& now = positions_[static_cast<size_t>(r)];
  if (now == position && position != kNoPosition) return;
  now = position;
  double *cosines = cos_.data() + r * half_, *sines = sin_.data() + r * half_;
  for (int64_t i = 0; i < half_; ++i) {
    const double angle = static_cast<double>(position) * frequency_[static_cast<size_t>(i)];
    cosines[i] = std::cos(angle), sines[i] = std::sin(angle);
  }
}

void RopeTable::fill(std::span<const int64_t> positions) {
  resize(static_cast<int64_t>(positions.size()));
  for (size_t r = 0; r < positions.size(); ++r) set(static_cast<int64_t>(r), positions[r]);
}

void rope(ConstTensor x, ConstTensor positions, Tensor out, const RopeOptions& options) {
  if (x.rank != 4)
    kCheck.refuse(fmt::format("x needs 4 axes [batch, heads, tokens, dim], got {}", shape_text(x)));
  if (!info(x.dtype).is_float)
    kCheck.refuse(fmt::format("x must be floating point, got {}", name(x.dtype)));
  kCheck.layout(x, "x");
  check_positions(kCheck, positions, x.shape[0], x.shape[2]);
  kCheck.output(out, "out", {x.shape[0], x.shape[1], x.shape[2], x.shape[3]}, x.dtype);
  kCheck.layout(out, "out");
  RopeTable table(options, x.shape[3], "rope");
  x.dtype == DType::f64 ? turn_all<double>(x, out, positions, &table)
                        : turn_all<float>(x, out, positions, &table);
}

std::vector<float> alibi_slopes(int64_t num_heads) {
  if (num_heads < 1)
    throw Error(fmt::format("alibi_slopes: num_heads must be positive, got {}", num_heads));
  int64_t n = 1;
  while (n <= num_heads / 2) n *= 2;
  std::vector<float> slopes;
  const auto slope = [](int64_t i, int64_t of) {
    return static_cast<float>(std::exp2(-8.0 * static_cast<double>(i) / static_cast<double>(of)));
  };
  for (int64_t i = 1; i <= n; ++i) slopes.push_back(slope(i, n));
  for (int64_t i = 1; static_cast<int64_t>(slopes.size()) < num_heads; i += 2)
    slopes.push_back(slope(i, 2 * n));
  return slopes;
}

}  // namespace qkv
