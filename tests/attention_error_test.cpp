// SPDX-License-Identifier: Apache-2.0
// Every malformed call of attention() is refused with a text that names the shapes, and leaves the
// outputs untouched.
#include <gtest/gtest.h>

#include <functional>

#include "qkv/attention.h"
#include "support/problems.h"

namespace qkv {
namespace {

using test::TestTensor;

const std::vector<int64_t> kWeightRows = {2, 0}, kBadRows = {1, 3}, kNegativeRows = {-1};

template <class T>
T with_dtype(T t, DType dtype) {
  t.dtype = dtype;
  return t;
}

// A good call that each case spoils in one way.
struct Arguments {
  TestTensor memory{DType::f32, {131072}};
  ConstTensor q, k, v;
  AttentionOutputs outputs;
  AttentionOptions options;

  Arguments() {
    memory.fill(0.25);
    q = input({2, 4, 3, 8});
    k = input({2, 2, 5, 8});
    v = input({2, 2, 5, 6});
    outputs = {.out = output({2, 4, 3, 6}),
               .lse = output({2, 4, 3}),
               .weights = output({2, 4, 3, 5}),
               .mean_weights = output({2, 3, 5}),
               .weight_rows = ConstTensor(kWeightRows.data(), {2}),
               .row_weights = output({2, 4, 2, 5}),
               .top_weights = output({2, 4, 3, 7}),
               .top_keys = with_dtype(output({2, 4, 3, 7}), DType::i64),
               .column_sums = output({2, 4, 5}),
               .entropy = output({2, 4, 3})};
  }
  float* floats() const { return static_cast<float*>(memory.view().data); }
  ConstTensor input(std::initializer_list<int64_t> shape) const {
    return ConstTensor(floats(), shape);
  }
  // Outputs lie behind all inputs, each in its own place.
  Tensor output(std::initializer_list<int64_t> shape) {
    next_output += 4096;
    return Tensor(floats() + next_output, shape);
  }
  int64_t next_output = 16384;
};

struct Case {
  const char* name;
  std::function<void(Arguments&)> spoil;
  std::vector<const char*> words;  // that the text must contain
};

const double kNan = std::numeric_limits<double>::quiet_NaN();
const double kInf = std::numeric_limits<double>::infinity();
const std::vector<int64_t> kThree = {1, 2, 3}, kTooLong = {5, 6};
const std::vector<int32_t> kIds(3, 0);

ConstTensor with_stride(ConstTensor t, int axis, int64_t stride) {
  t.stride[axis] = stride;
  return t;
}
Tensor with_stride(Tensor t, int axis, int64_t stride) {
  t.stride[axis] = stride;
  return t;
}
template <class T>
T without_data(T t) {
  t.data = nullptr;
  return t;
}

const Case kCases[] = {
    {"rank of q",
     [](auto& a) {
       a.q = a.input({4, 3, 8});
     },
     {"[4, 3, 8]", "[2, 2, 5, 8]"}},
    {"rank of k",
     [](auto& a) {
       a.k = a.input({5, 8});
     },
     {"[2, 4, 3, 8]", "[5, 8]"}},
    {"q not given", [](auto& a) { a.q = {}; }, {"[2, 2, 5, 8]"}},
    {"v not given", [](auto& a) { a.v = {}; }, {"[2, 2, 5, 8]"}},
    {"batch of k",
     [](auto& a) {
       a.k = a.input({3, 2, 5, 8});
     },
     {"batch", "[2, 4, 3, 8]", "[3, 2, 5, 8]"}},
    {"batch of v",
     [](auto& a) {
       a.v = a.input({1, 2, 5, 6});
     },
     {"batch", "[2, 4, 3, 8]", "[1, 2, 5, 6]"}},
    {"heads do not divide",
     [](auto& a) {
       a.k = a.input({2, 3, 5, 8}), a.v = a.input({2, 3, 5, 6});
     },
     {"num_heads 4 is not a multiple of num_kv_heads 3", "[2, 4, 3, 8]", "[2, 3, 5, 8]"}},
    {"more kv heads than heads",
     [](auto& a) {
       a.k = a.input({2, 8, 5, 8}), a.v = a.input({2, 8, 5, 6});
     },
     {"num_heads 4", "num_kv_heads 8", "[2, 4, 3, 8]", "[2, 8, 5, 8]"}},
    {"no kv heads",
     [](auto& a) {
       a.k = a.input({2, 0, 5, 8}), a.v = a.input({2, 0, 5, 6});
     },
     {"num_kv_heads 0", "[2, 4, 3, 8]", "[2, 0, 5, 8]"}},
    {"heads of v",
     [](auto& a) {
       a.v = a.input({2, 4, 5, 6});
     },
     {"[2, 2, 5, 8]", "[2, 4, 5, 6]"}},
    {"n_kv of v",
     [](auto& a) {
       a.v = a.input({2, 2, 6, 6});
     },
     {"n_kv", "[2, 2, 5, 8]", "[2, 2, 6, 6]"}},
    {"head_dim_qk of k",
     [](auto& a) {
       a.k = a.input({2, 2, 5, 7});
     },
     {"head_dim_qk", "[2, 4, 3, 8]", "[2, 2, 5, 7]"}},
    {"integer q", [](auto& a) { a.q = with_dtype(a.q, DType::i32); }, {"i32"}},
    {"f64 with f32", [](auto& a) { a.q = with_dtype(a.q, DType::f64); }, {"f64", "f32"}},
    {"f32 with f64",
     [](auto& a) { a.k = with_dtype(a.k, DType::f64), a.v = with_dtype(a.v, DType::f64); },
     {"f64", "f32"}},
    {"k and v differ in type",
     [](auto& a) { a.v = with_dtype(a.v, DType::bf16); },
     {"bf16", "f32"}},
    {"last axis of q",
     [](auto& a) { a.q = with_stride(a.q, 3, 2); },
     {"q", "stride 2", "[2, 4, 3, 8]"}},
    {"last axis of k",
     [](auto& a) { a.k = with_stride(a.k, 3, 0); },
     {"k", "stride 0", "[2, 2, 5, 8]"}},
    {"last axis of v",
     [](auto& a) { a.v = with_stride(a.v, 3, -1); },
     {"v", "stride -1", "[2, 2, 5, 6]"}},
    {"q without data", [](auto& a) { a.q = without_data(a.q); }, {"q", "[2, 4, 3, 8]"}},
    {"k without data", [](auto& a) { a.k = without_data(a.k); }, {"k", "[2, 2, 5, 8]"}},
    {"out has n_kv rows",
     [](auto& a) {
       a.outputs.out = a.output({2, 4, 5, 6});
     },
     {"[2, 4, 3, 6]", "[2, 4, 5, 6]"}},
    {"out has head_dim_qk",
     [](auto& a) {
       a.outputs.out = a.output({2, 4, 3, 8});
     },
     {"[2, 4, 3, 6]", "[2, 4, 3, 8]"}},
    {"out is bf16", [](auto& a) { a.outputs.out.dtype = DType::bf16; }, {"bf16", "f32"}},
    {"out without data",
     [](auto& a) { a.outputs.out = without_data(a.outputs.out); },
     {"out", "[2, 4, 3, 6]"}},
    {"last axis of out",
     [](auto& a) { a.outputs.out = with_stride(a.outputs.out, 3, 2); },
     {"out", "stride 2"}},
    {"out repeats heads",
     [](auto& a) { a.outputs.out = with_stride(a.outputs.out, 1, 0); },
     {"out", "stride 0"}},
    {"lse has 4 axes",
     [](auto& a) {
       a.outputs.lse = a.output({2, 4, 3, 1});
     },
     {"lse", "[2, 4, 3]", "[2, 4, 3, 1]"}},
    {"lse is f64", [](auto& a) { a.outputs.lse.dtype = DType::f64; }, {"lse", "f64", "f32"}},
    {"lse repeats rows",
     [](auto& a) { a.outputs.lse = with_stride(a.outputs.lse, 2, 0); },
     {"lse", "stride 0"}},
    {"weights have kv heads",
     [](auto& a) {
       a.outputs.weights = a.output({2, 2, 3, 5});
     },
     {"weights", "[2, 4, 3, 5]", "[2, 2, 3, 5]"}},
    {"mean weights of every head",
     [](auto& a) {
       a.outputs.mean_weights = a.output({2, 4, 3, 5});
     },
     {"outputs.mean_weights", "[2, 3, 5]", "[2, 4, 3, 5]"}},
    {"strided keys of mean weights",
     [](auto& a) { a.outputs.mean_weights = with_stride(a.outputs.mean_weights, 2, 2); },
     {"outputs.mean_weights", "contiguous", "stride 2"}},
    {"row weights without rows",
     [](auto& a) { a.outputs.weight_rows = {}; },
     {"outputs.weight_rows", "outputs.row_weights", "[2, 4, 2, 5]"}},
    {"rows without row weights",
     [](auto& a) { a.outputs.row_weights = {}; },
     {"outputs.weight_rows", "outputs.row_weights", "[2]"}},
    {"a row behind the last",
     [](auto& a) { a.outputs.weight_rows = ConstTensor(kBadRows.data(), {2}); },
     {"outputs.weight_rows", "n_q 3", "got 3 at index 1"}},
    {"a negative row",
     [](auto& a) {
       a.outputs.weight_rows = ConstTensor(kNegativeRows.data(), {1});
       a.outputs.row_weights = a.output({2, 4, 1, 5});
     },
     {"outputs.weight_rows", "got -1 at index 0"}},
    {"rows of 32 bits",
     [](auto& a) { a.outputs.weight_rows = with_dtype(a.outputs.weight_rows, DType::i32); },
     {"outputs.weight_rows", "i64", "i32"}},
    {"rows in two axes",
     [](auto& a) {
       a.outputs.weight_rows = ConstTensor(kWeightRows.data(), {1, 2});
     },
     {"outputs.weight_rows", "[1, 2]"}},
    {"rows without data",
     [](auto& a) { a.outputs.weight_rows = without_data(a.outputs.weight_rows); },
     {"outputs.weight_rows"}},
    {"more row weights than rows",
     [](auto& a) {
       a.outputs.row_weights = a.output({2, 4, 3, 5});
     },
     {"outputs.row_weights", "[2, 4, 2, 5]", "[2, 4, 3, 5]"}},
    {"top weights alone", [](auto& a) { a.outputs.top_keys = {}; }, {"outputs.top_keys"}},
    {"top keys alone", [](auto& a) { a.outputs.top_weights = {}; }, {"outputs.top_weights"}},
    {"top weights without k",
     [](auto& a) {
       a.outputs.top_weights = a.output({2, 4, 3});
     },
     {"outputs.top_weights", "[2, 4, 3]"}},
    {"fewer top keys than top weights",
     [](auto& a) {
       a.outputs.top_keys = with_dtype(a.output({2, 4, 3, 6}), DType::i64);
     },
     {"outputs.top_keys", "[2, 4, 3, 7]", "[2, 4, 3, 6]"}},
    {"top keys of 32 bits",
     [](auto& a) { a.outputs.top_keys = with_dtype(a.outputs.top_keys, DType::i32); },
     {"outputs.top_keys", "i64", "i32"}},
    {"column sums of queries",
     [](auto& a) {
       a.outputs.column_sums = a.output({2, 4, 3});
     },
     {"outputs.column_sums", "[2, 4, 5]", "[2, 4, 3]"}},
    {"column sums of KV heads",
     [](auto& a) {
       a.outputs.column_sums = a.output({2, 2, 5});
     },
     {"outputs.column_sums", "[2, 4, 5]", "[2, 2, 5]"}},
    {"entropy in f64",
     [](auto& a) { a.outputs.entropy = with_dtype(a.outputs.entropy, DType::f64); },
     {"outputs.entropy", "f32", "f64"}},
    {"broadcast entropy",
     [](auto& a) { a.outputs.entropy = with_stride(a.outputs.entropy, 1, 0); },
     {"outputs.entropy", "stride 0"}},
    {"weights are head-major",
     [](auto& a) {
       a.outputs.weights = a.output({8, 3, 5});
     },
     {"weights", "[8, 3, 5]"}},
    {"mask of another n_kv",
     [](auto& a) {
       a.options.mask = Mask::dense(a.input({3, 4}));
     },
     {"mask", "[3, 4]", "[2, 4, 3, 5]"}},
    {"mask as [heads, n_q, n_kv]",
     [](auto& a) {
       a.options.mask = Mask::dense(a.input({4, 3, 5}));
     },
     {"mask", "[4, 3, 5]", "[2, 4, 3, 5]"}},
    {"three lengths",
     [](auto& a) { a.options.mask = Mask::lengths(kThree); },
     {"lengths [3]", "[2, 4, 3, 5]"}},
    {"length beyond n_kv",
     [](auto& a) { a.options.mask = Mask::lengths(kTooLong); },
     {"length", "6", "[2, 4, 3, 5]"}},
    {"ids of another n_kv",
     [](auto& a) {
       a.options.mask =
           Mask::documents(ConstTensor(kIds.data(), {3}), ConstTensor(kIds.data(), {3}));
     },
     {"documents", "[3]", "[2, 4, 3, 5]"}},
    {"bias of another n_q",
     [](auto& a) {
       a.options.bias = a.input({1, 1, 2, 5});
     },
     {"bias", "[1, 1, 2, 5]", "[2, 4, 3, 5]"}},
    {"bias of one axis",
     [](auto& a) { a.options.bias = a.input({5}); },
     {"bias", "[5]", "[2, 4, 3, 5]"}},
    {"boolean bias",
     [](auto& a) {
       a.options.bias = with_dtype(a.input({3, 5}), DType::boolean);
     },
     {"bias", "bool"}},
    {"bias without data",
     [](auto& a) {
       a.options.bias = without_data(a.input({3, 5}));
     },
     {"bias", "[3, 5]"}},
    {"sinks per kv head", [](auto& a) { a.options.sinks = a.input({2}); }, {"sinks", "[2]", "[4]"}},
    {"sinks of two axes",
     [](auto& a) {
       a.options.sinks = a.input({1, 4});
     },
     {"sinks", "[1, 4]", "[4]"}},
    {"integer sinks",
     [](auto& a) { a.options.sinks = with_dtype(a.input({4}), DType::i32); },
     {"sinks", "i32"}},
    {"sinks without data",
     [](auto& a) { a.options.sinks = without_data(a.input({4})); },
     {"sinks"}},
    {"alibi slopes per kv head",
     [](auto& a) { a.options.alibi_slopes = a.input({2}); },
     {"alibi_slopes", "[2]", "[4]"}},
    {"scale is NaN", [](auto& a) { a.options.scale = kNan; }, {"scale", "nan"}},
    {"scale is infinite", [](auto& a) { a.options.scale = kInf; }, {"scale", "inf"}},
    {"softcap is negative", [](auto& a) { a.options.softcap = -1; }, {"softcap", "-1"}},
    {"softcap is NaN", [](auto& a) { a.options.softcap = kNan; }, {"softcap", "nan"}},
    {"dropout above 1", [](auto& a) { a.options.dropout = 1.5; }, {"dropout", "1.5"}},
    {"dropout is negative", [](auto& a) { a.options.dropout = -0.1; }, {"dropout", "-0.1"}},
    {"dropout is NaN", [](auto& a) { a.options.dropout = kNan; }, {"dropout", "nan"}},
    {"negative threads", [](auto& a) { a.options.num_threads = -2; }, {"num_threads", "-2"}},
};

TEST(AttentionError, EveryMalformedCall_IsRefusedAndWritesNothing) {
  for (const Case& c : kCases) {
    Arguments a;
    c.spoil(a);
    const std::vector<std::byte> before = a.memory.bits();
    std::string text;
    try {
      attention(a.q, a.k, a.v, a.outputs, a.options);
    } catch (const Error& e) {
      text = e.what();
    }
    EXPECT_EQ(text.rfind("attention: ", 0), 0u)
        << c.name << ": " << (text.empty() ? "was accepted" : text);
    for (const char* word : c.words)
      EXPECT_NE(text.find(word), std::string::npos)
          << c.name << ": \"" << text << "\" does not say " << word;
    EXPECT_TRUE(a.memory.bits() == before) << c.name << ": outputs were written";
  }
}

TEST(AttentionError, TheCallThatIsSpoiled_IsGood) {
  Arguments a;
  attention(a.q, a.k, a.v, a.outputs, a.options);
  EXPECT_EQ(element(a.outputs.out, 0), 0.25);
}

}  // namespace
}  // namespace qkv
