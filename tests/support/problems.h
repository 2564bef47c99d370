// SPDX-License-Identifier: Apache-2.0
// Problems of tests: extents, tensors in any layout, every mask kind, every option, drawn from a
// seed.
#pragma once
#include <array>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "qkv/attention.h"
#include "support/tensors.h"

namespace qkv::test {

struct Extents {
  int64_t batch = 1, num_heads = 1, num_kv_heads = 1, n_q = 1, n_kv = 1, head_dim_qk = 1,
          head_dim_v = 1;
  MaskShape mask_shape() const { return {batch, num_heads, n_q, n_kv}; }
  std::string text() const {
    std::string all;
    for (int64_t x : {batch, num_heads, num_kv_heads, n_q, n_kv, head_dim_qk, head_dim_v})
      all += (all.empty() ? "[" : ", ") + std::to_string(x);
    return all + "]";
  }
};

enum class MaskKind : uint8_t {
  full,
  causal_top_left,
  causal_bottom_right,
  window,
  window_top_left,
  window_open,  // unbounded on the left
  prefix,
  chunk,
  lengths,
  documents,
  scattered_documents,
  dense_bool,
  dense_bool_heads,
  dense_additive,
};
inline constexpr int kNumMaskKinds = static_cast<int>(MaskKind::dense_additive) + 1;

/// Masks with the arrays they point to.
class MaskFactory {
 public:
  explicit MaskFactory(const MaskShape& shape, std::mt19937_64& random)
      : shape_(shape), random_(&random) {}

  Mask make(MaskKind kind) {
    const int64_t n_q = shape_.n_q, n_kv = shape_.n_kv;
    switch (kind) {
      case MaskKind::full:
        return Mask::full();
      case MaskKind::causal_top_left:
        return Mask::causal_top_left();
      case MaskKind::causal_bottom_right:
        return Mask::causal_bottom_right();
      case MaskKind::window:
        return Mask::window(below(n_kv / 2 + 2), below(4));
      case MaskKind::window_top_left:
        return Mask::window(below(n_kv / 2 + 2), below(n_kv + 1), Alignment::top_left);
      case MaskKind::window_open:
        return Mask::window(-1, below(n_kv / 2 + 2));
      case MaskKind::prefix:
        return Mask::prefix(below(n_kv + 1));
      case MaskKind::chunk:
        return Mask::chunk(1 + below(n_kv / 2 + 2));
      case MaskKind::lengths: {
        std::vector<int64_t> lengths;
        for (int64_t b = 0; b < shape_.batch; ++b) lengths.push_back(below(n_kv + 1));
        return Mask::lengths(lengths);
      }
      case MaskKind::documents: {
        const bool per_batch = below(2) == 1;
        const int64_t run = 1 + below(n_kv / 2 + 1);
        return Mask::documents(ids(n_q, per_batch, [=](int64_t i) { return i / run; }),
                               ids(n_kv, below(2) == 1, [=](int64_t j) { return j / run; }));
      }
      case MaskKind::scattered_documents: {
        const int64_t n = 1 + below(4);
        return Mask::documents(
            ids(n_q, below(2) == 1, [=](int64_t i) { return i % n; }),
            ids(n_kv, below(2) == 1, [=](int64_t j) { return j * j % (n + 1); }));
      }
      case MaskKind::dense_bool:
        return Mask::dense(dense(DType::boolean, {n_q, n_kv}));
      case MaskKind::dense_bool_heads:
        return Mask::dense(
            dense(DType::boolean, {shape_.batch, shape_.num_heads, below(2) == 1 ? n_q : 1, n_kv}));
      case MaskKind::dense_additive: {
        const DType types[] = {DType::f32, DType::f16, DType::bf16, DType::f64};
        return Mask::dense(dense(types[below(4)], {below(2) == 1 ? shape_.batch : 1, n_q, n_kv}));
      }
    }
    return {};
  }

  /// Additive: a third of the elements -inf, the others normal. Boolean: two thirds true.
  const TestTensor& dense(DType dtype, std::vector<int64_t> shape) {
    TestTensor& t = arrays_.emplace_back(dtype, std::move(shape));
    std::normal_distribution<double> normal;
    for_each_offset(t.view(), [&](int64_t at) {
      const bool is_hidden = below(3) == 0;
      const double x = normal(*random_);
      const double hidden = -std::numeric_limits<double>::infinity();
      set_element(t.view(), at, dtype == DType::boolean ? !is_hidden : is_hidden ? hidden : x);
    });
    return t;
  }
  int64_t below(int64_t n) { return static_cast<int64_t>((*random_)() % static_cast<uint64_t>(n)); }

