// SPDX-License-Identifier: Apache-2.0
// Tier: call. Arrays out: new arrays of the kind the caller gave, and the names looked up once.
#include <algorithm>
#include <new>
#include <string>

#include "bindings_array.h"
#include "bindings_names.h"

namespace qkv::python {
namespace {

Names g_names;

void set_dlpack_error(void*, const char* kind, const char* message) {
  PyErr_Format(PyExc_RuntimeError, "%s: %s", kind, message);
}

Ref shape_tuple(std::span<const int64_t> shape) {
  Ref tuple = Ref::checked(PyTuple_New(static_cast<Py_ssize_t>(shape.size())));
  for (size_t a = 0; a < shape.size(); ++a) {
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(a), PyLong_FromLongLong(shape[a]));
  }
  return tuple;
}

// A C-order NumPy array of this NumPy dtype; *view says `dtype`.
Ref numpy_array(PyObject* numpy_dtype, DType dtype, std::span<const int64_t> shape, Tensor* view) {
  const Ref dims = shape_tuple(shape);
  PyObject* arguments[] = {dims.get(), numpy_dtype};
  Ref array = Ref::checked(PyObject_Vectorcall(g_names.numpy_empty, arguments, 2, nullptr));
  Py_buffer buffer;
  const bool is_extension =
      dtype == DType::bf16 && numpy_dtype != g_names.numpy_dtypes[static_cast<size_t>(DType::u16)];
  const Ref bits(is_extension ? PyObject_CallMethod(array.get(), "view", "s", "uint16") : nullptr);
  if (is_extension && !bits) throw PythonError();
  if (PyObject_GetBuffer(is_extension ? bits.get() : array.get(), &buffer, PyBUF_WRITABLE) != 0)
    throw PythonError();
  *view = Tensor(buffer.buf, dtype, shape);
  PyBuffer_Release(&buffer);
  return array;
}

}  // namespace

const Names& names() { return g_names; }

void init_names() {
  g_names.dlpack_c_exchange_api = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
  g_names.dlpack = PyUnicode_InternFromString("__dlpack__");
  g_names.requires_grad = PyUnicode_InternFromString("requires_grad");
  g_names.is_neg = PyUnicode_InternFromString("is_neg");
  const Ref numpy = Ref::checked(PyImport_ImportModule("numpy"));
  g_names.numpy_empty = Ref::checked(PyObject_GetAttrString(numpy.get(), "empty")).release();
  for (const DTypeInfo& row : kDTypes) {
    if (row.npy.empty()) continue;
    g_names.numpy_dtypes[static_cast<size_t>(row.dtype)] =
        Ref::checked(PyObject_CallMethod(numpy.get(), "dtype", "s", std::string(row.npy).c_str()))
            .release();
  }
}

Ref make_numpy(DType dtype, std::span<const int64_t> shape, Tensor* view) {
  PyObject* numpy_dtype = g_names.numpy_dtypes[static_cast<size_t>(dtype)];
  if (!numpy_dtype) numpy_dtype = g_names.numpy_dtypes[static_cast<size_t>(DType::u16)];
  return numpy_array(numpy_dtype, dtype, shape, view);
}

Ref make_array(const ArrayKind& kind, DType dtype, std::span<const int64_t> shape, Tensor* view) {
  if (kind.library == ArrayKind::Library::exchange) {
    dlpack::Tensor prototype{};
    prototype.device = {dlpack::kCpu, 0};
    prototype.ndim = static_cast<int32_t>(shape.size());
    prototype.dtype = dlpack_type(dtype);
    prototype.shape = const_cast<int64_t*>(shape.data());
    dlpack::ManagedTensorVersioned* managed = nullptr;
    if (kind.api->allocate(&prototype, &managed, nullptr, &set_dlpack_error) != 0)
      throw PythonError();
    *view = Tensor(static_cast<char*>(managed->tensor.data) + managed->tensor.byte_offset, dtype,
                   shape);
    void* object = nullptr;
    if (kind.api->to_object(managed, &object) != 0) throw PythonError();
    return Ref(static_cast<PyObject*>(object));
  }
  if (dtype == DType::bf16 && kind.library == ArrayKind::Library::numpy) {
    const Ref like = Ref::checked(PyObject_GetAttrString(kind.like, "dtype"));
    const Ref text = Ref::checked(PyObject_Str(like.get()));
    if (PyUnicode_CompareWithASCIIString(text.get(), "bfloat16") == 0)
      return numpy_array(like.get(), dtype, shape, view);
  }
  return make_numpy(dtype, shape, view);
}

Ref finish_array(const ArrayKind& kind, Ref array) {
  if (kind.library != ArrayKind::Library::other) return array;
  // The array-API namespace of q knows from_dlpack; else the package that defines its class does.
  Ref space(PyObject_CallMethod(kind.like, "__array_namespace__", nullptr));
  if (!space) {
    PyErr_Clear();
    const Ref type_module(
        PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(kind.like)), "__module__"));
    const char* module_name = type_module ? PyUnicode_AsUTF8(type_module.get()) : nullptr;
    const std::string package = module_name ? std::string(module_name) : "";
    space = Ref(PyImport_ImportModule(package.substr(0, package.find('.')).c_str()));
  }
  Ref result(space ? PyObject_CallMethod(space.get(), "from_dlpack", "O", array.get()) : nullptr);
  if (result) return result;
  PyErr_Clear();
  return array;
}

DType dtype_from_python(PyObject* object, const char* caller) {
  const Ref named(PyObject_GetAttrString(object, "__name__"));  // numpy.float32 is a class
  PyErr_Clear();
  const Ref text = Ref::checked(PyObject_Str(named ? named.get() : object));
  std::string name = PyUnicode_AsUTF8(text.get());
  name = name.substr(name.rfind('.') + 1);  // "torch.float32"
  constexpr std::pair<const char*, DType> kLong[] = {
      {"float32", DType::f32}, {"float64", DType::f64}, {"bfloat16", DType::bf16},
      {"float16", DType::f16}, {"float", DType::f32},   {"double", DType::f64},
      {"half", DType::f16},    {"int8", DType::i8}};
  for (const auto& [known, dtype] : kLong)
    if (name == known) return dtype;
  for (const DTypeInfo& row : kDTypes)
    if (name == row.name) return row.dtype;
  throw Error(std::string(caller) + ": unknown dtype " + name +
              "; float32, float64, bfloat16, float16 and int8 are known");
}

void set_python_error() noexcept {
  try {
    throw;
  } catch (const PythonError&) {
  } catch (const std::invalid_argument& e) {
    PyErr_SetString(PyExc_ValueError, e.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
  }
}

}  // namespace qkv::python
