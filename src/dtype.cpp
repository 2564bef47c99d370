// SPDX-License-Identifier: Apache-2.0
// Tier: call. The scalar conversions of the 16-bit formats that dtype.h declares.
#include "qkv/dtype.h"

#include "half.h"

namespace qkv {

float to_float(bf16_t x) { return half::from_bf16(x.bits); }
float to_float(f16_t x) { return half::from_f16(x.bits); }
bf16_t to_bf16(float x) { return {half::to_bf16(x)}; }
f16_t to_f16(float x) { return {half::to_f16(x)}; }

}  // namespace qkv
