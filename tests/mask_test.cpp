// SPDX-License-Identifier: Apache-2.0
// Masks against a predicate written from the definition: exhaustively for small sizes, every kind,
// every pair of kinds.
#include "qkv/mask.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <memory>
#include <random>

#include "mask_terms.h"
#include "support/allocations.h"

namespace qkv {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
constexpr float kInf = std::numeric_limits<float>::infinity();

struct Cell {
  int64_t b, h, i, j, n_q;
  int64_t n_keys;  // the entry's own length with lengths & causal_bottom_right, else n_kv
  int64_t p(Alignment a) const { return a == Alignment::top_left ? i : i + n_keys - n_q; }
};

// A mask with its definition.
struct Defined {
  Mask mask;
  std::function<bool(const Cell&)> sees;
  bool is_causal_bottom_right = false;
  std::vector<int64_t> lengths = {};
};

bool sees(const std::vector<const Defined*>& parts, const MaskShape& s, int64_t b, int64_t h,
          int64_t i, int64_t j) {
  Cell cell{b, h, i, j, s.n_q, s.n_kv};
  const bool is_causal = std::any_of(parts.begin(), parts.end(),
                                     [](const Defined* d) { return d->is_causal_bottom_right; });
  bool has_lengths = false;
  for (const Defined* d : parts)
    if (!d->lengths.empty() && is_causal) {
      has_lengths = true;
      cell.n_keys = std::min(cell.n_keys, d->lengths[static_cast<size_t>(b)]);
    }
  if (has_lengths && cell.p(Alignment::bottom_right) < 0) return false;
  return std::all_of(parts.begin(), parts.end(), [&](const Defined* d) { return d->sees(cell); });
}

int64_t floor_div(int64_t a, int64_t b) { return (a - ((a % b) + b) % b) / b; }

// Every kind for one shape. The arrays live in `memory`.
class Kinds {
 public:
  explicit Kinds(const MaskShape& s, bool many_windows) : shape_(s) {
    add(Mask::full(), [](const Cell&) { return true; });
    add(Mask(), [](const Cell&) { return true; });
    for (Alignment a : {Alignment::top_left, Alignment::bottom_right}) {
      const bool br = a == Alignment::bottom_right;
      add(
          br ? Mask::causal_bottom_right() : Mask::causal_top_left(),
          [=](const Cell& c) { return c.j <= c.p(a); }, br);
      for (int64_t left : {-1, 0, 1, 3})
        for (int64_t right : {-1, 0, 1, 3})
          if (many_windows || left + right == 1 || left + right == 2)
            add(Mask::window(left, right, a), [=](const Cell& c) {
              return (left < 0 || c.j >= c.p(a) - left) && (right < 0 || c.j <= c.p(a) + right);
            });
    }
    for (int64_t n : {0, 1, 4})
      add(Mask::prefix(n),
          [=](const Cell& c) { return c.j < n || c.j <= c.p(Alignment::bottom_right); });
    for (int64_t size : {1, 2, 3, 7})
      add(Mask::chunk(size), [=](const Cell& c) {
        return floor_div(c.j, size) == floor_div(c.p(Alignment::bottom_right), size);
      });
    add_lengths({std::min<int64_t>(2, s.n_kv), s.n_kv});
    add_lengths({0, s.n_kv / 2});
    for (bool is_scattered : {false, true})
      for (bool per_batch_q : {false, true})
        for (bool per_batch_kv : {false, true})
          add_documents(is_scattered, per_batch_q, per_batch_kv);
    add_dense<bool>({s.n_q, s.n_kv}, true, false);
    add_dense<bool>({1, s.n_kv}, true, false);
    add_dense<float>({s.batch, s.n_q, 1}, -kInf, 1.5f);
    add_dense<double>({s.batch, s.num_heads, s.n_q, s.n_kv}, -kInf, -1e300);
    add_dense<bool>({1, s.num_heads, 1, s.n_kv}, true, false);
  }
  const std::vector<Defined>& all() const { return all_; }

