// SPDX-License-Identifier: Apache-2.0
// Cases that attention code in the wild got wrong: every run of tests/data/bug_cases_dev.jsonl that a call of attention(), a
// cache, pages, rope or ALiBi slopes can express. The whole kinds of fault behind them have their own tests (attention_*_test).
#include <gtest/gtest.h>

#include <fstream>
#include <optional>

#include "qkv/attention.h"
#include "qkv/kv_cache.h"
#include "support/bounds.h"
#include "support/files.h"
#include "support/json_cases.h"

namespace qkv {
namespace {

using test::Array;
using test::array_of;
using test::array_of_list;
using test::Json;
using test::Layout;
using test::TestTensor;

DType dtype_of_name(const std::string& name) {
  for (const DTypeInfo& d : kDTypes)
    if (d.name == name) return d.dtype;
  throw Error("bug_cases: unknown element type " + name);
}

// Layouts whose last axis is contiguous; attention() refuses the others.
std::optional<Layout> layout_of_name(const std::string& name) {
  if (name == "contiguous" || name == "readonly") return Layout::contiguous;
  if (name == "bshd") return Layout::bshd;
  if (name == "fused") return Layout::fused;
  if (name == "padded") return Layout::padded;
  return std::nullopt;
}

// What one run asks attention() for, in one element type and layout.
struct BugRun {
  const Json& json;
  DType dtype;
  TestTensor q, k, v, bias, sinks;
  test::JsonMasks masks;
  AttentionOptions options;
  std::string text;

  BugRun(const std::string& id, const Json& run, DType type, Layout layout)
      : json(run), dtype(type) {
    q = array_of(run.at("q")).tensor(dtype, layout);
    k = array_of(run.at("k")).tensor(dtype, layout);
    v = array_of(run.at("v")).tensor(dtype, layout);
    if (run.contains("bias")) options.bias = bias = array_of(run.at("bias")).tensor(arithmetic());
    if (run.contains("sinks"))
      options.sinks = sinks = array_of(run.at("sinks")).tensor(arithmetic());
    if (run.contains("mask")) options.mask = masks.make(run.at("mask"));
    if (run.contains("scale")) options.scale = test::number(run.at("scale"));
    if (run.contains("softcap")) options.softcap = test::number(run.at("softcap"));
    text = id + " " + std::string(name(dtype)) + " q " + shape_text(q) + " k " + shape_text(k) +
           " mask " + options.mask.name();
  }
  DType arithmetic() const { return dtype == DType::f64 ? DType::f64 : DType::f32; }

  struct Results {
    TestTensor out, lse, weights;
  };
  Results call(const AttentionOptions& with, bool everything) const {
    const auto& n = q.view().shape;
    Results r;
    r.out = TestTensor(dtype, {n[0], n[1], n[2], v.view().shape[3]});
    if (everything) r.lse = TestTensor(arithmetic(), {n[0], n[1], n[2]});
    if (everything) r.weights = TestTensor(arithmetic(), {n[0], n[1], n[2], k.view().shape[2]});
    attention(q, k, v, {.out = r.out.view(), .lse = r.lse.view(), .weights = r.weights.view()},
              with);
    return r;
  }

  void expect_close(const std::string& name, const std::vector<double>& got,
                    const std::vector<double>& want) const {
    double absolute = dtype == DType::f64   ? 2e-11
                      : dtype == DType::f32 ? 2e-6
                      : dtype == DType::f16 ? 2e-3
                                            : 1.6e-2;
    double relative = dtype == DType::f32 ? 1e-5 : absolute;
    if (json.contains("rel") && (dtype == DType::f32 || dtype == DType::f64)) {
      absolute = relative = std::max(relative, json.at("rel").get<double>());
    }
    for (const char* key : {"tol", dtype == DType::f32 ? "tol_f32" : "tol_f16"})
      if (json.contains(key) && json.at(key).contains(name) && dtype != DType::f64)
        absolute = json.at(key).at(name).get<double>(), relative = 0;
    const Json exact = json.value("exact", Json::array());
    if (std::find(exact.begin(), exact.end(), name) != exact.end()) absolute = relative = 0;
    EXPECT_TRUE(test::within(name.c_str(), got, want, [&](size_t e) {
      return std::max(absolute, relative * std::abs(want[e]));
    })) << text;
  }

