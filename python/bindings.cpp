// SPDX-License-Identifier: Apache-2.0
// Tier: call. The extension module qkv._core: masks, plans, the machine; each other family has its
// own bindings_*.cpp.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings_args.h"
#include "bindings_attention.h"
#include "bindings_mask.h"
#include "bindings_names.h"
#include "qkv/qkv.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace qkv::python {
namespace {

PyObject* or_null(nb::handle value) { return value.is_none() ? nullptr : value.ptr(); }

nb::dict plan_dict(int64_t batch, int64_t num_heads, int64_t num_kv_heads, int64_t n_q,
                   int64_t n_kv, int64_t head_dim_qk, int64_t head_dim_v, nb::handle dtype,
                   nb::handle dtype_kv, bool return_weights, bool return_mean_weights,
                   bool return_row_weights, bool return_column_sums, nb::handle mask,
                   nb::handle num_threads) {
  Problem problem;
  problem.batch = batch, problem.num_heads = num_heads, problem.num_kv_heads = num_kv_heads;
  problem.n_q = n_q, problem.n_kv = n_kv;
  problem.head_dim_qk = head_dim_qk, problem.head_dim_v = head_dim_v;
  problem.dtype = dtype_from_python(dtype.ptr(), "plan");
  problem.dtype_kv = dtype_from_python(dtype_kv.ptr(), "plan");
  problem.want_weights = return_weights, problem.want_mean_weights = return_mean_weights;
  problem.want_row_weights = return_row_weights, problem.want_column_sums = return_column_sums;
  OptionArguments::Values values{};
  values.mask = or_null(mask), values.num_threads = or_null(num_threads);
  const OptionArguments arguments(values, "plan");
  const Plan p = plan(problem, arguments.options);
  nb::dict d;
  d["path"] = p.path, d["reason"] = p.reason, d["isa"] = p.isa;
  d["tile_q"] = p.tile_q, d["tile_kv"] = p.tile_kv, d["kv_splits"] = p.kv_splits;
  d["work_items"] = p.work_items, d["num_threads"] = p.num_threads;
  d["visible_pairs"] = p.visible_pairs, d["flop"] = p.flop, d["bytes"] = p.bytes;
  d["scratch_bytes"] = p.scratch_bytes, d["expected_seconds"] = p.expected_seconds;
  return d;
}

nb::dict info_dict() {
  const Info i = info();
  nb::dict d;
  d["version"] = i.version, d["isa"] = i.isa, d["isa_target"] = i.isa_target;
  d["isa_reason"] = i.isa_reason, d["isa_available"] = i.isa_available, d["cpu"] = i.cpu;
  d["num_threads"] = i.num_threads, d["l1d_bytes"] = i.l1d_bytes, d["l2_bytes"] = i.l2_bytes;
  d["l3_bytes"] = i.l3_bytes, d["compiler"] = i.compiler;
  return d;
}

}  // namespace
}  // namespace qkv::python

NB_MODULE(_core, m) {
  using namespace qkv::python;
  // Errors that already sit in the interpreter pass through unchanged.
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const PythonError&) {
    }
  });
  nb::set_leak_warnings(false);  // objects that live until the interpreter ends are no leak
  init_names();
  m.attr("__version__") = QKV_VERSION;
  bind_mask(m);
  bind_attention(m);
  bind_backward(m);
  bind_cache(m);
  bind_variants(m);
  bind_files(m);
  bind_layer(m);
  bind_torch(m);
  m.def("plan", &plan_dict, "batch"_a, "num_heads"_a, "num_kv_heads"_a, "n_q"_a, "n_kv"_a,
        "head_dim_qk"_a, "head_dim_v"_a, "dtype"_a, "dtype_kv"_a, "return_weights"_a,
        "return_mean_weights"_a, "return_row_weights"_a, "return_column_sums"_a, "mask"_a.none(),
        "num_threads"_a.none());
  m.def("info", &info_dict);
  m.def(
      "set_isa", [](const std::string& isa) { qkv::set_isa(isa); }, "isa"_a);
  m.def("set_repeats", &set_repeats, "n"_a);
  m.def("set_num_threads", &qkv::set_num_threads, "n"_a);
}