 private:
  void add(Mask mask, std::function<bool(const Cell&)> sees, bool is_causal_bottom_right = false) {
    all_.push_back({std::move(mask), std::move(sees), is_causal_bottom_right});
  }
  void add_lengths(std::vector<int64_t> lengths) {
    all_.push_back({Mask::lengths(lengths),
                    [=](const Cell& c) { return c.j < lengths[static_cast<size_t>(c.b)]; }, false,
                    lengths});
  }
  template <class T>
  T* allocate(size_t n) {
    auto block = std::make_shared<std::vector<uint64_t>>(n * sizeof(T) / 8 + 1);
    memory_.push_back(block);
    return reinterpret_cast<T*>(block->data());
  }
  // Ids -5, 0 and 9 in runs or interleaved; queries also ask for an id without keys and keys have
  // one without queries.
  void add_documents(bool is_scattered, bool per_batch_q, bool per_batch_kv) {
    const int64_t ids[] = {-5, 9, 0};
    auto fill = [&](int64_t n, bool per_batch, int64_t odd_one) {
      int64_t* x = allocate<int64_t>(static_cast<size_t>(shape_.batch * n));
      for (int64_t b = 0; b < shape_.batch; ++b)
        for (int64_t i = 0; i < n; ++i) {
          const int64_t k = (is_scattered ? i : i / 2) + (per_batch ? b : 0);
          x[b * n + i] = i == n - 1 && n > 2 ? odd_one : ids[k % 3];
        }
      return x;
    };
    const int64_t* q = fill(shape_.n_q, per_batch_q, 77);
    const int64_t* kv = fill(shape_.n_kv, per_batch_kv, 78);
    const int64_t n_q = shape_.n_q, n_kv = shape_.n_kv;
    add(Mask::documents(
            per_batch_q ? ConstTensor(q, {shape_.batch, n_q}) : ConstTensor(q, {n_q}),
            per_batch_kv ? ConstTensor(kv, {shape_.batch, n_kv}) : ConstTensor(kv, {n_kv})),
        [=](const Cell& c) {
          return q[(per_batch_q ? c.b * n_q : 0) + c.i] ==
                 kv[(per_batch_kv ? c.b * n_kv : 0) + c.j];
        });
  }
  template <class T>
  void add_dense(std::initializer_list<int64_t> dims, T value, T other) {
    const ConstTensor shape(nullptr, dtype_of<T>(),
                            std::span<const int64_t>(dims.begin(), dims.size()));
    T* x = allocate<T>(static_cast<size_t>(shape.num_elements()));
    for (int64_t e = 0; e < shape.num_elements(); ++e) x[e] = random_() % 3 == 0 ? value : other;
    const ConstTensor t(x, dims);
    add(Mask::dense(t), [=](const Cell& c) {
      const int64_t index[4] = {c.b, c.h, c.i, c.j};
      int64_t at = 0;
      for (int a = 0; a < t.rank; ++a) {
        const int axis = t.rank == 3 && a == 0 ? 0 : a + 4 - t.rank;
        at = at * t.shape[a] + (t.shape[a] == 1 ? 0 : index[axis]);
      }
      return std::is_same_v<T, bool> ? x[at] == value : x[at] != value;
    });
  }

