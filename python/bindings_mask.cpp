// SPDX-License-Identifier: Apache-2.0
// Tier: call. qkv.Mask: which keys a query may see.
#include "bindings_mask.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>

#include "bindings_attention.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace qkv::python {
namespace {

// Lists become arrays, so that lengths and ids may be written out.
nb::object to_array(nb::handle object) {
  if (PyObject_CheckBuffer(object.ptr()) || nb::hasattr(object, "__dlpack__"))
    return nb::borrow(object);
  const nb::object array = nb::module_::import_("numpy").attr("asarray")(object);
  return nb::len(array) == 0 ? array.attr("astype")("int64") : array;
}

std::vector<int64_t> integers(nb::handle object, const char* what) {
  const nb::object array_object = to_array(object);
  Array array;
  array.open(array_object.ptr(), "Mask", what);
  const ConstTensor& t = array.view();
  if (t.rank != 1 || info(t.dtype).is_float || t.dtype == DType::boolean) {
    throw Error(std::string("Mask: ") + what + " must be integers, one per batch entry, got " +
                std::string(name(t.dtype)) + " " + shape_text(t));
  }
  std::vector<int64_t> values(static_cast<size_t>(t.shape[0]));
  for (int64_t i = 0; i < t.shape[0]; ++i) {
    const char* p = static_cast<const char*>(t.data) + i * t.stride[0] * size_bytes(t.dtype);
    const auto read = [p]<class T>(T value) {
      std::memcpy(&value, p, sizeof value);
      return static_cast<int64_t>(value);
    };
    int64_t& value = values[static_cast<size_t>(i)];
    switch (t.dtype) {
      case DType::i8:
        value = read(int8_t{});
        break;
      case DType::u8:
        value = read(uint8_t{});
        break;
      case DType::i16:
        value = read(int16_t{});
        break;
      case DType::u16:
        value = read(uint16_t{});
        break;
      case DType::i32:
        value = read(int32_t{});
        break;
      case DType::u32:
        value = read(uint32_t{});
        break;
      default:
        value = read(int64_t{});
    }
  }
  return values;
}

Alignment alignment_from(const std::string& text) {
  if (text == "bottom_right") return Alignment::bottom_right;
  if (text == "top_left") return Alignment::top_left;
  throw Error("Mask: alignment must be \"bottom_right\" or \"top_left\", got \"" + text + "\"");
}

PyMask dense(nb::handle object) {
  auto array = std::make_shared<Array>();
  array->open(object.ptr(), "Mask", "array");
  if (!*array) throw Error("Mask: dense needs an array, got None");
  array->keep(object.ptr());
  array->raise_rank(2);
  PyMask result{Mask::dense(array->view()), {array}};
  const ConstTensor& t = array->view();
  if (t.rank >= 3) result.batch = t.shape[0];
  if (t.rank == 4) result.num_heads = t.shape[1];
  return result;
}

PyMask to_mask(nb::handle object) {
  if (const PyMask* mask = as_mask(object.ptr())) return *mask;
  return dense(object);
}

PyMask intersect(const PyMask& a, const PyMask& b) {
  PyMask result{a.mask & b.mask, a.arrays, std::max(a.batch, b.batch),
                std::max(a.num_heads, b.num_heads)};
  result.arrays.insert(result.arrays.end(), b.arrays.begin(), b.arrays.end());
  return result;
}

MaskShape shape_of(const PyMask& m, int64_t n_q, int64_t n_kv, std::optional<int64_t> batch,
                   std::optional<int64_t> num_heads) {
  const MaskShape shape{batch.value_or(m.batch), num_heads.value_or(m.num_heads), n_q, n_kv};
  m.mask.check(shape, "Mask");
  return shape;
}

nb::object to_dense(const PyMask& m, int64_t n_q, int64_t n_kv, std::optional<int64_t> batch,
                    std::optional<int64_t> num_heads) {
  const MaskShape shape = shape_of(m, n_q, n_kv, batch, num_heads);
  const bool is_flat = !batch && !num_heads && shape.batch == 1 && shape.num_heads == 1;
  const int64_t extents[] = {shape.batch, shape.num_heads, n_q, n_kv};
  Tensor view;
  Ref array =
      make_numpy(DType::boolean, std::span<const int64_t>(extents).subspan(is_flat ? 2 : 0), &view);
  auto* to = static_cast<uint8_t*>(view.data);
  for (int64_t b = 0; b < shape.batch; ++b)
    for (int64_t h = 0; h < shape.num_heads; ++h)
      to = std::ranges::copy(m.mask.to_dense(shape, b, h), to).out;
  return nb::steal(array.release());
}

}  // namespace

