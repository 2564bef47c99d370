// SPDX-License-Identifier: Apache-2.0
// Tier: benchmark. The cases of cases.h as things to run: what the benchmark programs and `qkv bench` measure.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "cases.h"
#include "measure.h"
#include "qkv/qkv.h"

namespace qkv::bench {

struct Row {
  std::string name;                             // "family/case"
  std::function<Run(int num_threads)> prepare;  // makes the inputs, runs and checks one call
};

std::vector<Row> attention_rows();
std::vector<Row> backward_rows();
std::vector<Row> decode_rows();
std::vector<Row> layer_rows();
std::vector<Row> all_rows();

/// What the families share.
Mask mask_of(CaseMask mask);
/// What the instruction set in force is meant to reach: 0 for one that has no aim.
double reach_of(double avx512, double avx2);
/// Bytes that do not fit the last-level cache: of the caches that a decode reads in turn, and of the
/// buffer that the bandwidth of memory is taken from.
int64_t memory_bytes();

/// Normal random numbers, other ones at every call. Not for several threads at once.
void fill_normal(float* x, int64_t n, double deviation = 1);
std::vector<float> normal(int64_t n, double deviation = 1);

/// View of `count` tokens of one batch entry and head of t [batch, heads, tokens, dim].
template <class T>
T tokens(T t, int64_t b, int64_t h, int64_t first, int64_t count) {
  using Byte = std::conditional_t<T::kConst, const char, char>;
  const int64_t offset = b * t.stride[0] + h * t.stride[1] + first * t.stride[2];
  t.data = static_cast<Byte*>(t.data) + offset * size_bytes(t.dtype);
  t.shape[0] = t.shape[1] = 1, t.shape[2] = count;
  return t;
}

/// Calls visit(h, i, range) for some rows of the last batch entry: the keys that each sees.
void for_some_rows(const MaskShape& shape, const Mask& mask,
                   const std::function<void(int64_t h, int64_t i, RowRange range)>& visit);
/// Largest error of out against the reference in those rows; f32, dense.
double forward_error(const ConstTensor& q, const ConstTensor& k, const ConstTensor& v,
                     const ConstTensor& out, const Mask& mask);
/// Largest |x - want|.
double largest_error(const float* x, const std::vector<double>& want);

}  // namespace qkv::bench
