// SPDX-License-Identifier: Apache-2.0
// Tier: kernel. The backward family, compiled once per Highway target.
#include "kernels/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/backward.cpp"
#include "hwy/foreach_target.h"  // first
#include "kernels/backward-inl.h"
#include "kernels/tables.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::kernels {
namespace HWY_NAMESPACE {

void FillBackward(KernelTable* table) {
  table->backward[0] = Backward<float>, table->backward[1] = Backward<double>;
  table->backward_scratch_bytes[0] = BackwardScratchBytes<float>;
  table->backward_scratch_bytes[1] = BackwardScratchBytes<double>;
  table->backward_row_elements[0] = RowElements<float>;
  table->backward_row_elements[1] = RowElements<double>;
  table->sum_parts[0] = SumParts<float>, table->sum_parts[1] = SumParts<double>;
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace qkv::kernels {
HWY_EXPORT(FillBackward);
void fill_backward(KernelTable* table) { HWY_DYNAMIC_DISPATCH(FillBackward)(table); }
}  // namespace qkv::kernels
#endif