 private:
  template <class F>
  const TestTensor& ids(int64_t n, bool per_batch, F id) {
    TestTensor& t = per_batch
                        ? arrays_.emplace_back(DType::i64, std::vector<int64_t>{shape_.batch, n})
                        : arrays_.emplace_back(DType::i32, std::vector<int64_t>{n});
    for (int64_t b = 0; b < (per_batch ? shape_.batch : 1); ++b)
      for (int64_t i = 0; i < n; ++i)
        set_element(t.view(), b * n + i, static_cast<double>(id(i + b)));
    return t;
  }

  MaskShape shape_;
  std::mt19937_64* random_;
  std::deque<TestTensor> arrays_;  // stays where it is when it grows
};

/// Inputs, options and the arrays that the options point to.
struct Problem {
  Extents extents;
  TestTensor q, k, v;
  AttentionOptions options;
  TestTensor bias, sinks, alibi_slopes;
  std::shared_ptr<MaskFactory> masks;
  std::string text;  // for failure messages
  void add_text(const std::string& a, const std::string& b = "") {
    text.append(" ").append(a).append(" ").append(b);
  }
};

inline Problem make_problem(const Extents& e, DType dtype, std::mt19937_64& random, DType dtype_kv,
                            Layout layout = Layout::contiguous, Guard guard = Guard::behind) {
  Problem p;
  p.extents = e;
  p.q = TestTensor(dtype, {e.batch, e.num_heads, e.n_q, e.head_dim_qk}, layout, guard);
  p.k = TestTensor(dtype_kv, {e.batch, e.num_kv_heads, e.n_kv, e.head_dim_qk}, layout, guard);
  p.v = TestTensor(dtype_kv, {e.batch, e.num_kv_heads, e.n_kv, e.head_dim_v}, layout, guard);
  for (TestTensor* t : {&p.q, &p.k, &p.v}) t->fill_random(random);
  p.masks = std::make_shared<MaskFactory>(e.mask_shape(), random);
  p.text = e.text() + " " + std::string(name(dtype)) + "/" + std::string(name(dtype_kv));
  return p;
}
inline Problem make_problem(const Extents& e, DType dtype, std::mt19937_64& random) {
  return make_problem(e, dtype, random, dtype);
}

/// Adds each option with probability 1/3 or so.
inline void add_random_options(Problem& p, std::mt19937_64& random) {
  const Extents& e = p.extents;
  AttentionOptions& o = p.options;
  const DType small = p.q.view().dtype == DType::f64 ? DType::f64 : DType::f32;
  auto coin = [&](int sides) { return random() % static_cast<uint64_t>(sides) == 0; };
  while (coin(2))
    o.mask = o.mask & p.masks->make(static_cast<MaskKind>(p.masks->below(kNumMaskKinds)));
  if (coin(3)) o.scale = std::array{0.0, 1.0, -0.3, 2.0}[static_cast<size_t>(p.masks->below(4))];
  if (coin(3)) o.softcap = std::array{0.5, 5.0, 50.0}[static_cast<size_t>(p.masks->below(3))];
  if (coin(3)) {
    std::vector<int64_t> shape = {coin(2) ? 1 : e.batch, coin(2) ? 1 : e.num_heads,
                                  coin(2) ? 1 : e.n_q, coin(4) ? 1 : e.n_kv};
    p.bias = TestTensor(coin(2) ? small : DType::bf16, shape);
    p.bias.fill_random(random);
    if (coin(3))
      for_each_offset(p.bias.view(), [&](int64_t at) {
        if (coin(5)) set_element(p.bias.view(), at, -std::numeric_limits<double>::infinity());
      });
    o.bias = p.bias;
  }
  if (coin(4)) {
    p.sinks = TestTensor(small, {e.num_heads});
    o.sinks = p.sinks.fill_random(random, 2);
  }
  if (coin(4)) {
    p.alibi_slopes = TestTensor(small, {e.num_heads});
    o.alibi_slopes = p.alibi_slopes.fill_random(random, 0.3);
  }
  if (coin(4)) {
    o.dropout = std::array{0.1, 0.5, 0.9, 1.0}[static_cast<size_t>(p.masks->below(4))];
    o.seed = random();
  }
  p.text += " mask " + o.mask.name() + " scale " +
            (o.scale ? std::to_string(*o.scale) : "default") + " softcap " +
            std::to_string(o.softcap) + " dropout " + std::to_string(o.dropout) + " bias " +
            shape_text(o.bias) + (o.sinks ? " sinks" : "") + (o.alibi_slopes ? " alibi" : "");
}

}  // namespace qkv::test
