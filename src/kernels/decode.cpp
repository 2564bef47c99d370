// SPDX-License-Identifier: Apache-2.0
// Tier: kernel. The decode family, compiled once per Highway target.
#include "kernels/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/decode.cpp"
#include "hwy/foreach_target.h"  // first
#include "kernels/decode-inl.h"
#include "kernels/decode_small-inl.h"
#include "kernels/decode_weights-inl.h"
#include "kernels/tables.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::kernels {
namespace HWY_NAMESPACE {

void FillDecode(KernelTable* table) {
  table->decode_rows = kDecodeRows;
  table->small_keys = kSmallKeys;
  table->decode_small = DecodeSmall;
  table->decode[0] = Decode<float>, table->decode[1] = Decode<double>;
  table->decode_weights[0] = DecodeWeights<float>, table->decode_weights[1] = DecodeWeights<double>;
  table->decode_scratch_bytes[0] = DecodeScratchBytes<float>;
  table->decode_scratch_bytes[1] = DecodeScratchBytes<double>;
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace qkv::kernels {
HWY_EXPORT(FillDecode);
void fill_decode(KernelTable* table) { HWY_DYNAMIC_DISPATCH(FillDecode)(table); }
}  // namespace qkv::kernels
#endif
