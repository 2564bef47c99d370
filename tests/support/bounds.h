// SPDX-License-Identifier: Apache-2.0
// The one bound of every numeric test: error(kernel) <= 2 * error(plain loop in the same precision)
// + a few ulp.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "qkv/dtype.h"

namespace qkv::test {

/// The few ulp: exp to 3 ulp and one rounding of the result. Relative to the largest magnitude of
/// the tensor.
inline constexpr double kUlps = 4;

/// Relative distance of neighbours in the arithmetic type of a tensor: f32 for the 16-bit types.
inline double arithmetic_epsilon(DType dtype) {
  return dtype == DType::f64 ? std::numeric_limits<double>::epsilon()
                             : std::numeric_limits<float>::epsilon();
}

/// What storing x in a 16-bit type may change.
inline double storage_rounding(DType dtype, double x) {
  if (dtype == DType::bf16) return std::ldexp(std::abs(x), -8);
  if (dtype == DType::f16) return std::ldexp(std::abs(x), -11) + std::ldexp(1.0, -25);
  return 0;
}

/// Largest |got - want| over the finite elements.
inline double max_error(const std::vector<double>& got, const std::vector<double>& want) {
  double worst = 0;
  for (size_t e = 0; e < want.size(); ++e)
    if (std::isfinite(want[e]) && std::isfinite(got[e]))
      worst = std::max(worst, std::abs(got[e] - want[e]));
  return worst;
}

inline double max_magnitude(const std::vector<double>& x) {
  double largest = 0;
  for (double e : x)
    if (std::isfinite(e)) largest = std::max(largest, std::abs(e));
  return largest;
}

/// The same infinity, both NaN, or finite and at most allowed[e] apart.
template <class Allowed>
testing::AssertionResult within(const char* name, const std::vector<double>& got,
                                const std::vector<double>& want, Allowed allowed) {
  if (got.size() != want.size())
    return testing::AssertionFailure()
           << name << " has " << got.size() << " elements, want " << want.size();
  size_t num_bad = 0, worst = 0;
  double worst_excess = -1;
  for (size_t e = 0; e < want.size(); ++e) {
    const double error = std::abs(got[e] - want[e]);
    const bool is_same = got[e] == want[e] || (std::isnan(got[e]) && std::isnan(want[e]));
    if (is_same || (std::isfinite(want[e]) && error <= allowed(e))) continue;
    ++num_bad;
    const double excess =
        std::isfinite(error) ? error / allowed(e) : std::numeric_limits<double>::infinity();
    if (excess > worst_excess) worst_excess = excess, worst = e;
  }
  if (num_bad == 0) return testing::AssertionSuccess();
  return testing::AssertionFailure()
         << name << ": " << num_bad << " of " << want.size() << " elements are wrong, worst at "
         << worst << ": got " << got[worst] << ", want " << want[worst] << ", error "
         << std::abs(got[worst] - want[worst]) << ", allowed " << allowed(worst);
}

/// naive_error: what the plain loop makes of the same inputs. floor: a magnitude that the few ulp are relative to at least: 1
/// for a logarithm (a relative error of its argument is an absolute one of its value), that of the terms for a sum.
inline testing::AssertionResult within_bound(const char* name, DType dtype,
                                             const std::vector<double>& got,
                                             const std::vector<double>& want, double naive_error,
                                             double floor = 0) {
  const double few_ulp = kUlps * arithmetic_epsilon(dtype) * std::max(max_magnitude(want), floor);
  return within(
             name, got, want,
             [&](size_t e) { return 2 * naive_error + few_ulp + storage_rounding(dtype, want[e]); })
         << " (plain loop " << naive_error << ", " << qkv::name(dtype) << ")";
}

}  // namespace qkv::test
