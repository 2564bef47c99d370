// SPDX-License-Identifier: Apache-2.0
// Attention as anyone would write it, in the kernel's own precision: plain loops and a two-pass softmax. Its error against the
// reference in double is what a kernel is measured by (bounds.h).
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "element.h"
#include "mask_terms.h"
#include "philox.h"
#include "qkv/attention.h"
#include "reference.h"

namespace qkv::test {

/// Three samples of what rounding does to the same numbers: std::exp with sums upwards or downwards, or std::exp2 of scores
/// that carry log2(e), relative to a number that is not the maximum (exp(0) = 1 makes the sum of equal scores exact by luck).
enum class Loop : uint8_t { upwards, downwards, base2 };
inline constexpr std::array kLoops = {Loop::upwards, Loop::downwards, Loop::base2};

/// T: float or double.
template <class T>
class NaiveForward {
 public:
  NaiveForward(const ConstTensor& q, const ConstTensor& k, const ConstTensor& v,
               const AttentionOptions& options, Loop loop)
      : q_(q),
        k_(k),
        v_(v),
        o_(options),
        loop_(loop),
        shape_{q.shape[0], q.shape[1], q.shape[2], k.shape[2]},
        group_size_(k.shape[1] == 0 ? 1 : q.shape[1] / k.shape[1]),
        scale_(options.scale.value_or(
            q.shape[3] == 0 ? 1 : 1 / std::sqrt(static_cast<double>(q.shape[3])))) {}

  reference::Forward run() {
    for (int64_t b = 0; b < shape_.batch; ++b)
      for (int64_t h = 0; h < shape_.num_heads; ++h)
        for (int64_t i = 0; i < shape_.n_q; ++i) row(b, h, i);
    return std::move(result_);
  }

 private:
  static constexpr T kInf = std::numeric_limits<T>::infinity();
  bool is_base2() const { return loop_ == Loop::base2; }
  T unit() const { return is_base2() ? static_cast<T>(1.44269504088896340736) : T{1}; }
  T power(T x) const { return is_base2() ? std::exp2(x) : std::exp(x); }
  int64_t nth(int64_t x, int64_t n) const { return loop_ == Loop::downwards ? n - 1 - x : x; }
  static T read(const ConstTensor& t, int64_t b, int64_t h, int64_t i, int64_t d) {
    return static_cast<T>(
        element(t, b * t.stride[0] + h * t.stride[1] + i * t.stride[2] + d * t.stride[3]));
  }
  static T read_scores(const ConstTensor& t, int64_t b, int64_t h, int64_t i, int64_t j) {
    return static_cast<T>(element(t, score_strides(t).offset(b, h, i, j)));
  }
  static T read_head(const ConstTensor& t, int64_t h) {
    return static_cast<T>(element(t, h * t.stride[0]));
  }

  // The score of a visible key, in the loop's unit.
  T score(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const int64_t dim = q_.shape[3];
    const T before = is_base2() ? static_cast<T>(scale_) * (o_.softcap > 0 ? T{1} : unit()) : T{1};
    T s = 0;
    for (int64_t n = 0; n < dim; ++n) {
      const int64_t d = nth(n, dim);
      s += read(q_, b, h, i, d) * before * read(k_, b, h / group_size_, j, d);
    }
    if (!is_base2()) s *= static_cast<T>(scale_);
    if (o_.softcap > 0)
      s = static_cast<T>(o_.softcap) * unit() * std::tanh(s / static_cast<T>(o_.softcap));
    if (o_.bias) s += unit() * read_scores(o_.bias, b, h, i, j);
    for (const Mask::Term& t : o_.mask.terms())
      if (t.kind == Mask::Term::Kind::dense && t.dense.dtype != DType::boolean)
        s += unit() * read_scores(t.dense, b, h, i, j);
    if (o_.alibi_slopes)
      s -= unit() * read_head(o_.alibi_slopes, h) *
           static_cast<T>(std::abs(first_position(o_.mask, shape_, b) + i - j));
    return s;
  }

  void row(int64_t b, int64_t h, int64_t i) {
    const size_t n_kv = static_cast<size_t>(shape_.n_kv);
    const T sink = o_.sinks ? read_head(o_.sinks, h) * unit() : -kInf;
    std::vector<T> s(n_kv);
    std::vector<bool> is_visible(n_kv);
    T m = sink;
    for (size_t j = 0; j < n_kv; ++j) {
      const int64_t key = static_cast<int64_t>(j);
      is_visible[j] = o_.mask.visible(shape_, b, h, i, key) &&
                      !(o_.bias && read_scores(o_.bias, b, h, i, key) == -kInf);
      if (!is_visible[j]) continue;
      s[j] = score(b, h, i, key);
      m = std::max(m, s[j]);
    }
    if (is_base2()) m += static_cast<T>(0.3);
    const bool is_empty = std::find(is_visible.begin(), is_visible.end(), true) == is_visible.end();
    T l = o_.sinks && !is_empty ? power(sink - m) : T{0};
    for (int64_t n = 0; n < shape_.n_kv; ++n) {
      const size_t j = static_cast<size_t>(nth(n, shape_.n_kv));
      if (is_visible[j]) l += s[j] = power(s[j] - m);
    }
    result_.lse.push_back(is_empty     ? sink / unit()
                          : is_base2() ? (m + std::log2(l)) / unit()
                                       : m + std::log(l));
    for (size_t j = 0; j < n_kv; ++j) result_.weights.push_back(is_visible[j] ? s[j] / l : T{0});

    for (int64_t d = 0; d < v_.shape[3]; ++d) {
      T sum = 0;
      for (int64_t n = 0; n < shape_.n_kv; ++n) {
        const int64_t j = nth(n, shape_.n_kv);
        if (!is_visible[static_cast<size_t>(j)] || is_dropped(b, h, i, j)) continue;
        const T weight = s[static_cast<size_t>(j)] / l;
        sum += (o_.dropout > 0 ? weight / static_cast<T>(1 - o_.dropout) : weight) *
               read(v_, b, h / group_size_, j, d);
      }
      result_.out.push_back(sum);
    }
  }

  bool is_dropped(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return o_.dropout > 0 &&
           dropout_word(o_.seed, h + shape_.num_heads * b, i, j) < dropout_threshold(o_.dropout);
  }

  const ConstTensor q_, k_, v_;
  const AttentionOptions& o_;
  const Loop loop_;
  const MaskShape shape_;
  const int64_t group_size_;
  const double scale_;
  reference::Forward result_;
};

}  // namespace qkv::test
