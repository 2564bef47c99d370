// SPDX-License-Identifier: Apache-2.0
// Tier: call. A plain C function of Python around a function that throws.
#pragma once
#include <Python.h>

#include "bindings_array.h"

namespace qkv::python {

using CheckedFunction = PyObject* (*)(PyObject* const* args, Py_ssize_t num_args,
                                      PyObject* keywords);

/// Catches what `checked` throws and sets the Python error.
template <CheckedFunction checked>
PyObject* plain_function(PyObject*, PyObject* const* args, Py_ssize_t num_args,
                         PyObject* keywords) {
  try {
    return checked(args, num_args, keywords);
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

/// A row of a method table. doc begins with the signature line that inspect.signature() reads.
template <CheckedFunction checked>
PyMethodDef method(const char* name, const char* doc) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&plain_function<checked>)),
          METH_FASTCALL | METH_KEYWORDS, doc};
}

}  // namespace qkv::python
