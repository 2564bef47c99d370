// SPDX-License-Identifier: Apache-2.0
// Tier: kernel. The prefill family, compiled once per Highway target.
#include "kernels/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/prefill.cpp"
#include "hwy/foreach_target.h"  // first
#include "kernels/prefill-inl.h"
#include "kernels/prefill_weights-inl.h"
#include "kernels/tables.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::kernels {
namespace HWY_NAMESPACE {

void FillPrefill(KernelTable* table) {
  table->target = hwy::TargetName(HWY_TARGET);
  table->tile_q[0] = kPanel<float>, table->tile_q[1] = kPanel<double>;
  table->task_rows[0] = kMaxPanels * kPanel<float>,
  table->task_rows[1] = kMaxPanels * kPanel<double>;
  table->tile_kv = kBlock;
  table->prefill[0] = Prefill<float>, table->prefill[1] = Prefill<double>;
  table->prefill_weights[0] = PrefillWeights<float>,
  table->prefill_weights[1] = PrefillWeights<double>;
  table->prefill_scratch_bytes[0] = PanelScratchBytes<float>;
  table->prefill_scratch_bytes[1] = PanelScratchBytes<double>;
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace qkv::kernels {
HWY_EXPORT(FillPrefill);
void fill_prefill(KernelTable* table) { HWY_DYNAMIC_DISPATCH(FillPrefill)(table); }
}  // namespace qkv::kernels
#endif
