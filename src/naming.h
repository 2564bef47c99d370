// SPDX-License-Identifier: Apache-2.0
// Tier: call. Finds the parameters of one layer in a file, whatever they are called there: one row
// per naming in naming.cpp. Called by src/weights.cpp.
#pragma once
#include <cstdint>
#include <string>

#include "qkv/weights.h"

namespace qkv {

/// Rows [begin, begin + count) of a tensor of the file; tensor is nullptr if the parameter is
/// absent.
struct RowsOf {
  const TensorInfo* tensor = nullptr;
  int64_t begin = 0;
  int64_t count = 0;
};

struct ProjectionSource {
  RowsOf weight;  // rank 2
  RowsOf bias;    // rank 1, as many rows as weight, or absent
};

struct LayerSource {
  Naming naming = Naming::automatic;
  std::string prefix;
  ProjectionSource q, k, v, o;
};

/// Throws Error if no naming fits, if several layers do, or if a layer's tensors are incomplete or
/// have shapes that do not belong together. Widths and head counts are not looked at.
LayerSource find_layer(const SafetensorsFile& file, Naming naming, const std::string& prefix,
                       std::string_view caller);

/// "k_proj.weight [128, 576]", with the rows if only some are meant.
std::string rows_text(const RowsOf& rows);

}  // namespace qkv
