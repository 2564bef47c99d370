// SPDX-License-Identifier: Apache-2.0
// Tier: call. Arrays of Python as views: NumPy and other buffers, torch, anything with DLPack. No
// copies, with one exception: a last axis that is not contiguous.
#pragma once
#include <Python.h>

#include <memory>
#include <span>
#include <stdexcept>
#include <utility>

#include "bindings_dlpack.h"
#include "qkv/tensor.h"

namespace qkv::python {

/// A Python exception is set.
struct PythonError : std::exception {};

/// Owns one reference.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : object_(owned) {}
  Ref(Ref&& other) noexcept : object_(other.release()) {}
  Ref& operator=(Ref&& other) noexcept {
    Py_XDECREF(std::exchange(object_, other.release()));
    return *this;
  }
  ~Ref() { Py_XDECREF(object_); }
  static Ref borrow(PyObject* object) {
    Py_XINCREF(object);
    return Ref(object);
  }
  /// Throws PythonError for nullptr.
  static Ref checked(PyObject* owned) {
    if (!owned) throw PythonError();
    return Ref(owned);
  }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

/// How results are made: "the same kind of array as q".
struct ArrayKind {
  enum class Library : uint8_t { numpy, exchange, other } library = Library::numpy;
  const dlpack::ExchangeApi* api = nullptr;  // exchange
  PyObject* like = nullptr;                  // borrowed: the array whose kind this is
};

/// A Python array as a view that stays valid while this object lives. Needs the GIL at both ends.
class Array {
 public:
  /// read refuses tensors that require a gradient; read_detached is for callers who know that none is wanted.
  enum class Access : uint8_t { read, read_detached, write };

  Array() = default;
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { close(); }

  /// Throws Error (caller and name in the text) if the object is no array that can be read here,
  /// and TypeError if it is no array at all. None leaves the view empty.
  void open(PyObject* object, const char* caller, const char* name, Access access = Access::read);
  /// The exception to "no copies": kernels read rows, so where the last axis has another stride
  /// than 1 the values are copied once, in C order.
  void make_rows_contiguous();
  /// Holds a reference to the object itself, for views that outlive the call.
  void keep(PyObject* object) { keep_ = Ref::borrow(object); }
  /// NumPy's broadcasting: fewer axes than `rank` get extents of 1 in front.
  void raise_rank(int rank);
  void close();

  explicit operator bool() const { return static_cast<bool>(view_); }
  const ConstTensor& view() const { return view_; }
  Tensor writable_view() const;
  const ArrayKind& kind() const { return kind_; }

 private:
  void open_borrowed(PyObject* object, Access access);
  void resolve_sign(PyObject* object, Access access);
  void open_buffer(PyObject* object, Access access);
  void open_capsule(PyObject* object, Access access);
  void set_from_dlpack(const dlpack::Tensor& t, Access access);
  void copy_elements();
  void copy_rows(const int64_t* stride_bytes);

  ConstTensor view_{};
  ArrayKind kind_{};
  Py_buffer buffer_{};
  bool has_buffer_ = false;
  Ref keep_;
  Ref owner_;  // capsule or converted array that the view points into
  std::unique_ptr<std::byte[]> copy_;
  const char* caller_ = "";
  const char* name_ = "";
};

/// A new array of the kind of q, uninitialised; *view points into it.
Ref make_array(const ArrayKind& kind, DType dtype, std::span<const int64_t> shape, Tensor* view);
/// A new NumPy array.
Ref make_numpy(DType dtype, std::span<const int64_t> shape, Tensor* view);
/// Turns what make_array() made into the final object (array libraries reached through NumPy).
Ref finish_array(const ArrayKind& kind, Ref array);
/// Sets the Python error that belongs to the exception in flight; for catch (...).
void set_python_error() noexcept;

}  // namespace qkv::python
