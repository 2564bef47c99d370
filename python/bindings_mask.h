// SPDX-License-Identifier: Apache-2.0
// Tier: call. qkv.Mask: a Mask together with the arrays it looks at.
#pragma once
#include <nanobind/nanobind.h>

#include <memory>
#include <vector>

#include "bindings_array.h"
#include "qkv/mask.h"

namespace qkv::python {

struct PyMask {
  Mask mask;
  std::vector<std::shared_ptr<Array>> arrays;  // of dense terms
  int64_t batch = 1, num_heads = 1;            // extents that the mask itself fixes
};

/// nullptr if the object is no qkv.Mask.
const PyMask* as_mask(PyObject* object);
/// Opens a boolean array; other element types are refused: an additive array is a bias.
void open_mask_array(Array* array, PyObject* object, const char* caller);
void bind_mask(nanobind::module_& module);

}  // namespace qkv::python
