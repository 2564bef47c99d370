// SPDX-License-Identifier: Apache-2.0
// Tier: call. Python strings and functions that hot paths look up once.
#pragma once
#include <Python.h>

#include "bindings_dlpack.h"
#include "qkv/dtype.h"

namespace qkv::python {

struct Names {
  PyObject* dlpack_c_exchange_api;
  PyObject* dlpack;
  PyObject* requires_grad;
  PyObject* is_neg;
  PyObject* numpy_empty;                   // numpy.empty
  PyObject* numpy_dtypes[kDTypes.size()];  // by DType; nullptr where NumPy has none
};
/// Filled by init_names() at import; never freed.
const Names& names();
/// Throws PythonError if NumPy cannot be imported.
void init_names();

/// The code and width of an element type in DLPack.
dlpack::Type dlpack_type(DType t);

/// "float32", "f32", "bfloat16", numpy.float32, torch.float32 ... -> DType. Throws Error.
DType dtype_from_python(PyObject* object, const char* caller);

}  // namespace qkv::python
