// SPDX-License-Identifier: Apache-2.0
// Tier: call. The functions of the module, one bind_* per file, and the long docstrings.
#pragma once
#include <nanobind/nanobind.h>

namespace qkv::python {

void bind_attention(nanobind::module_& module);
void bind_backward(nanobind::module_& module);
void bind_cache(nanobind::module_& module);
void bind_variants(nanobind::module_& module);
void bind_files(nanobind::module_& module);
void bind_layer(nanobind::module_& module);
void bind_torch(nanobind::module_& module);

extern const char kAttentionDoc[];
extern const char kBackwardDoc[];
extern const char kVarlenDoc[];
extern const char kMergeDoc[];

}  // namespace qkv::python