const PyMask* as_mask(PyObject* object) {
  static const nb::handle type = nb::type<PyMask>();
  if (!PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(type.ptr()))) return nullptr;
  return nb::inst_ptr<PyMask>(object);
}

void open_mask_array(Array* array, PyObject* object, const char* caller) {
  array->open(object, caller, "mask");
  if (array->view().dtype != DType::boolean) {
    throw Error(std::string(caller) + ": mask must be boolean (True = attend) or a qkv.Mask; an " +
                "additive array goes into bias, got " + std::string(name(array->view().dtype)) +
                " " + shape_text(array->view()));
  }
  array->raise_rank(2);
}

void bind_mask(nb::module_& module) {
  nb::class_<PyMask>(
      module, "Mask",
      R"doc(Which keys a query may see. An immutable value; masks combine with &, with boolean arrays too.

p is the position of query i: p = i under "top_left", p = i + n_kv - n_q under "bottom_right".

  kind                   key j is visible to query i if      n_q 4, n_kv 6 (x = visible)
  full()                 always
  causal_top_left()      j <= i                              x.....  xx....  xxx...  xxxx..
  causal_bottom_right()  j <= p, p = i + n_kv - n_q          xxx...  xxxx..  xxxxx.  xxxxxx
  window(1, 0)           p - left <= j <= p + right          .xx...  ..xx..  ...xx.  ....xx
  prefix(4)              j < n or j <= p                     xxxx..  xxxx..  xxxxx.  xxxxxx
  chunk(3)               j // size == p // size              xxx...  ...xxx  ...xxx  ...xxx
  lengths(kv_lengths)    j < kv_lengths[b]
  documents(q_ids, kv_ids)  q_ids[i] == kv_ids[j]
  dense(array)           array[b, h, i, j] is True, or an additive array: -inf hides

lengths alone hide padding. lengths together with causal_bottom_right: each batch entry is a sequence of its
own length, p = i + kv_lengths[b] - n_q for every bottom_right kind of the mask; queries with p < 0 see nothing.

>>> qkv.Mask.window(1, 0).to_dense(2, 4).tolist()
[[False, True, True, False], [False, False, True, True]])doc")
      .def_static(
          "full", [] { return PyMask{}; }, "Every key is visible.")
      .def_static(
          "causal_top_left",
          [] {
            return PyMask{Mask::causal_top_left(), {}};
          },
          "Key j is visible if j <= i. torch's is_causal is this one.")
      .def_static(
          "causal_bottom_right",
          [] {
            return PyMask{Mask::causal_bottom_right(), {}};
          },
          "Key j is visible if j <= p, p = i + n_kv - n_q: the last query sees every key. "
          "The one for a KV cache.")
      .def_static(
          "window",
          [](std::optional<int64_t> left, std::optional<int64_t> right,
             const std::string& alignment) {
            return PyMask{
                Mask::window(left.value_or(-1), right.value_or(-1), alignment_from(alignment)), {}};
          },
          "left"_a.none(), "right"_a.none(), "alignment"_a = "bottom_right",
          "p - left <= j <= p + right, both ends included; None = unbounded on that side.")
      .def_static(
          "prefix",
          [](int64_t n) {
            return PyMask{Mask::prefix(n), {}};
          },
          "n"_a, "j < n or j <= p: bidirectional inside the first n keys, causal behind.")
      .def_static(
          "chunk",
          [](int64_t size) {
            return PyMask{Mask::chunk(size), {}};
          },
          "size"_a, "Keys of the query's own chunk of `size` positions; not causal by itself.")
      .def_static(
          "lengths",
          [](nb::handle kv_lengths) {
            const std::vector<int64_t> values = integers(kv_lengths, "kv_lengths");
            return PyMask{Mask::lengths(values), {}, static_cast<int64_t>(values.size())};
          },
          "kv_lengths"_a,
          "j < kv_lengths[b]: one length per batch entry, 0 <= length <= n_kv. Copied.")
      .def_static(
          "documents",
          [](nb::handle q_ids, nb::handle kv_ids) {
            const nb::object q_object = to_array(q_ids), kv_object = to_array(kv_ids);
            Array q, kv;
            q.open(q_object.ptr(), "Mask", "q_ids");
            kv.open(kv_object.ptr(), "Mask", "kv_ids");
            PyMask result{Mask::documents(q.view(), kv.view()), {}};
            for (const ConstTensor* t : {&q.view(), &kv.view()})
              if (t->rank == 2) result.batch = std::max(result.batch, t->shape[0]);
            return result;
          },
          "q_ids"_a, "kv_ids"_a,
          "q_ids[i] == kv_ids[j]; ids are [n] or [batch, n] integers. Copied.")
      .def_static(
          "dense", &dense, "array"_a,
          "A boolean array (True = attend) or an additive one (-inf hides, other values are "
          "a bias), broadcast to\n[batch, num_heads, n_q, n_kv]; 3 axes are [batch, n_q, "
          "n_kv]. Not copied: later writes to the array show.")
      .def(
          "__and__", [](const PyMask& a, nb::handle b) { return intersect(a, to_mask(b)); },
          "other"_a)
      .def(
          "__rand__", [](const PyMask& a, nb::handle b) { return intersect(to_mask(b), a); },
          "other"_a)
      .def("to_dense", &to_dense, "n_q"_a, "n_kv"_a, nb::kw_only(), "batch"_a = nb::none(),
           "num_heads"_a = nb::none(),
           "The boolean array [n_q, n_kv]; [batch, num_heads, n_q, n_kv] if the mask differs by "
           "batch entry or head\nor if one of both is given.")
      .def(
          "to_text",
          [](const PyMask& m, int64_t n_q, int64_t n_kv, int64_t b, int64_t h) {
            return m.mask.to_text(shape_of(m, n_q, n_kv, {}, {}), b, h);
          },
          "n_q"_a, "n_kv"_a, nb::kw_only(), "b"_a = 0, "h"_a = 0,
          "A picture, one line per query: x = visible, . = hidden.")
      .def(
          "to_svg",
          [](const PyMask& m, int64_t n_q, int64_t n_kv, int64_t b, int64_t h) {
            return m.mask.to_svg(shape_of(m, n_q, n_kv, {}, {}), b, h);
          },
          "n_q"_a, "n_kv"_a, nb::kw_only(), "b"_a = 0, "h"_a = 0, "The picture as SVG text.")
      .def(
          "count_visible",
          [](const PyMask& m, int64_t n_q, int64_t n_kv, std::optional<int64_t> batch,
             std::optional<int64_t> num_heads) {
            return m.mask.count_visible(shape_of(m, n_q, n_kv, batch, num_heads));
          },
          "n_q"_a, "n_kv"_a, nb::kw_only(), "batch"_a = nb::none(), "num_heads"_a = nb::none(),
          "Visible (query, key) pairs, summed over batch and heads.")
      .def_prop_ro(
          "is_full", [](const PyMask& m) { return m.mask.is_full(); },
          "True if the mask hides nothing.")
      .def("__repr__", [](const PyMask& m) { return "Mask(" + m.mask.name() + ")"; });
  // NumPy arrays on the left of & leave the operator to Mask.
  module.attr("Mask").attr("__array_ufunc__") = nb::none();
}

}  // namespace qkv::python