  void expect_gradients(const Results& r) const {
    const Json& expect = json.at("expect");
    const TestTensor dout = array_of(json.at("dout")).tensor(dtype);
    const auto like = [&](const TestTensor& t) {
      return TestTensor(dtype, {t.view().shape, t.view().shape + 4});
    };
    const TestTensor dq = like(q), dk = like(k), dv = like(v);
    attention_backward({.q = q, .k = k, .v = v, .out = r.out, .lse = r.lse, .dout = dout},
                       {.dq = dq.view(), .dk = dk.view(), .dv = dv.view()}, options);
    for (const auto& [name, gradient] : {std::pair("dq", &dq), {"dk", &dk}, {"dv", &dv}})
      if (expect.contains(name))
        expect_close(name, gradient->values(), array_of(expect.at(name)).values);
    if (expect.contains("dq_finite")) {
      for (double x : dq.values()) EXPECT_TRUE(std::isfinite(x)) << text;
    }
  }

  void expect() const {
    const Json& expect = json.at("expect");
    if (expect.contains("error")) {
      EXPECT_THROW(call(options, true), Error) << text;
      return;
    }
    Results r;
    try {
      r = call(options, true);
    } catch (const Error& e) {
      EXPECT_TRUE(expect.contains("or_error") || expect.contains("error_or_nan"))
          << text << ": " << e.what();
      return;
    }
    EXPECT_EQ(call(options, false).out.bits(), r.out.bits())
        << "out changes when lse and weights are asked for: " << text;
    if (expect.contains("out"))
      expect_close("out", r.out.values(), array_of(expect.at("out")).values);
    if (expect.contains("lse"))
      expect_close("lse", r.lse.values(), array_of(expect.at("lse")).values);
    if (expect.contains("weights"))
      expect_close("weights", r.weights.values(), array_of(expect.at("weights")).values);
    for (const Json& row : expect.value("rows", Json::array())) {
      std::vector<double> got;
      for (int64_t d = 0; d < v.view().shape[3]; ++d)
        got.push_back(
            r.out.get(row[0].get<int64_t>(), row[1].get<int64_t>(), row[2].get<int64_t>(), d));
      expect_close("out", got, array_of(row[3]).values);
    }
    if (expect.contains("finite")) {
      for (double x : r.out.values()) EXPECT_TRUE(std::isfinite(x)) << text;
    }
    if (json.contains("dout")) expect_gradients(r);
    if (json.contains("same_bits_without_mask")) {
      AttentionOptions without = options;
      without.mask = {};
      EXPECT_EQ(call(without, true).out.bits(), r.out.bits()) << text;
    }
    for (const Json& num_threads : json.value("threads", Json::array())) {
      AttentionOptions threaded = options;
      threaded.num_threads = num_threads.get<int>();
      for (int repeat = 0; repeat < json.value("repeats", 1); ++repeat)
        EXPECT_EQ(call(threaded, true).out.bits(), r.out.bits())
            << text << ", threads " << num_threads;
    }
  }
};

// The last axis of the inputs is not contiguous: a clear error.
void expect_refused(const std::string& id, const Json& json) {
  const BugRun run(id, json, DType::f32, Layout::contiguous);
  ConstTensor q = run.q;
  q.stride[3] = q.shape[2], q.stride[2] = 1;  // [batch, heads, dim, tokens]
  const auto& n = run.q.view().shape;
  TestTensor out(DType::f32, {n[0], n[1], n[2], run.v.view().shape[3]});
  EXPECT_THROW(attention(q, run.k, run.v, {.out = out.view()}, run.options), Error) << run.text;
}

TEST(BugCases, EveryAttentionRun) {
  std::ifstream file(test::data_path("bug_cases_dev.jsonl"));
  int num_runs = 0;
  for (std::string line; std::getline(file, line);) {
    const Json bug = Json::parse(line);
    const std::string id = bug.at("id").get<std::string>();
    for (const Json& run : bug.at("runs")) {
      if (run.at("op") != "attention") continue;
      ++num_runs;
      for (const Json& type : run.value("dtypes", Json{"f32", "f64"}))
        for (const Json& layout_name : run.value("layouts", Json{"contiguous"})) {
          const auto layout = layout_of_name(layout_name.get<std::string>());
          const DType dtype = dtype_of_name(type.get<std::string>());
          if (layout) {
            BugRun(id, run, dtype, *layout).expect();
          } else {
            expect_refused(id, run);
          }
        }
    }
  }
  EXPECT_EQ(num_runs, 151);
}

// Calls f(id, run) for every run of an op; returns how many there were.
template <class F>
int for_each_run(const std::string& op, F f) {
  std::ifstream file(test::data_path("bug_cases_dev.jsonl"));
  int num_runs = 0;
  for (std::string line; std::getline(file, line);) {
    const Json bug = Json::parse(line);
    for (const Json& run : bug.at("runs")) {
      if (run.at("op") != op) continue;
      SCOPED_TRACE(bug.at("id").get<std::string>());
      f(run);
      ++num_runs;
    }
  }
  return num_runs;
}

void expect_numbers(const std::string& name, const TestTensor& got, const Json& want,
                    const Json& run) {
  const double relative = run.value("rel", 1e-5);
  EXPECT_TRUE(test::within(name.c_str(), got.values(), array_of(want).values,
                           [&](size_t) { return std::max(2e-6, relative); }));
}

TEST(BugCases, EveryCacheRun) {
  const int num_runs = for_each_run("cache", [](const Json& run) {
    const Json& c = run.at("config");
    KvCacheConfig config;
    config.batch = c.at("batch"), config.num_kv_heads = c.at("num_kv_heads");
    config.head_dim_qk = c.at("d_qk"), config.head_dim_v = c.at("d_v");
    config.capacity = c.at("capacity"), config.page_size = c.value("page_size", int64_t{64});
    config.window = c.contains("window") && !c["window"].is_null() ? c["window"].get<int64_t>() : 0;
    const std::string kind = c.value("kind", "contiguous");
    config.kind = kind == "ring"    ? KvCacheKind::ring
                  : kind == "paged" ? KvCacheKind::paged
                                    : KvCacheKind::contiguous;
    KvCache cache(config);
    for (const Json& step : run.at("steps")) {
      if (step.contains("append")) {
        const TestTensor k = array_of(step["append"]["k"]).tensor(DType::f32),
                         v = array_of(step["append"]["v"]).tensor(DType::f32);
        if (step.value("expect", Json::object()).contains("error")) {
          const int64_t before = cache.longest();
          EXPECT_THROW(cache.append(k, v), Error);
          EXPECT_EQ(cache.longest(), before);
        } else {
          cache.append(k, v);
        }
      } else if (step.contains("attend")) {
        const Json& a = step["attend"];
        const TestTensor q = array_of(a.at("q")).tensor(DType::f32);
        const int64_t* n = q.view().shape;
        TestTensor out(DType::f32, {n[0], n[1], n[2], config.head_dim_v});
        TestTensor lse(DType::f32, {n[0], n[1], n[2]});
        AttentionOptions options;
        test::JsonMasks masks;
        if (a.contains("mask") && !a["mask"].is_null()) options.mask = masks.make(a["mask"]);
        cache.attend(q, {.out = out.view(), .lse = lse.view()}, options);
        if (a.at("expect").contains("out")) expect_numbers("out", out, a["expect"]["out"], run);
        if (a.at("expect").contains("lse")) expect_numbers("lse", lse, a["expect"]["lse"], run);
      } else if (step.contains("truncate")) {
        cache.truncate(step["truncate"].get<int64_t>());
      } else {
        EXPECT_EQ(cache.longest(), step.at("length").get<int64_t>());
      }
    }
  });
  EXPECT_GT(num_runs, 0);
}

TEST(BugCases, EveryPagedRun) {
  const int num_runs = for_each_run("paged", [](const Json& run) {
    const int64_t size = run.at("block_size");
    const auto rows = run.at("table").get<std::vector<std::vector<int64_t>>>();
    const auto lengths = run.at("lengths").get<std::vector<int64_t>>();
    int64_t num_pages = 0;
    for (const Json& f : run.at("fill")) num_pages = std::max(num_pages, f[0].get<int64_t>() + 1);
    TestTensor v(DType::f32, {num_pages, size, 1, 1}), zeros(DType::f32, {num_pages, size, 1, 1});
    v.fill(0), zeros.fill(0);
    for (const Json& f : run["fill"])
      for (int64_t slot = 0; slot < size; ++slot)
        v.set(f[0], slot, 0, 0,
              test::number(f[2]) + (f[1] == "ramp" ? static_cast<double>(slot) : 0.0));
    std::vector<int64_t> table;
    for (size_t b = 0; b < rows.size(); ++b) {
      table.insert(table.end(), rows[b].begin(), rows[b].end());
      for (auto slot = static_cast<size_t>(lengths[b]);
           run.contains("poison_behind") && slot < rows[b].size() * static_cast<size_t>(size);
           ++slot)
        v.set(rows[b][slot / static_cast<size_t>(size)], static_cast<int64_t>(slot) % size, 0, 0,
              test::number(run["poison_behind"]));
    }
    const auto batch = static_cast<int64_t>(lengths.size());
    TestTensor q(DType::f32, {batch, 1, 1, 1}), out(DType::f32, {batch, 1, 1, 1});
    q.fill(run.contains("q") ? test::number(run["q"]) : 0.0);
    AttentionOptions options;
    if (run.contains("scale")) options.scale = test::number(run["scale"]);
    attention_paged(q, run.value("k_is_v", false) ? v : zeros, v,
                    ConstTensor(table.data(), {batch, static_cast<int64_t>(rows[0].size())}),
                    ConstTensor(lengths.data(), {batch}), {.out = out.view()}, options);
    expect_numbers("out", out, run.at("expect").at("out"), run);
  });
  EXPECT_GT(num_runs, 0);
}

TEST(BugCases, EveryRopeAndAlibiRun) {
  int num_runs = for_each_run("alibi_slopes", [](const Json& run) {
    std::vector<float> got = alibi_slopes(run.at("n"));
    EXPECT_EQ(static_cast<int64_t>(got.size()), run["n"].get<int64_t>());
    const std::vector<double> want =
        array_of_list(run.at(run.contains("expect") ? "expect" : "expect_first")).values;
    got.resize(std::min(got.size(), want.size()));
    EXPECT_TRUE(test::within("slopes", {got.begin(), got.end()}, want,
                             [&](size_t e) { return 1e-6 * want[e]; }));
  });
  num_runs += for_each_run("rope", [](const Json& run) {
    const std::vector<double> given = array_of_list(run.at("x")).values;
    std::vector<double> x = given;
    if (run.contains("permute"))
      for (size_t i = 0; i < x.size(); ++i) x[i] = given[run["permute"][i].get<size_t>()];
    const auto dim = static_cast<int64_t>(x.size());
    const TestTensor from(DType::f32, {1, 1, 1, dim}, x);
    TestTensor to(DType::f32, {1, 1, 1, dim});
    RopeOptions options;
    options.base = run.value("base", 10000.0);
    options.style =
        run.at("style") == "interleaved" ? RopeStyle::interleaved : RopeStyle::half_split;
    options.rot_dim = run.value("rot_dim", int64_t{-1});
    const int64_t position = run.at("position");
    rope(from, ConstTensor(&position, {1}), to.view(), options);
    const std::vector<double> want = array_of_list(run.at("expect")).values;
    EXPECT_TRUE(test::within("rope", to.values(), want,
                             [&](size_t e) { return 1e-5 * std::abs(want[e]); }));
  });
  EXPECT_GT(num_runs, 0);
}

}  // namespace
}  // namespace qkv
