// SPDX-License-Identifier: Apache-2.0
// Tier: call. qkv._core.Cache: a KvCache and its calls; qkv/_cache.py is its public face. And
// attention_paged.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>

#include "bindings_args.h"
#include "bindings_attention.h"
#include "bindings_names.h"
#include "bindings_outputs.h"
#include "qkv/kv_cache.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace qkv::python {
namespace {

constexpr const char* kAttend = "KVCache.attend";

// A cache, and the memory of from_buffers(). Calls run without the GIL: writers wait for readers.
struct PyCache {
  KvCache cache;
  std::unique_ptr<Array> k{}, v{};
  std::shared_mutex mutex{};

  explicit PyCache(KvCache made) : cache(std::move(made)) {}
};

PyObject* or_null(nb::handle value) { return value.is_none() ? nullptr : value.ptr(); }

KvCacheKind kind_of(const std::string& kind) {
  if (kind == "contiguous") return KvCacheKind::contiguous;
  if (kind == "ring") return KvCacheKind::ring;
  if (kind == "paged") return KvCacheKind::paged;
  throw Error("KVCache: kind must be \"contiguous\", \"ring\" or \"paged\", got \"" + kind + "\"");
}

RopeStyle style_of(const std::string& style) {
  if (style == "half_split") return RopeStyle::half_split;
  if (style == "interleaved") return RopeStyle::interleaved;
  throw Error("KVCache: style must be \"half_split\" or \"interleaved\", got \"" + style + "\"");
}

// sizes: batch, num_kv_heads, head_dim_qk, head_dim_v, capacity, page_size, window, num_sink_tokens.
// rope: None or (base, style, rot_dim).
PyCache* make_cache(const nb::tuple& sizes, nb::handle dtype, const std::string& kind,
                    nb::handle rope) {
  KvCacheConfig c;
  int64_t* const fields[] = {&c.batch,    &c.num_kv_heads, &c.head_dim_qk, &c.head_dim_v,
                             &c.capacity, &c.page_size,    &c.window,      &c.num_sink_tokens};
  for (size_t i = 0; i < std::size(fields); ++i) *fields[i] = nb::cast<int64_t>(sizes[i]);
  c.dtype = dtype_from_python(dtype.ptr(), "KVCache");
  c.kind = kind_of(kind);
  if (!rope.is_none()) {
    const auto r = nb::cast<nb::tuple>(rope);
    c.rope = RopeOptions{nb::cast<double>(r[0]), style_of(nb::cast<std::string>(r[1])),
                         nb::cast<int64_t>(r[2])};
  }
  return new PyCache(KvCache(c));
}

PyCache* from_buffers(nb::handle k, nb::handle v, const std::vector<int64_t>& lengths) {
  constexpr const char* kCaller = "KVCache.from_buffers";
  auto ak = std::make_unique<Array>(), av = std::make_unique<Array>();
  ak->open(k.ptr(), kCaller, "k_buffer", Array::Access::write);
  av->open(v.ptr(), kCaller, "v_buffer", Array::Access::write);
  ak->keep(k.ptr()), av->keep(v.ptr());
  auto* made =
      new PyCache(KvCache::from_buffers(ak->writable_view(), av->writable_view(), lengths));
  made->k = std::move(ak), made->v = std::move(av);
  return made;
}

void append(PyCache& self, nb::handle k_object, nb::handle v_object,
            const std::optional<std::vector<int64_t>>& counts, nb::handle positions,
            int num_threads) {
  constexpr const char* kCaller = "KVCache.append";
  Array k, v, p;
  k.open(k_object.ptr(), kCaller, "k");
  v.open(v_object.ptr(), kCaller, "v");
  k.make_rows_contiguous(), v.make_rows_contiguous();
  KvAppendOptions options;
  options.num_threads = num_threads;
  if (counts) options.counts = *counts;
  if (!positions.is_none()) {
    p.open(positions.ptr(), kCaller, "positions");
    options.positions = p.view();
  }
  run_released(0, nullptr, [&] {
    const std::unique_lock lock(self.mutex);
    self.cache.append(k.view(), v.view(), options);
  });
}

// wanted: (return_lse, return_weights, return_mean_weights, weight_rows, top_k, return_column_sums,
// return_entropy).
ResultArrays::Wanted wanted_of(const nb::tuple& wanted) {
  PyObject* w[7];
  for (size_t i = 0; i < std::size(w); ++i) w[i] = or_null(wanted[i]);
  return {w[0], w[1], w[2], w[3], w[4], w[5], w[6]};
}

// parents: None, or the tree's. Returns out, or a tuple of what is wanted.
nb::object attend(PyCache& self, nb::handle q_object,
                  const std::optional<std::vector<int64_t>>& parents, nb::handle mask,
                  nb::handle bias, nb::handle scale, nb::handle softcap, nb::handle sinks,
                  nb::handle alibi_slopes, const std::optional<std::vector<int64_t>>& counts,
                  nb::handle positions, const nb::tuple& wanted, nb::handle num_threads) {
  Array q, p;
  q.open(q_object.ptr(), kAttend, "q");
  q.make_rows_contiguous();
  OptionArguments::Values values{};
  values.mask = or_null(mask), values.bias = or_null(bias), values.scale = or_null(scale);
  values.softcap = or_null(softcap), values.sinks = or_null(sinks);
  values.alibi_slopes = or_null(alibi_slopes), values.num_threads = or_null(num_threads);
  OptionArguments arguments(values, kAttend);
  // None is causal by position; a mask that hides nothing is meant.
  if (values.mask && arguments.options.mask.is_full())
    arguments.options.mask = Mask::window(-1, -1);
  KvQueryOptions queries;
  if (counts) queries.counts = *counts;
  if (!positions.is_none()) {
    p.open(positions.ptr(), kAttend, "positions");
    queries.positions = p.view();
  }
  const ConstTensor& tq = q.view();
  if (tq.rank != 4)
    throw Error(std::string(kAttend) +
                ": q needs 4 axes [batch, num_heads, n_q, head_dim_qk], got " + shape_text(tq));
  const int64_t longest = [&] {
    const std::shared_lock lock(self.mutex);
    return self.cache.longest();
  }();
  const int64_t dim_v = self.cache.config().head_dim_v;
  ResultArrays results(kAttend, q.kind(), tq.dtype,
                       {tq.shape[0], tq.shape[1], tq.shape[2], longest, dim_v, longest});
  results.make_out();
  results.make(wanted_of(wanted));
  const double flop = 2 * static_cast<double>(tq.shape[0] * tq.shape[1] * tq.shape[2]) *
                      static_cast<double>(longest) * static_cast<double>(tq.shape[3] + dim_v);
  run_released(flop, &arguments.options.executor, [&] {
    const std::shared_lock lock(self.mutex);
    parents ? self.cache.attend_tree(tq, *parents, results.outputs, arguments.options, queries)
            : self.cache.attend(tq, results.outputs, arguments.options, queries);
  });
  return nb::steal(results.finish());
}

nb::dict quant_error(PyCache& self) {
  const KvQuantError e = self.cache.quant_error();
  nb::dict d;
  d["max_abs_k"] = e.max_abs_k, d["max_abs_v"] = e.max_abs_v;
  d["rms_k"] = e.rms_k, d["rms_v"] = e.rms_v;
  d["max_relative_k"] = e.max_relative_k, d["max_relative_v"] = e.max_relative_v;
  d["num_rows"] = e.num_rows;
  return d;
}

nb::object paged(nb::handle q_object, nb::handle k_pages, nb::handle v_pages, nb::handle table,
                 nb::handle lengths, nb::handle mask, nb::handle bias, nb::handle scale,
                 nb::handle softcap, nb::handle sinks, nb::handle alibi_slopes,
                 const nb::tuple& wanted, nb::handle num_threads) {
  constexpr const char* kCaller = "attention_paged";
  Array q, k, v, at, n;
  q.open(q_object.ptr(), kCaller, "q");
  k.open(k_pages.ptr(), kCaller, "k_pages");
  v.open(v_pages.ptr(), kCaller, "v_pages");
  for (Array* array : {&q, &k, &v}) array->make_rows_contiguous();
  at.open(table.ptr(), kCaller, "block_table");
  n.open(lengths.ptr(), kCaller, "lengths");
  OptionArguments::Values values{};
  values.mask = or_null(mask), values.bias = or_null(bias), values.scale = or_null(scale);
  values.softcap = or_null(softcap), values.sinks = or_null(sinks);
  values.alibi_slopes = or_null(alibi_slopes), values.num_threads = or_null(num_threads);
  OptionArguments arguments(values, kCaller);
  if (values.mask && arguments.options.mask.is_full())
    arguments.options.mask = Mask::window(-1, -1);
  const ConstTensor &tq = q.view(), &tv = v.view(), &tn = n.view();
  if (tq.rank != 4 || tv.rank != 4 || tn.rank != 1 || tn.dtype != DType::i64)
    throw Error(std::string(kCaller) + ": q and pages need 4 axes and lengths [batch], got q " +
                shape_text(tq) + ", v_pages " + shape_text(tv) + " and lengths " + shape_text(tn));
  int64_t longest = 0;
  for (int64_t b = 0; b < tn.shape[0]; ++b)
    longest = std::max(longest, static_cast<const int64_t*>(tn.data)[b * tn.stride[0]]);
  // A length that does not fit the table is refused by the call, before a result of that size is made.
  const int64_t most =
      at.view().num_elements() * std::max<int64_t>(k.view().rank == 4 ? k.view().shape[1] : 0, 1);
  const int64_t n_kv = std::min(longest, most);
  ResultArrays results(kCaller, q.kind(), tq.dtype,
                       {tq.shape[0], tq.shape[1], tq.shape[2], n_kv, tv.shape[3], n_kv});
  results.make_out();
  results.make(wanted_of(wanted));
  const double flop = 2 * static_cast<double>(tq.shape[0] * tq.shape[1] * tq.shape[2]) *
                      static_cast<double>(longest) * static_cast<double>(tq.shape[3] + tv.shape[3]);
  run_released(flop, &arguments.options.executor, [&] {
    attention_paged(tq, k.view(), tv, at.view(), tn, results.outputs, arguments.options);
  });
  return nb::steal(results.finish());
}

// Calls that change a cache wait for those that read it.
template <class F>
void change(PyCache& self, F f) {
  run_released(0, nullptr, [&] {
    const std::unique_lock lock(self.mutex);
    f(self.cache);
  });
}

}  // namespace