  MaskShape shape_;
  std::mt19937 random_{42};
  std::vector<std::shared_ptr<std::vector<uint64_t>>> memory_;
  std::vector<Defined> all_;
};

// One mask in all its forms: visible, ranges with what they leave open, to_dense, count_visible.
void expect_defined(const Mask& mask, const std::vector<const Defined*>& parts,
                    const MaskShape& s) {
  int64_t count = 0;
  std::vector<RowRange> ranges(static_cast<size_t>(s.n_q));
  for (int64_t b = 0; b < s.batch; ++b) {
    mask.row_ranges(s, b, 0, s.n_q, ranges.data());
    if (s.n_q > 2) {  // any part of the rows, too
      RowRange part[2];
      mask.row_ranges(s, b, s.n_q - 2, 2, part);
      for (int r = 0; r < 2; ++r) {
        ASSERT_EQ(part[r].lo, ranges[static_cast<size_t>(s.n_q - 2 + r)].lo);
        ASSERT_EQ(part[r].hi, ranges[static_cast<size_t>(s.n_q - 2 + r)].hi);
      }
    }
    for (int64_t h = 0; h < s.num_heads; ++h) {
      const std::vector<uint8_t> dense = mask.to_dense(s, b, h);
      for (int64_t i = 0; i < s.n_q; ++i) {
        const RowRange range = ranges[static_cast<size_t>(i)];
        ASSERT_TRUE(0 <= range.lo && range.lo <= range.hi && range.hi <= s.n_kv);
        for (int64_t j = 0; j < s.n_kv; ++j) {
          const bool want = sees(parts, s, b, h, i, j);
          const bool by_range =
              range.lo <= j && j < range.hi && visible_in_range(mask, s, b, h, i, j);
          ASSERT_EQ(mask.visible(s, b, h, i, j), want)
              << mask.name() << " b " << b << " h " << h << " i " << i << " j " << j << " n_q "
              << s.n_q << " n_kv " << s.n_kv;
          ASSERT_EQ(by_range, want) << mask.name() << " b " << b << " h " << h << " i " << i
                                    << " j " << j << " n_q " << s.n_q << " n_kv " << s.n_kv;
          ASSERT_EQ(dense[static_cast<size_t>(i * s.n_kv + j)] != 0, want) << mask.name();
          count += want;
        }
      }
    }
  }
  ASSERT_EQ(mask.count_visible(s), count) << mask.name() << " n_q " << s.n_q << " n_kv " << s.n_kv;
}

TEST(Mask, EveryKind_EqualsItsDefinition) {
  for (int64_t n_q = 0; n_q <= 9; ++n_q)
    for (int64_t n_kv = 0; n_kv <= 9; ++n_kv) {
      const MaskShape shape{2, 2, n_q, n_kv};
      const Kinds kinds(shape, true);
      for (const Defined& d : kinds.all()) expect_defined(d.mask, {&d}, shape);
    }
}

TEST(Mask, EveryPairOfKinds_IsTheirIntersection) {
  for (int64_t n_q : {0, 1, 3, 6})
    for (int64_t n_kv : {0, 1, 4, 6, 8}) {
      const MaskShape shape{2, 2, n_q, n_kv};
      const Kinds kinds(shape, false);
      for (const Defined& a : kinds.all())
        for (const Defined& b : kinds.all()) expect_defined(a.mask & b.mask, {&a, &b}, shape);
    }
}

TEST(Mask, RandomTriplesOfKinds_AreTheirIntersection) {
  const MaskShape shape{2, 2, 7, 11};
  const Kinds kinds(shape, true);
  std::mt19937 random(1);
  for (int round = 0; round < 2000; ++round) {
    const Defined* d[3];
    for (auto& one : d) one = &kinds.all()[random() % kinds.all().size()];
    expect_defined(d[0]->mask & (d[1]->mask & d[2]->mask), {d[0], d[1], d[2]}, shape);
  }
}

// They are asked for in calls of a few microseconds.
TEST(Mask, RowRanges_AllocateNothing) {
  const int64_t lengths[] = {5, 9};
  const int64_t ids[] = {0, 0, 1, 1, 2, 2, 2, 3, 3};
  const Mask mask = Mask::causal_bottom_right() & Mask::window(3, 1) & Mask::chunk(4) &
                    Mask::lengths(lengths) & Mask::prefix(2) &
                    Mask::documents(ConstTensor(ids, {9}), ConstTensor(ids, {9}));
  RowRange ranges[9];
  const int64_t before = test::num_allocations;
  mask.row_ranges({2, 1, 9, 9}, 1, 0, 9, ranges);
  EXPECT_EQ(test::num_allocations, before);
  EXPECT_EQ(ranges[8].lo, 8);
  EXPECT_EQ(ranges[8].hi, 9);
}

TEST(Mask, NamedCausalMasks_AreSharedNotAllocated) {
  const Mask first = Mask::causal_bottom_right();
  const int64_t before = test::num_allocations;
  const Mask second = Mask::causal_bottom_right();
  const Mask copy = first;
  EXPECT_EQ(test::num_allocations, before);
  EXPECT_EQ(first.terms().data(), second.terms().data());
  EXPECT_EQ((copy & Mask::full()).terms().data(), first.terms().data());
}

TEST(Mask, HugeExtents_DoNotOverflow) {
  const int64_t n = int64_t{1} << 62;
  auto row = [](const Mask& mask, const MaskShape& shape, int64_t i) {
    RowRange r;
    mask.row_ranges(shape, 0, i, 1, &r);
    return r;
  };
  auto expect_row = [&](const Mask& mask, const MaskShape& shape, int64_t i, int64_t lo,
                        int64_t hi) {
    const RowRange r = row(mask, shape, i);
    EXPECT_EQ(r.lo, lo) << mask.name() << " row " << i;
    EXPECT_EQ(r.hi, hi) << mask.name() << " row " << i;
    if (lo < hi) {
      EXPECT_TRUE(mask.visible(shape, 0, 0, i, lo));
      EXPECT_TRUE(mask.visible(shape, 0, 0, i, hi - 1));
    }
    if (lo > 0) {
      EXPECT_FALSE(mask.visible(shape, 0, 0, i, lo - 1));
    }
    if (hi < shape.n_kv) {
      EXPECT_FALSE(mask.visible(shape, 0, 0, i, hi));
    }
  };
  const MaskShape square{1, 1, kMax, kMax}, wide{1, 1, 2, kMax}, tall{1, 1, kMax, 2};
  expect_row(Mask::causal_bottom_right(), square, kMax - 1, 0, kMax);
  expect_row(Mask::causal_top_left(), square, n, 0, n + 1);
  expect_row(Mask::causal_bottom_right(), wide, 0, 0, kMax - 1);
  expect_row(Mask::causal_bottom_right(), tall, 0, 0, 0);
  expect_row(Mask::causal_bottom_right(), tall, kMax - 2, 0, 1);
  for (Alignment a : {Alignment::top_left, Alignment::bottom_right}) {
    expect_row(Mask::window(kMax, kMax, a), square, n, 0, kMax);
    expect_row(Mask::window(kMax, kMax, a), tall, kMax - 1, 0, 2);
    expect_row(Mask::window(1, kMax - 1, a), square, kMax - 1, kMax - 2, kMax);
  }
  expect_row(Mask::window(kMax, 0), tall, 0, 0, 0);
  expect_row(Mask::window(0, kMax), tall, 1, 0, 2);
  expect_row(Mask::window(0, kMax - 2), tall, 0, 0, 1);  // p = 2 - kMax
  expect_row(Mask::prefix(kMax), square, 0, 0, kMax);
  expect_row(Mask::prefix(kMax), tall, 0, 0, 2);
  expect_row(Mask::chunk(kMax), square, kMax - 1, 0, kMax);
  expect_row(Mask::chunk(n), square, kMax - 1, n, kMax);
  expect_row(Mask::chunk(kMax), tall, 0, 0, 0);
}

TEST(Mask, LengthsAndCausalBottomRight_AlignEachEntryByItsOwnLength) {
  const int64_t lengths[] = {6, 3, 1, 0};
  const Mask mask = Mask::causal_bottom_right() & Mask::lengths(lengths);
  const MaskShape shape{4, 1, 2, 6};
  EXPECT_EQ(mask.to_text(shape, 0), "xxxxx.\nxxxxxx\n");
  EXPECT_EQ(mask.to_text(shape, 1), "xx....\nxxx...\n");
  EXPECT_EQ(mask.to_text(shape, 2), "......\nx.....\n");
  EXPECT_EQ(mask.to_text(shape, 3), "......\n......\n");
  // So is every other bottom_right kind of that mask; p < 0 sees nothing.
  const Mask window = Mask::window(0, -1) & mask;
  EXPECT_EQ(window.to_text(shape, 0), "....x.\n.....x\n");
  EXPECT_EQ(window.to_text(shape, 1), ".x....\n..x...\n");
  EXPECT_EQ(window.to_text(shape, 2), "......\nx.....\n");
}

TEST(Mask, LengthsWithoutCausalBottomRight_HidePaddingAndMoveNothing) {
  const int64_t lengths[] = {6, 4};
  const MaskShape shape{2, 1, 2, 6};
  const Mask window = Mask::window(1, -1) & Mask::lengths(lengths);
  EXPECT_EQ(window.to_text(shape, 0), "...xxx\n....xx\n");
  EXPECT_EQ(window.to_text(shape, 1), "...x..\n......\n");
  EXPECT_EQ((Mask::chunk(3) & Mask::lengths(lengths)).to_text(shape, 1), "...x..\n...x..\n");
  EXPECT_EQ(Mask::window(-1, 2).to_text({1, 1, 4, 2}), "x.\nxx\nxx\nxx\n");
}

std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

TEST(Mask, WrongUse_IsRefusedWithBothShapes) {
  const int64_t two[] = {1, 2};
  const float x[24] = {};
  const MaskShape shape{3, 2, 2, 4};
  EXPECT_EQ(
      error_of([&] { Mask::lengths(two).check(shape, "attention"); }),
      "attention: mask lengths do not fit the batch, got lengths [2] and scores [3, 2, 2, 4]");
  EXPECT_EQ(error_of([&] {
              Mask::lengths(two).check({2, 2, 2, 1}, "plan");
            }),
            "plan: a mask length is not in [0, n_kv], got 2 and scores [2, 2, 2, 1]");
  const int64_t negative[] = {-1, 0};
  EXPECT_EQ(error_of([&] {
              Mask::lengths(negative).check({2, 2, 2, 1}, "plan");
            }),
            "plan: a mask length is not in [0, n_kv], got -1 and scores [2, 2, 2, 1]");
  EXPECT_EQ(error_of([&] {
              Mask::dense(ConstTensor(x, {4, 2})).check(shape, "attention");
            }),
            "attention: mask does not broadcast over [batch, num_heads, n_q, n_kv], got mask [4, "
            "2] and scores [3, 2, 2, 4]");
  EXPECT_EQ(error_of([&] {
              Mask::dense(ConstTensor(x, {2, 2, 4})).check(shape, "attention");
            }),
            "attention: mask does not broadcast over [batch, num_heads, n_q, n_kv], got mask [2, "
            "2, 4] and scores [3, 2, 2, 4]");
  EXPECT_EQ(error_of([&] {
              Mask::dense(ConstTensor(two, {1, 2}));
            }),
            "Mask::dense: an array is boolean (true = attend) or additive floating point, got i64 "
            "[1, 2]");
  EXPECT_EQ(error_of([&] { Mask::dense(ConstTensor(x, {4})); }),
            "Mask::dense: an array has 2, 3 or 4 axes, got [4]");
  EXPECT_EQ(
      error_of([&] {
        Mask::documents(ConstTensor(two, {2}), ConstTensor(two, {2})).check(shape, "attention");
      }),
      "attention: mask documents do not fit, got q_ids [2], kv_ids [2] and scores [3, 2, 2, 4]");
  EXPECT_EQ(error_of([&] { Mask::window(-2, 0); }),
            "Mask::window: a side is -1 (unbounded) or more, got left -2 and right 0");
  EXPECT_EQ(error_of([&] { Mask::prefix(-1); }), "Mask::prefix: n is negative, got -1");
  EXPECT_EQ(error_of([&] { Mask::chunk(0); }), "Mask::chunk: size must be positive, got 0");
  const int64_t three[] = {1, 2, 3};
  EXPECT_EQ(error_of([&] { Mask::lengths(two) & Mask::lengths(three); }),
            "Mask &: lengths differ in batch, got lengths [2] and lengths [3]");
  RowRange r[3];
  EXPECT_NE(error_of([&] { Mask::full().row_ranges(shape, 0, 0, 3, r); }), "no error");
  EXPECT_NE(error_of([&] { Mask::full().row_ranges(shape, 3, 0, 1, r); }), "no error");
}

}  // namespace
}  // namespace qkv
