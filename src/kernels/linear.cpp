// SPDX-License-Identifier: Apache-2.0
// Tier: kernel. Compiles the projections once per Highway target and hands them to the kernel
// table.
#include "kernels/targets.h"
// targets.h comes first: it selects what foreach_target.h compiles.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/linear.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "kernels/linear-inl.h"
#include "kernels/linear_gradient-inl.h"
#include "kernels/tables.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::kernels {
namespace HWY_NAMESPACE {

void FillLinear(KernelTable* table) {
  table->linear_columns = kLinearColumns;
  table->linear_block = kLanes<float>;
  table->linear_panel_floats = kLinearColumns * kLinearChunk;
  table->linear = Linear;
  table->pack = Pack;
  table->packed_floats = PackedFloats;
  table->pack_transposed = PackTransposed;
  table->gradient_block = kGradientBlock;
  table->gradient_scratch_bytes = kGradientScratchBytes;
  table->linear_gradient = LinearGradient;
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace qkv::kernels {

HWY_EXPORT(FillLinear);
void fill_linear(KernelTable* table) { HWY_DYNAMIC_DISPATCH(FillLinear)(table); }

}  // namespace qkv::kernels
#endif
