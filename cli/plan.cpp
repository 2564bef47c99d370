// SPDX-License-Identifier: Apache-2.0
// Tier: command line. qkv plan: what attention of some sizes costs, for MHA, GQA and MQA side by
// side.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "flags.h"
#include "mask_flag.h"
#include "output.h"
#include "qkv/qkv.h"
#include "verb.h"

namespace qkv::cli {
namespace {

struct PlanOptions {
  int64_t batch = 1, num_heads = 8, num_kv_heads = 0, n_q = 512, n_kv = 0;
  int64_t head_dim_qk = 64, head_dim_v = 0, dim_q = 0, dim_k = 0, dim_v = 0, dim_out = 0;
  int64_t num_threads = 0;
  std::string dtype = "f32", dtype_kv;
  std::vector<std::string> masks;
  bool weights = false, json = false;
};

struct Column {
  std::string kind;
  LayerConfig config;
  Plan plan;
  double kv_cache_bytes = 0;   // n_kv tokens of the whole batch
  double projection_flop = 0;  // fc_q, fc_k, fc_v and fc_o, per token
};

// The number of KV heads shown for GQA if none is asked for: the smallest divisor of num_heads that
// is at least a quarter.
int64_t usual_kv_heads(int64_t num_heads) {
  int64_t n = (num_heads + 3) / 4;
  while (num_heads % n != 0) ++n;
  return n;
}

Column make_column(const std::string& kind, int64_t num_kv_heads, const PlanOptions& o,
                   const AttentionOptions& options) {
  Column column;
  column.kind = kind;
  Problem problem;
  problem.batch = o.batch, problem.num_heads = o.num_heads, problem.num_kv_heads = num_kv_heads;
  problem.n_q = o.n_q, problem.n_kv = o.n_kv;
  problem.head_dim_qk = o.head_dim_qk, problem.head_dim_v = o.head_dim_v;
  problem.dtype = parse_float_dtype(o.dtype, "--dtype");
  problem.dtype_kv = parse_float_dtype(o.dtype_kv, "--dtype-kv");
  problem.want_weights = o.weights;
  column.plan = qkv::plan(problem, options);

  LayerConfig& c = column.config;
  c = LayerConfig::gqa(o.num_heads, num_kv_heads, o.dim_k, o.dim_v, o.head_dim_qk, o.head_dim_v,
                       o.dim_out, o.dim_q);
  c.check("plan");
  const auto d = [](int64_t n) { return static_cast<double>(n); };
  column.kv_cache_bytes = d(c.kv_bytes_per_token(problem.dtype_kv)) * d(o.batch) * d(o.n_kv);
  column.projection_flop =
      2 * (d(o.num_heads) * (d(c.dim_q) * d(c.head_dim_qk) + d(c.head_dim_v) * d(c.dim_out)) +
           d(num_kv_heads) * (d(c.dim_k) * d(c.head_dim_qk) + d(c.dim_v) * d(c.head_dim_v)));
  return column;
}

Json column_json(const Column& column, DType dtype_kv) {
  const Plan& p = column.plan;
  return {{"kind", column.kind},
          {"num_heads", column.config.num_heads},
          {"num_kv_heads", column.config.num_kv_heads},
          {"num_parameters", column.config.num_parameters()},
          {"kv_bytes_per_token", column.config.kv_bytes_per_token(dtype_kv)},
          {"kv_cache_bytes", column.kv_cache_bytes},
          {"projection_flop_per_token", column.projection_flop},
          {"flop", p.flop},
          {"bytes", p.bytes},
          {"visible_pairs", p.visible_pairs},
          {"path", p.path},
          {"reason", p.reason},
          {"isa", p.isa},
          {"tile_q", p.tile_q},
          {"tile_kv", p.tile_kv},
          {"kv_splits", p.kv_splits},
          {"work_items", p.work_items},
          {"num_threads", p.num_threads},
          {"scratch_bytes", p.scratch_bytes},
          {"expected_seconds", p.expected_seconds}};
}

void print_columns(const std::vector<Column>& columns, DType dtype_kv) {
  const auto row = [&](Table& table, const char* label, auto value) {
    std::vector<std::string> cells{label};
    for (const Column& column : columns) cells.push_back(value(column));
    table.add(cells);
  };
  std::vector<std::string> header{""};
  for (const Column& column : columns) header.push_back(column.kind);
  Table table(header);
  row(table, "num_kv_heads", [](const Column& c) { return fmt::to_string(c.config.num_kv_heads); });
  row(table, "parameters of the layer",
      [](const Column& c) { return fmt::to_string(c.config.num_parameters()); });
  row(table, "KV cache, bytes per token",
      [&](const Column& c) { return fmt::to_string(c.config.kv_bytes_per_token(dtype_kv)); });
  row(table, "KV cache, n_kv tokens, batch",
      [](const Column& c) { return bytes_text(c.kv_cache_bytes); });
  row(table, "projections, per token",
      [](const Column& c) { return flop_text(c.projection_flop); });
  row(table, "attention",
      [](const Column& c) { return flop_text(static_cast<double>(c.plan.flop)); });
  row(table, "attention reads and writes",
      [](const Column& c) { return bytes_text(static_cast<double>(c.plan.bytes)); });
  row(table, "scratch",
      [](const Column& c) { return bytes_text(static_cast<double>(c.plan.scratch_bytes)); });
  row(table, "path", [](const Column& c) { return c.plan.path; });
  row(table, "work items", [](const Column& c) { return fmt::to_string(c.plan.work_items); });
  row(table, "KV splits", [](const Column& c) { return fmt::to_string(c.plan.kv_splits); });
  row(table, "attention, expected time",
      [](const Column& c) { return seconds_text(c.plan.expected_seconds); });
  fmt::print("{}", table.text());
}

int run(PlanOptions o) {
  if (o.n_kv == 0) o.n_kv = o.n_q;
  if (o.head_dim_v == 0) o.head_dim_v = o.head_dim_qk;
  for (int64_t* dim : {&o.dim_q, &o.dim_k, &o.dim_v, &o.dim_out}) {
    if (*dim == 0 && __builtin_mul_overflow(o.num_heads, o.head_dim_qk, dim)) {
      throw Error("--num-heads times --head-dim-qk does not fit 64 bits; give smaller sizes");
    }
  }
  if (o.dtype_kv.empty()) o.dtype_kv = o.dtype;
  const DType dtype_kv = parse_float_dtype(o.dtype_kv, "--dtype-kv");
  AttentionOptions options;
  options.mask = parse_masks(o.masks);
  options.num_threads = checked_threads(o.num_threads);

  const int64_t gqa = o.num_kv_heads > 0 ? o.num_kv_heads : usual_kv_heads(o.num_heads);
  std::vector<Column> columns;
  columns.push_back(make_column("MHA", o.num_heads, o, options));
  if (gqa != o.num_heads && gqa != 1) columns.push_back(make_column("GQA", gqa, o, options));
  if (o.num_heads != 1) columns.push_back(make_column("MQA", 1, o, options));

  const Plan& p = columns.front().plan;
  if (o.json) {
    Json json;
    json["batch"] = o.batch;
    json["n_q"] = o.n_q;
    json["n_kv"] = o.n_kv;
    json["head_dim_qk"] = o.head_dim_qk;
    json["head_dim_v"] = o.head_dim_v;
    json["dtype"] = o.dtype;
    json["dtype_kv"] = o.dtype_kv;
    json["mask"] = options.mask.name();
    json["columns"] = Json::array();
    for (const Column& column : columns) json["columns"].push_back(column_json(column, dtype_kv));
    print_json(json);
    return kOk;
  }
  fmt::print(
      "batch {}, num_heads {}, n_q {}, n_kv {}, head_dim_qk {}, head_dim_v {}, {} (K and V {}), "
      "mask {}\n",
      o.batch, o.num_heads, o.n_q, o.n_kv, o.head_dim_qk, o.head_dim_v, o.dtype, o.dtype_kv,
      options.mask.name());
  fmt::print("{} thread{}, {}; visible pairs {}\n\n", p.num_threads, p.num_threads == 1 ? "" : "s",
             p.isa, p.visible_pairs);
  print_columns(columns, dtype_kv);
  fmt::print("\n");
  for (const Column& column : columns) fmt::print("{}: {}\n", column.kind, column.plan.reason);
  return kOk;
}

}  // namespace

const Verb kPlan = {
    "plan", "parameters, flop, KV cache, path and expected time of MHA, GQA and MQA side by side",
    [](CLI::App& app) -> std::function<int()> {
      const auto o = std::make_shared<PlanOptions>();
      add_size(app, "--batch", &o->batch, 1, "default 1");
      add_size(app, "--num-heads", &o->num_heads, 1, "default 8");
      add_size(app, "--num-kv-heads", &o->num_kv_heads, 1,
               "of the GQA column; default a quarter of the heads");
      add_size(app, "--n-q", &o->n_q, 1, "query tokens, default 512; 1 is a step of generation");
      add_size(app, "--n-kv", &o->n_kv, 1, "key tokens, default n_q");
      add_size(app, "--head-dim-qk", &o->head_dim_qk, 1, "default 64");
      add_size(app, "--head-dim-v", &o->head_dim_v, 1, "default head_dim_qk");
      add_size(app, "--dim-q", &o->dim_q, 1, "input width of q; default num_heads * head_dim_qk");
      add_size(app, "--dim-k", &o->dim_k, 1, "input width of k; default likewise");
      add_size(app, "--dim-v", &o->dim_v, 1, "input width of v; default likewise");
      add_size(app, "--dim-out", &o->dim_out, 1, "width of the output; default likewise");
      app.add_option("--dtype", o->dtype, "f32, f64, bf16, f16; default f32")->type_name("DTYPE");
      app.add_option("--dtype-kv", o->dtype_kv, "of K and V; default --dtype")->type_name("DTYPE");
      app.add_option("--mask", o->masks, "which keys a query sees; see below")
          ->type_name("MASK")
          ->allow_extra_args(false)
          ->take_all();
      add_size(app, "--num-threads,--threads", &o->num_threads, 1,
               "default: the cores of this process");
      app.add_flag("--weights", o->weights, "the weights [num_heads, n_q, n_kv] are wanted too");
      app.add_flag("--json", o->json, "print JSON");
      app.footer(
          "\nMHA gives every query head its own K and V, MQA one K and V to all heads, GQA one to "
          "each\n"
          "group. The flop of attention are the same; what shrinks is fc_k, fc_v and the "
          "cache.\n\n" +
          mask_help() +
          "\nExample: a step of generation, 32 heads, 8192 tokens in the cache\n"
          "  qkv plan --num-heads 32 --num-kv-heads 8 --n-q 1 --n-kv 8192 --head-dim-qk 128 "
          "--dtype-kv bf16\n");
      return [o] { return run(*o); };
    }};

}  // namespace qkv::cli
