// SPDX-License-Identifier: Apache-2.0
// Tier: benchmark. What the families of cases share.
#include "rows.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <string_view>

#include "reference.h"

namespace qkv::bench {

std::vector<Row> all_rows() {
  std::vector<Row> rows;
  for (auto* family : {attention_rows, backward_rows, decode_rows, layer_rows}) {
    const std::vector<Row> more = family();
    rows.insert(rows.end(), more.begin(), more.end());
  }
  return rows;
}

Mask mask_of(CaseMask mask) {
  switch (mask) {
    case CaseMask::causal:
      return Mask::causal_bottom_right();
    case CaseMask::window256:
      return Mask::window(255, 0);
    default:
      return Mask::full();
  }
}

double reach_of(double avx512, double avx2) {
  const std::string_view target = roof_target();
  return target == "AVX2" ? avx2 : target.starts_with("AVX3") ? avx512 : 0;
}

int64_t memory_bytes() { return std::max<int64_t>(int64_t{256} << 20, 2 * info().l3_bytes); }

void fill_normal(float* x, int64_t n, double deviation) {
  // One long table instead of a number made for each of hundreds of MB; a prime: rows differ.
  constexpr size_t kNumbers = 1000003;
  static const std::vector<float> numbers = [] {
    std::mt19937 random(1);
    std::normal_distribution<float> distribution;
    std::vector<float> made(kNumbers);
    for (float& e : made) e = distribution(random);
    return made;
  }();
  static size_t at = 0;
  const auto scale = static_cast<float>(deviation);
  for (int64_t i = 0; i < n; ++i) {
    x[i] = scale * numbers[at];
    if (++at == kNumbers) at = 0;
  }
}

std::vector<float> normal(int64_t n, double deviation) {
  std::vector<float> x(static_cast<size_t>(n));
  fill_normal(x.data(), n, deviation);
  return x;
}

void for_some_rows(const MaskShape& shape, const Mask& mask,
                   const std::function<void(int64_t h, int64_t i, RowRange range)>& visit) {
  for (const int64_t h : {int64_t{0}, shape.num_heads / 2, shape.num_heads - 1}) {
    for (const int64_t i : {int64_t{0}, shape.n_q / 2, shape.n_q - 1}) {
      RowRange range;
      mask.row_ranges(shape, shape.batch - 1, i, 1, &range);
      visit(h, i, range);
    }
  }
}

double forward_error(const ConstTensor& q, const ConstTensor& k, const ConstTensor& v,
                     const ConstTensor& out, const Mask& mask) {
  const MaskShape shape{q.shape[0], q.shape[1], q.shape[2], k.shape[2]};
  const int64_t b = shape.batch - 1, group_size = q.shape[1] / k.shape[1];
  double worst = 0;
  for_some_rows(shape, mask, [&](int64_t h, int64_t i, RowRange range) {
    const int64_t h_kv = h / group_size, count = range.hi - range.lo;
    const std::vector<double> want =
        reference::forward(tokens(q, b, h, i, 1), tokens(k, b, h_kv, range.lo, count),
                           tokens(v, b, h_kv, range.lo, count))
            .out;
    const ConstTensor row = tokens(out, b, h, i, 1);
    worst = std::max(worst, largest_error(static_cast<const float*>(row.data), want));
  });
  return worst;
}

double largest_error(const float* x, const std::vector<double>& want) {
  double worst = 0;
  for (size_t e = 0; e < want.size(); ++e) {
    const double error = std::fabs(want[e] - static_cast<double>(x[e]));
    worst = std::max(worst, std::isnan(error) ? HUGE_VAL : error);
  }
  return worst;
}

}  // namespace qkv::bench