void bind_cache(nb::module_& module) {
  nb::class_<PyCache>(module, "Cache")
      .def(nb::new_(&make_cache), "sizes"_a, "dtype"_a, "kind"_a, "rope"_a.none())
      .def_static("from_buffers", &from_buffers, "k"_a, "v"_a, "lengths"_a,
                  nb::rv_policy::take_ownership)
      .def_static(
          "load", [](const std::string& path) { return new PyCache(KvCache::load(path)); },
          "path"_a, nb::rv_policy::take_ownership)
      .def("append", &append, "k"_a, "v"_a, "counts"_a.none(), "positions"_a.none(),
           "num_threads"_a)
      .def("attend", &attend, "q"_a, "parents"_a.none(), "mask"_a.none(), "bias"_a.none(),
           "scale"_a.none(), "softcap"_a.none(), "sinks"_a.none(), "alibi_slopes"_a.none(),
           "counts"_a.none(), "positions"_a.none(), "wanted"_a, "num_threads"_a.none())
      .def(
          "truncate",
          [](PyCache& self, int64_t n) { change(self, [&](KvCache& c) { c.truncate(n); }); }, "n"_a)
      .def(
          "keep_of_last",
          [](PyCache& self, int64_t n, const std::vector<int64_t>& places) {
            change(self, [&](KvCache& c) { c.keep_of_last(n, places); });
          },
          "n"_a, "places"_a)
      .def(
          "reserve",
          [](PyCache& self, int64_t n) { change(self, [&](KvCache& c) { c.reserve(n); }); }, "n"_a)
      .def(
          "fork",
          [](PyCache& self) {
            const std::unique_lock lock(self.mutex);
            return new PyCache(self.cache.fork());
          },
          nb::rv_policy::take_ownership)
      .def(
          "save",
          [](PyCache& self, const std::string& path) {
            run_released(0, nullptr, [&] {
              const std::shared_lock lock(self.mutex);
              self.cache.save(path);
            });
          },
          "path"_a)
      .def("lengths",
           [](PyCache& self) {
             const std::shared_lock lock(self.mutex);
             return std::vector<int64_t>(self.cache.lengths().begin(), self.cache.lengths().end());
           })
      .def("sizes",
           [](PyCache& self) {
             const KvCacheConfig& c = self.cache.config();
             return nb::make_tuple(c.batch, c.num_kv_heads, c.head_dim_qk, c.head_dim_v, c.capacity,
                                   c.page_size, c.window, c.num_sink_tokens);
           })
      .def("dtype", [](PyCache& self) { return std::string(name(self.cache.config().dtype)); })
      .def("kind",
           [](PyCache& self) {
             const KvCacheKind kind = self.cache.config().kind;
             return std::string(kind == KvCacheKind::contiguous ? "contiguous"
                                : kind == KvCacheKind::ring     ? "ring"
                                                                : "paged");
           })
      .def("bytes",
           [](PyCache& self) {
             const std::shared_lock lock(self.mutex);
             return self.cache.bytes();
           })
      .def("quant_error", &quant_error);
  module.def("attention_paged", &paged, "q"_a, "k_pages"_a, "v_pages"_a, "block_table"_a,
             "lengths"_a, "mask"_a.none(), "bias"_a.none(), "scale"_a.none(), "softcap"_a.none(),
             "sinks"_a.none(), "alibi_slopes"_a.none(), "wanted"_a, "num_threads"_a.none());
}

}  // namespace qkv::python
