// SPDX-License-Identifier: Apache-2.0
// Offsets and extents beyond 32 bits, and base addresses at any offset. Memory that is too large to exist is mapped sparsely.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <memory>

#include "qkv/attention.h"
#include "support/run_attention.h"

namespace qkv {
namespace {

using test::make_problem;
using test::Problem;
using test::TestTensor;

// Zeros that take memory only where they are written. data() is nullptr if the machine does not map that much.
class SparseMemory {
 public:
  explicit SparseMemory(size_t bytes) : bytes_(bytes) {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    data_ = p == MAP_FAILED ? nullptr : p;
  }
  ~SparseMemory() {
    if (data_) munmap(data_, bytes_);
  }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  void* data_;
  size_t bytes_;
};

constexpr int64_t kGap = int64_t{1} << 30;  // elements between rows: the third row lies beyond 2^31

TEST(AttentionLarge, RowsFarApart_EqualRowsSideBySide) {
  const size_t bytes = static_cast<size_t>(4 * kGap + 64) * sizeof(float);
  const SparseMemory q(bytes), k(bytes), v(bytes), out(bytes), lse(bytes), weights(bytes);
  if (!q || !k || !v || !out || !lse || !weights)
    GTEST_SKIP() << "this machine does not map 100 GB of sparse memory";
  std::mt19937_64 random(1);
  // Axis a of each tensor lies kGap apart, in turn: batch, heads, tokens.
  for (int axis = 0; axis < 3; ++axis) {
    Problem p = make_problem({axis == 0 ? 4 : 1, axis == 1 ? 4 : 1, axis == 1 ? 4 : 1,
                              axis == 2 ? 4 : 2, axis == 2 ? 4 : 3, 5, 5},
                             DType::f32, random);
    const auto& e = p.extents;
    const test::Results want = run_attention(p, p.options);
    auto far = [&](const SparseMemory& memory, std::initializer_list<int64_t> shape) {
      Tensor t(memory.as<float>(), shape);
      t.stride[axis] = kGap;
      return t;
    };
    auto copy = [&](const SparseMemory& memory, const TestTensor& from) {
      const auto& s = from.view().shape;
      const Tensor t = far(memory, {s[0], s[1], s[2], s[3]});
      const std::vector<double> values = from.values();
      size_t next = 0;
      test::for_each_offset(t, [&](int64_t at) { test::set_element(t, at, values[next++]); });
      return t;
    };
    const Tensor far_out = far(out, {e.batch, e.num_heads, e.n_q, 5}),
                 far_lse = far(lse, {e.batch, e.num_heads, e.n_q}),
                 far_weights = far(weights, {e.batch, e.num_heads, e.n_q, e.n_kv});
    attention(copy(q, p.q), copy(k, p.k), copy(v, p.v),
              {.out = far_out, .lse = far_lse, .weights = far_weights});
    EXPECT_EQ(test::values(far_out), want.out.values()) << "axis " << axis;
    EXPECT_EQ(test::values(far_lse), want.lse.values()) << "axis " << axis;
    EXPECT_EQ(test::values(far_weights), want.weights.values()) << "axis " << axis;
  }
}

TEST(AttentionLarge, MaskAndBiasRowsFarApart_AreRead) {
  const SparseMemory mask(static_cast<size_t>(4 * kGap + 64)),
      bias(static_cast<size_t>(4 * kGap + 64) * sizeof(float));
  if (!mask || !bias) GTEST_SKIP() << "this machine does not map 20 GB of sparse memory";
  for (int64_t i = 0; i < 4; ++i)
    for (int64_t j = 0; j < 2; ++j) {
      mask.as<bool>()[i * kGap + j] = (i + j) % 2 == 0;
      bias.as<float>()[i * kGap + j] =
          (i + j) % 2 == 0 ? 0.0f : -std::numeric_limits<float>::infinity();
    }
  const float zeros[4] = {}, v[2] = {10, 20};
  for (bool as_bias : {false, true}) {
    AttentionOptions o;
    if (as_bias) {
      o.bias = ConstTensor(bias.as<float>(), {4, 2}, {kGap, 1});
    } else {
      o.mask = Mask::dense(ConstTensor(mask.as<bool>(), {4, 2}, {kGap, 1}));
    }
    float out[4];
    attention(ConstTensor(zeros, {1, 1, 4, 1}), ConstTensor(zeros, {1, 1, 2, 1}),
              ConstTensor(v, {1, 1, 2, 1}), {.out = Tensor(out, {1, 1, 4, 1})}, o);
    for (int i = 0; i < 4; ++i)
      EXPECT_EQ(out[i], i % 2 == 0 ? 10 : 20) << "row " << i << (as_bias ? " bias" : " mask");
  }
}

TEST(AttentionLarge, SeventyThousandKeysWithAnOddMask_EqualTheReference) {
  const int64_t n_kv = 70'000;
  TestTensor odd(DType::boolean, {3, n_kv});
  for (int64_t i = 0; i < 3; ++i)
    for (int64_t j = 0; j < n_kv; ++j)
      test::set_element(odd.view(), i * n_kv + j, j % (i + 3) == 0 || j > 69'990);
  std::mt19937_64 random(2);
  for (DType dtype : {DType::f32, DType::bf16}) {
    Problem p = make_problem({1, 2, 1, 3, n_kv, 4, 4}, dtype, random);
    p.options.mask = Mask::dense(odd);
    expect_reference(p);
    p.options.mask = Mask::window(65'536, -1) & Mask::dense(odd);
    expect_reference(p);
    p.options.mask = Mask::causal_bottom_right() & Mask::lengths(std::vector<int64_t>{69'001});
    expect_reference(p);
  }
}

// 2^32 scores, of which a row sees few: the extents are real, the work is small.
TEST(AttentionLarge, MaskOfMoreThan32BitsOfElements_IsIndexedRight) {
  const int64_t n_q = 1 << 12, n_kv = 1 << 20;
  std::vector<float> q(static_cast<size_t>(n_q), 0.0f), k(static_cast<size_t>(n_kv), 0.0f),
      v(static_cast<size_t>(n_kv)), out(static_cast<size_t>(n_q));
  const std::unique_ptr<bool[]> keys(new bool[static_cast<size_t>(n_kv)]);
  for (int64_t j = 0; j < n_kv; ++j) {
    v[static_cast<size_t>(j)] = static_cast<float>(j);
    keys[static_cast<size_t>(j)] = j % 2 == 0;
  }
  const Mask mask =
      Mask::window(3, 0) & Mask::dense(ConstTensor(keys.get(), {1, 1, n_q, n_kv}, {0, 0, 0, 1}));
  attention(ConstTensor(q.data(), {1, 1, n_q, 1}), ConstTensor(k.data(), {1, 1, n_kv, 1}),
            ConstTensor(v.data(), {1, 1, n_kv, 1}), {.out = Tensor(out.data(), {1, 1, n_q, 1})},
            {.mask = mask});
  for (int64_t i = 0; i < n_q; ++i) {
    const int64_t p = i + n_kv - n_q, last_even = p / 2 * 2;
    ASSERT_EQ(out[static_cast<size_t>(i)], static_cast<float>(last_even - 1))
        << "row " << i;  // mean of two even keys
  }
}

TEST(AttentionLarge, BaseAddressesAtAnyElement_SameBits) {
  for (const test::Extents& e :
       {test::Extents{1, 2, 2, 5, 7, 43, 43}, {1, 1, 1, 3, 64, 43, 43}, {1, 2, 1, 40, 130, 16, 9}})
    for (DType dtype : {DType::f32, DType::f64, DType::bf16}) {
      std::mt19937_64 random(3);
      const Problem p = make_problem(e, dtype, random);
      const std::vector<std::byte> want = run_attention(p, p.options).out.bits();
      for (int64_t shift = 0; shift < 16; ++shift) {
        std::vector<std::unique_ptr<std::byte[]>> memory;
        auto shifted = [&](const Tensor& like) {
          const int64_t bytes = size_bytes(like.dtype);
          memory.emplace_back(
              new std::byte[static_cast<size_t>((like.num_elements() + 16) * bytes + 64)]);
          const auto base = (reinterpret_cast<uintptr_t>(memory.back().get()) + 63) / 64 * 64;
          Tensor t = like;
          t.data = reinterpret_cast<void*>(base + static_cast<uintptr_t>(shift * bytes));
          return t;
        };
        auto copy = [&](const TestTensor& from) {
          const Tensor t = shifted(from.view());
          std::memcpy(t.data, from.view().data,
                      static_cast<size_t>(t.num_elements() * size_bytes(t.dtype)));
          return t;
        };
        const TestTensor like(dtype, {e.batch, e.num_heads, e.n_q, e.head_dim_v});
        const Tensor out = shifted(like.view());
        attention(copy(p.q), copy(p.k), copy(p.v), {.out = out}, p.options);
        EXPECT_EQ(std::memcmp(out.data, want.data(), want.size()), 0)
            << "shift " << shift << " " << p.text;
      }
    }
}

}  // namespace
}  // namespace qkv
