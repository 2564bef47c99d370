// SPDX-License-Identifier: Apache-2.0
// Tier: command line. qkv bench: the roofs of this machine and our fraction of them.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <memory>
#include <regex>
#include <set>

#include "flags.h"
#include "output.h"
#include "qkv/error.h"
#include "qkv/runtime.h"
#include "rows.h"
#include "verb.h"

namespace qkv::cli {
namespace {

using bench::Row;

struct BenchOptions {
  std::string filter, seconds = "30";
  int64_t num_threads = 0;
  bool list = false, json = false;
};

constexpr int64_t kLeastSamples = 3;

// A roof of the machine with one thread or with all.
struct Roof {
  const char* kind;  // "fma", "read"
  int num_threads;
  bench::Rates rates;

  void sample() {
    rates.add(kind == std::string("fma") ? bench::fma_peak_gflops(num_threads)
                                         : bench::read_gbps(bench::memory_bytes(), num_threads));
  }
};

std::vector<Roof> roofs_of(int num_threads) {
  std::vector<Roof> roofs;
  for (const char* kind : {"fma", "read"}) {
    roofs.push_back({kind, 1, {}});
    if (num_threads > 1) roofs.push_back({kind, num_threads, {}});
  }
  return roofs;
}

const char* unit_of(bool is_compute) { return is_compute ? "GFLOP/s" : "GB/s"; }

struct Measured {
  std::string name;
  bench::Run run;
  bench::Result result;
};

std::vector<Row> chosen_rows(const std::string& filter) {
  std::vector<Row> rows = bench::all_rows();
  std::function<bool(const std::string&)> is_chosen;
  if (filter.empty()) {
    is_chosen = [names =
                     std::set<std::string>(std::begin(bench::kSummary), std::end(bench::kSummary))](
                    const std::string& name) { return names.count(name) > 0; };
  } else {
    try {
      is_chosen = [pattern = std::regex(filter)](const std::string& name) {
        return std::regex_search(name, pattern);
      };
    } catch (const std::regex_error& e) {
      throw Error(fmt::format("--filter: '{}' is no regular expression: {}", filter, e.what()));
    }
  }
  std::erase_if(rows, [&](const Row& row) { return !is_chosen(row.name); });
  if (rows.empty()) {
    throw Error(
        fmt::format("--filter: no row matches '{}'; 'qkv bench --list' prints all", filter));
  }
  return rows;
}

double parse_seconds(const std::string& text) {
  size_t end = 0;
  double seconds = 0;
  try {
    seconds = std::stod(text, &end);
  } catch (const std::exception&) {
    end = 0;
  }
  if (end == 0 || end != text.size() || !(seconds > 0) || !std::isfinite(seconds))
    throw Error(fmt::format("--seconds: '{}' is not a number > 0, such as 30", text));
  return seconds;
}

Measured measure(const Row& row, int num_threads, double seconds) {
  const double end = bench::wall_seconds() + seconds;
  Measured m{row.name, row.prepare(num_threads), {}};
  if (!m.run.is_correct()) return m;
  bench::Sampler sampler(m.run);
  for (int64_t n = 0; n < bench::kSamples; ++n) {
    if (n >= kLeastSamples && bench::wall_seconds() >= end) break;
    sampler.sample();
  }
  m.result = sampler.result();
  m.run.call = {};  // frees the inputs
  return m;
}

Json json_of(const Measured& m) {
  Json row = {{"name", m.name},
              {"num_threads", m.run.work.num_threads},
              {"is_correct", m.run.is_correct()},
              {"error", json_number(m.run.error)}};
  if (!m.run.is_correct()) return row;
  row["roof_kind"] = m.run.work.is_compute() ? "fma" : "read";
  row["unit"] = unit_of(m.run.work.is_compute());
  row["rate"] = m.result.rate, row["roof"] = m.result.roof;
  row["best"] = m.result.best, row["median"] = m.result.median;
  row["reach"] = m.run.work.reach;
  row["best_us"] = m.result.best_us, row["median_us"] = m.result.median_us;
  row["num_samples"] = m.result.samples;
  return row;
}

void print_line(const std::string& name, size_t width, const std::vector<std::string>& cells) {
  std::string line = fmt::format("{:<{}}", name, width);
  for (const std::string& cell : cells) line += fmt::format("  {:>8}", cell);
  line.erase(line.find_last_not_of(' ') + 1);
  fmt::print("{}\n", line);
}

void print_row(const Measured& m, size_t width) {
  const bench::Work& work = m.run.work;
  if (!m.run.is_correct()) {
    fmt::print("{:<{}}  wrong result: off by {:.3g}, allowed {:.3g}\n", m.name, width, m.run.error,
               m.run.bound);
    return;
  }
  print_line(m.name, width,
             {fmt::to_string(work.num_threads), seconds_text(m.result.best_us * 1e-6),
              fmt::format("{:.1f}", m.result.rate), fmt::format("{:.1f}", m.result.roof),
              unit_of(work.is_compute()), fmt::format("{:.3f}", m.result.best),
              fmt::format("{:.3f}", m.result.median),
              work.reach > 0 ? fmt::format("{:.2f}", work.reach) : ""});
  std::fflush(stdout);
}

void print_roofs(const std::vector<Roof>& roofs) {
  fmt::print("\nRoofs, measured between the rows (best, median):\n");
  for (const Roof& r : roofs) {
    const bool is_compute = r.kind == std::string("fma");
    fmt::print("  {:<26} {} thread{:<2}  {:>7.1f}  {:>7.1f}  {}\n",
               is_compute ? "f32 fused multiply-add"
                          : fmt::format("read {} of memory",
                                        bytes_text(static_cast<double>(bench::memory_bytes()))),
               r.num_threads, r.num_threads == 1 ? "" : "s", r.rates.best(), r.rates.median(),
               unit_of(is_compute));
  }
}

int run(const BenchOptions& o) {
  const double seconds = parse_seconds(o.seconds);
  const std::vector<Row> rows = chosen_rows(o.filter);
  if (o.list) {
    if (o.json) {
      Json names = Json::array();
      for (const Row& row : rows) names.push_back(row.name);
      print_json({{"rows", names}});
    } else {
      for (const Row& row : rows) fmt::print("{}\n", row.name);
    }
    return kOk;
  }
  const Info info = qkv::info();
  const int num_threads =
      o.num_threads > 0 ? checked_threads(o.num_threads) : default_num_threads();
  size_t width = 0;
  for (const Row& row : rows) width = std::max(width, row.name.size());
  if (!o.json) {
    fmt::print("{}, {} ({}), {}, qkv {}\n\n", info.cpu, info.isa, info.isa_target, info.compiler,
               info.version);
    print_line("", width, {"threads", "time", "rate", "roof", "", "of roof", "median", "aim"});
  }

  std::vector<Roof> roofs = roofs_of(num_threads);
  Json measured = Json::array(), left_out = Json::array();
  bool is_correct = true;
  const double end = bench::wall_seconds() + seconds;
  for (size_t i = 0; i < rows.size(); ++i) {
    const double left = end - bench::wall_seconds();
    if (i > 0 && left <= 0) {
      left_out.push_back(rows[i].name);
      continue;
    }
    for (Roof& roof : roofs) roof.sample();
    const Measured m = measure(rows[i], num_threads, left / static_cast<double>(rows.size() - i));
    is_correct &= m.run.is_correct();
    if (o.json) {
      measured.push_back(json_of(m));
    } else {
      print_row(m, width);
    }
  }
  if (o.json) {
    Json json = {{"version", info.version},       {"isa", info.isa},
                 {"isa_target", info.isa_target}, {"cpu", info.cpu},
                 {"compiler", info.compiler},     {"num_threads", num_threads}};
    for (const Roof& r : roofs) {
      json["roofs"].push_back({{"kind", r.kind},
                               {"num_threads", r.num_threads},
                               {"unit", unit_of(r.kind == std::string("fma"))},
                               {"best", r.rates.best()},
                               {"median", r.rates.median()}});
    }
    json["rows"] = measured, json["left_out"] = left_out;
    print_json(json);
  } else {
    print_roofs(roofs);
    if (!left_out.empty()) {
      fmt::print("\n{} row{} left out: the {} s are spent; give more --seconds or a --filter\n",
                 left_out.size(), left_out.size() == 1 ? "" : "s", o.seconds);
    }
  }
  return is_correct ? kOk : kCheckFailed;
}

}  // namespace

const Verb kBench = {
    "bench", "this machine's roofs (arithmetic, memory) and our fraction of them",
    [](CLI::App& app) -> std::function<int()> {
      const auto o = std::make_shared<BenchOptions>();
      app.add_option("--filter", o->filter,
                     "the rows whose name holds a match of this regular expression; '.' is all; "
                     "default: a summary")
          ->type_name("REGEX");
      app.add_flag("--list", o->list, "print the names of the rows, measure nothing");
      add_size(app, "--num-threads,--threads", &o->num_threads, 1,
               "default: the cores of this process");
      app.add_option("--seconds", o->seconds,
                     "time for all rows, default 30; each gets at least 3 samples, and rows that "
                     "find the time spent are named as left out")
          ->type_name("S");
      app.add_flag("--json", o->json, "print JSON");
      app.footer(
          "\nThe roofs are what the cores can do at most: f32 fused multiply-adds in registers, "
          "and "
          "plain reads\nof more memory than the caches hold. They are measured between the samples "
          "of "
          "each row with as many\nthreads, so that a machine whose speed swings is compared with "
          "itself. 'of roof' is the best sample\nover the best roof, 'median' the same of the "
          "medians, 'aim' what we mean to reach on one core.\nFlop count visible pairs only. Every "
          "row is compared with the reference first: a wrong result is\nexit code 1. Reading "
          "memory "
          "takes 512 MB.\n\n"
          "Example: one core, long prompts\n"
          "  qkv bench --num-threads 1 --filter 'attention/.*n2048'\n");
      return [o] { return run(*o); };
    }};

}  // namespace qkv::cli
