// SPDX-License-Identifier: Apache-2.0
// Tier: call. The header of an npy file: magic, version, length, then a Python dict literal
//   {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }
// then the elements, which must fill the rest of the file. Called by src/npy.cpp.
#pragma once
#include <string>
#include <string_view>

#include "qkv/weights.h"

namespace qkv {

struct NpyHeader {
  TensorInfo info;  // without a name; offsets count from the start of the file
  bool fortran_order = false;
};

/// file is the whole file. Throws Error with path and byte offset unless the array can be used as
/// it stands.
NpyHeader parse_npy_header(std::string_view file, const std::string& path, std::string_view caller);

/// Magic, version 1.0, length and dict, padded so that the elements start at a multiple of 64
/// bytes. The element type must have an npy name.
std::string format_npy_header(const TensorInfo& info);

}  // namespace qkv
