// SPDX-License-Identifier: Apache-2.0
// Tier: call. Arrays in. Three doors, the cheapest first: the exchange table of DLPack (torch), the
// buffer protocol (NumPy), and a DLPack capsule (everything else).
#include "bindings_array.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>

#include "bindings_names.h"

namespace qkv::python {
namespace {

std::string where(const char* caller, const char* name) {
  return std::string(caller) + ": " + name + " ";
}

// The element type of a buffer format in native byte order; false for all others.
bool dtype_of_format(const char* format, int64_t item_bytes, DType* dtype) {
  if (format && (*format == '@' || *format == '=' || *format == '<')) ++format;
  if (!format || !*format) format = "B";
  if (format[1]) return false;
  const bool is_signed = std::strchr("bhilqn", *format) != nullptr;
  if (is_signed || std::strchr("BHILQN", *format)) {
    constexpr DType kSigned[] = {DType::i8, DType::i16, DType::i32, DType::i64};
    constexpr DType kUnsigned[] = {DType::u8, DType::u16, DType::u32, DType::u64};
    const int size = item_bytes == 1 ? 0 : item_bytes == 2 ? 1 : item_bytes == 4 ? 2 : 3;
    *dtype = (is_signed ? kSigned : kUnsigned)[size];
    return true;
  }
  switch (*format) {
    case 'f':
      *dtype = DType::f32;
      return true;
    case 'd':
      *dtype = DType::f64;
      return true;
    case 'e':
      *dtype = DType::f16;
      return true;
    case '?':
      *dtype = DType::boolean;
      return true;
    default:
      return false;
  }
}

bool dtype_of_dlpack(const dlpack::Type& t, DType* dtype) {
  if (t.lanes != 1) return false;
  for (const DTypeInfo& row : kDTypes) {
    const dlpack::Type known = dlpack_type(row.dtype);
    if (known.code == t.code && known.bits == t.bits) {
      *dtype = row.dtype;
      return true;
    }
  }
  return false;
}

const dlpack::ExchangeApi* read_exchange_api(PyTypeObject* type) {
  const Ref attribute(
      PyObject_GetAttr(reinterpret_cast<PyObject*>(type), names().dlpack_c_exchange_api));
  if (!attribute || !PyCapsule_IsValid(attribute.get(), "dlpack_exchange_api")) {
    PyErr_Clear();
    return nullptr;
  }
  const auto* api = static_cast<const dlpack::ExchangeApi*>(
      PyCapsule_GetPointer(attribute.get(), "dlpack_exchange_api"));
  const bool is_known = api->version.major == 1 && api->borrow && api->allocate && api->to_object;
  return is_known ? api : nullptr;
}

// torch and others publish the table in a class attribute. The last classes asked are remembered,
// those without a table too: a failed look-up costs more than the rest of opening an array.
const dlpack::ExchangeApi* exchange_api(PyTypeObject* type) {
  struct Entry {
    PyTypeObject* type;
    const dlpack::ExchangeApi* api;
  };
  static Entry cache[4] = {};
  static unsigned next = 0;
  for (const Entry& entry : cache)
    if (entry.type == type) return entry.api;
  // Both may run Python code that comes back here: the entry is whole at any time.
  const dlpack::ExchangeApi* const api = read_exchange_api(type);
  Entry& entry = cache[next++ % 4];
  PyTypeObject* const old = std::exchange(entry.type, type);
  entry.api = api;
  Py_INCREF(type);
  Py_XDECREF(old);
  return api;
}

// Torch keeps gradients in mind, this module does not: refusing beats a silent loss.
void refuse_gradients(PyObject* object, const char* caller, const char* name) {
  const Ref wants(PyObject_GetAttr(object, names().requires_grad));
  if (!wants) {
    PyErr_Clear();
    return;
  }
  if (wants.get() != Py_True) return;
  const Ref torch = Ref::checked(PyImport_ImportModule("torch"));
  const Ref enabled = Ref::checked(PyObject_CallMethod(torch.get(), "is_grad_enabled", nullptr));
  if (enabled.get() != Py_True) return;
  throw Error(where(caller, name) +
              "requires a gradient: call qkv.torch.scaled_dot_product_attention, or detach() it");
}

// The imaginary parts of conjugate complex numbers in torch are a view whose sign is in a flag, not in
// the memory. It steps over the real parts: no stride is odd.
bool may_be_negated(const ConstTensor& t) {
  for (int a = 0; a < t.rank; ++a)
    if (t.shape[a] > 1 && t.stride[a] % 2 != 0) return false;
  return info(t.dtype).is_float;
}

}  // namespace

dlpack::Type dlpack_type(DType t) {
  const DTypeInfo& row = info(t);
  const uint8_t code = t == DType::bf16                      ? dlpack::kBfloat
                       : row.is_float                        ? dlpack::kFloat
                       : t == DType::boolean                 ? dlpack::kBool
                       : row.safetensors.substr(0, 1) == "U" ? dlpack::kUInt
                                                             : dlpack::kInt;
  return {code, static_cast<uint8_t>(8 * row.bytes), 1};
}

Tensor Array::writable_view() const {
  Tensor t;
  t.data = const_cast<void*>(view_.data);
  t.dtype = view_.dtype, t.rank = view_.rank;
  std::copy_n(view_.shape, Tensor::kMaxRank, t.shape);
  std::copy_n(view_.stride, Tensor::kMaxRank, t.stride);
  return t;
}

void Array::close() {
  if (has_buffer_) PyBuffer_Release(&buffer_);
  has_buffer_ = false;
  view_ = {};
  owner_ = Ref(), keep_ = Ref();
  copy_.reset();
}

void Array::open(PyObject* object, const char* caller, const char* name, Access access) {
  caller_ = caller, name_ = name;
  if (!object || object == Py_None) return;
  kind_.like = object;
  if (const dlpack::ExchangeApi* api = exchange_api(Py_TYPE(object))) {
    kind_.library = ArrayKind::Library::exchange, kind_.api = api;
    if (access != Access::read_detached) refuse_gradients(object, caller, name);
    open_borrowed(object, access);
    if (may_be_negated(view_)) resolve_sign(object, access);
  } else if (PyObject_CheckBuffer(object)) {
    open_buffer(object, access);
  } else if (PyObject_HasAttr(object, names().dlpack)) {
    kind_.library = ArrayKind::Library::other;
    open_capsule(object, access);
  } else {
    PyErr_Format(PyExc_TypeError,
                 "%s: %s must be an array (NumPy, torch or anything with DLPack), got %s", caller,
                 name, Py_TYPE(object)->tp_name);
    throw PythonError();
  }
}

void Array::open_borrowed(PyObject* object, Access access) {
  dlpack::Tensor t{};
  if (kind_.api->borrow(object, &t) != 0) throw PythonError();
  set_from_dlpack(t, access);
}

void Array::resolve_sign(PyObject* object, Access access) {
  const Ref is_negated(PyObject_CallMethodNoArgs(object, names().is_neg));
  PyErr_Clear();  // a library without such views
  if (is_negated.get() != Py_True) return;
  if (access == Access::write) throw Error(where(caller_, name_) + "is a negated view");
  owner_ = Ref::checked(PyObject_CallMethod(object, "resolve_neg", nullptr));
  open_borrowed(owner_.get(), access);
}

void Array::open_buffer(PyObject* object, Access access) {
  const int flags = PyBUF_STRIDES | PyBUF_FORMAT | (access == Access::write ? PyBUF_WRITABLE : 0);
  bool is_bf16 = false;
  if (PyObject_GetBuffer(object, &buffer_, flags) != 0) {
    // NumPy exports no buffer of bfloat16 (an extension type of ml_dtypes): read its bits.
    PyErr_Clear();
    const Ref dtype(PyObject_GetAttrString(object, "dtype"));
    const Ref text(dtype ? PyObject_Str(dtype.get()) : nullptr);
    is_bf16 = text && PyUnicode_CompareWithASCIIString(text.get(), "bfloat16") == 0;
    PyErr_Clear();
    if (is_bf16) owner_ = Ref::checked(PyObject_CallMethod(object, "view", "s", "uint16"));
    if (PyObject_GetBuffer(is_bf16 ? owner_.get() : object, &buffer_, flags) != 0) {
      PyErr_Clear();
      throw Error(where(caller_, name_) +
                  (access == Access::write ? "is read-only or has an unknown element type"
                                           : "has an unknown element type") +
                  (text ? std::string(", got ") + PyUnicode_AsUTF8(text.get()) : ""));
    }
  }
  has_buffer_ = true;
  DType dtype = DType::bf16;
  if (!is_bf16 && !dtype_of_format(buffer_.format, buffer_.itemsize, &dtype)) {
    throw Error(where(caller_, name_) + "has an unknown element type, got format " +
                (buffer_.format ? buffer_.format : "none"));
  }
  if (buffer_.ndim > Tensor::kMaxRank) {
    throw Error(where(caller_, name_) + "has " + std::to_string(buffer_.ndim) +
                " axes, at most 4 are known");
  }
  int64_t shape[Tensor::kMaxRank], stride[Tensor::kMaxRank], stride_bytes[Tensor::kMaxRank];
  bool is_aligned =
      reinterpret_cast<uintptr_t>(buffer_.buf) % static_cast<uintptr_t>(buffer_.itemsize) == 0;
  for (int a = 0; a < buffer_.ndim; ++a) {
    shape[a] = buffer_.shape[a];
    stride_bytes[a] = buffer_.strides[a];
    stride[a] = stride_bytes[a] / buffer_.itemsize;
    if (shape[a] > 1 && stride_bytes[a] % buffer_.itemsize != 0) is_aligned = false;
  }
  const auto rank = static_cast<size_t>(buffer_.ndim);
  view_ = ConstTensor(buffer_.buf, dtype, {shape, rank}, {stride, rank});
  if (rank == 0 && !view_.data) throw Error(where(caller_, name_) + "has no data");
  if (!is_aligned) {
    if (access == Access::write) throw Error(where(caller_, name_) + "is not aligned");
    copy_rows(stride_bytes);
  }
}

void Array::open_capsule(PyObject* object, Access access) {
  Ref capsule(PyObject_CallMethod(object, "__dlpack__", nullptr));
  if (!capsule) throw PythonError();
  if (void* p = PyCapsule_IsValid(capsule.get(), "dltensor")
                    ? PyCapsule_GetPointer(capsule.get(), "dltensor")
                    : nullptr) {
    set_from_dlpack(static_cast<dlpack::ManagedTensor*>(p)->tensor, access);
  } else if (void* q = PyCapsule_IsValid(capsule.get(), "dltensor_versioned")
                           ? PyCapsule_GetPointer(capsule.get(), "dltensor_versioned")
                           : nullptr) {
    const auto* managed = static_cast<dlpack::ManagedTensorVersioned*>(q);
    if (managed->version.major != 1) {
      throw Error(where(caller_, name_) + "speaks DLPack " +
                  std::to_string(managed->version.major) + ", version 1 is known");
    }
    if (access == Access::write && (managed->flags & dlpack::kFlagReadOnly))
      throw Error(where(caller_, name_) + "is read-only");
    set_from_dlpack(managed->tensor, access);
  } else {
    throw Error(where(caller_, name_) + "gave no DLPack tensor");
  }
  owner_ = std::move(capsule);  // still named "dltensor": its destructor frees the tensor
}

void Array::set_from_dlpack(const dlpack::Tensor& t, Access access) {
  if (t.device.type != dlpack::kCpu) {
    throw Error(where(caller_, name_) + "must be in CPU memory, got DLPack device type " +
                std::to_string(t.device.type));
  }
  DType dtype;
  if (!dtype_of_dlpack(t.dtype, &dtype)) {
    throw Error(where(caller_, name_) + "has an unknown element type, got DLPack code " +
                std::to_string(t.dtype.code) + " of " + std::to_string(t.dtype.bits) + " bits");
  }
  if (t.ndim < 0 || t.ndim > Tensor::kMaxRank) {
    throw Error(where(caller_, name_) + "has " + std::to_string(t.ndim) +
                " axes, at most 4 are known");
  }
  const auto rank = static_cast<size_t>(t.ndim);
  if (rank > 0 && !t.shape) throw Error(where(caller_, name_) + "has no shape");
  int64_t bytes = size_bytes(dtype);
  for (size_t a = 0; a < rank; ++a) {
    if (t.shape[a] < 0 || __builtin_mul_overflow(bytes, std::max<int64_t>(t.shape[a], 1), &bytes)) {
      throw Error(where(caller_, name_) + "has an extent that no memory has, got " +
                  std::to_string(t.shape[a]));
    }
  }
  const std::span<const int64_t> strides(t.strides, t.strides ? rank : 0);
  const char* data = static_cast<const char*>(t.data);
  view_ = ConstTensor(data ? data + t.byte_offset : data, dtype, {t.shape, rank}, strides);
  if (view_.num_elements() == 0) return;
  if (!data) throw Error(where(caller_, name_) + "has no data");
  if (reinterpret_cast<uintptr_t>(view_.data) % static_cast<uintptr_t>(size_bytes(dtype)) != 0) {
    if (access == Access::write) throw Error(where(caller_, name_) + "is not aligned");
    copy_elements();
  }
}

void Array::raise_rank(int rank) {
  const int missing = rank - view_.rank;
  if (!view_ || missing <= 0) return;
  std::copy_backward(view_.shape, view_.shape + view_.rank, view_.shape + rank);
  std::copy_backward(view_.stride, view_.stride + view_.rank, view_.stride + rank);
  std::fill_n(view_.shape, missing, int64_t{1});
  std::fill_n(view_.stride, missing, int64_t{0});
  view_.rank = rank;
}

void Array::make_rows_contiguous() {
  const int last = view_.rank - 1;
  if (last < 0 || view_.shape[last] <= 1 || view_.stride[last] == 1) return;
  copy_elements();
}

void Array::copy_elements() {
  int64_t stride_bytes[Tensor::kMaxRank];
  for (int a = 0; a < view_.rank; ++a) stride_bytes[a] = view_.stride[a] * size_bytes(view_.dtype);
  copy_rows(stride_bytes);
}

void Array::copy_rows(const int64_t* stride_bytes) {
  const int64_t item = size_bytes(view_.dtype), n = view_.num_elements();
  copy_.reset(new std::byte[static_cast<size_t>(n * item)]);
  int64_t shape[4] = {1, 1, 1, 1}, step[4] = {0, 0, 0, 0};
  for (int a = 0; a < view_.rank; ++a) {
    shape[4 - view_.rank + a] = view_.shape[a];
    step[4 - view_.rank + a] = stride_bytes[a];
  }
  std::byte* to = copy_.get();
  const auto* from = static_cast<const std::byte*>(view_.data);
  for (int64_t i = 0; i < shape[0] && n > 0; ++i)
    for (int64_t j = 0; j < shape[1]; ++j)
      for (int64_t k = 0; k < shape[2]; ++k) {
        const std::byte* row = from + i * step[0] + j * step[1] + k * step[2];
        for (int64_t l = 0; l < shape[3]; ++l, to += item)
          std::memcpy(to, row + l * step[3], static_cast<size_t>(item));
      }
  view_ = ConstTensor(copy_.get(), view_.dtype,
                      std::span<const int64_t>(view_.shape, static_cast<size_t>(view_.rank)));
}

}  // namespace qkv::python
