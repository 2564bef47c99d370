// SPDX-License-Identifier: Apache-2.0
// Tier: kernel. The Highway targets that the kernels are compiled for. Included before
// foreach_target.h.
#pragma once
// Vectors of unknown size cannot live in arrays; SSSE3 and SSE2 machines without SSE4 use the
// scalar code.
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_AVX3_DL)
