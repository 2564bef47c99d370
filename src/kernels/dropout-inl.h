// SPDX-License-Identifier: Apache-2.0
// Tier: kernel (compiled once per Highway target). Dropout of a block of weights: the generator is
// counter-based (Philox4x32-10, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// SC11), so a weight is dropped or not whatever tile it lies in. The same numbers as src/philox.h,
// which is their definition.
#if defined(QKV_KERNELS_DROPOUT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_KERNELS_DROPOUT_INL_H_
#undef QKV_KERNELS_DROPOUT_INL_H_
#else
#define QKV_KERNELS_DROPOUT_INL_H_
#endif

#include "kernels/panel-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::kernels {
namespace HWY_NAMESPACE {

HWY_INLINE void PhiloxBlock(uint64_t seed, uint32_t* HWY_RESTRICT c) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; round++, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u) {
    const uint64_t a = uint64_t{0xD2511F53u} * c[0], b = uint64_t{0xCD9E8D57u} * c[2];
    const uint32_t c1 = c[1], c3 = c[3];
    c[0] = static_cast<uint32_t>(b >> 32) ^ c1 ^ key0;
    c[1] = static_cast<uint32_t>(b);
    c[2] = static_cast<uint32_t>(a >> 32) ^ c3 ^ key1;
    c[3] = static_cast<uint32_t>(a);
  }
}

// Counter of the keys 4 * group ... 4 * group + 3 of query i.
HWY_INLINE void PhiloxCounter(int64_t group, int64_t i, int64_t stream, uint32_t* HWY_RESTRICT c) {
  c[0] = static_cast<uint32_t>(group);
  c[1] = static_cast<uint32_t>(i);
  c[2] = static_cast<uint32_t>(stream);
  const auto high = [](int64_t x)
                        HWY_ATTR { return static_cast<uint32_t>(static_cast<uint64_t>(x) >> 32); };
  c[3] = (high(group) & 0x7FFu) | (high(i) & 0x7FFu) << 11 | high(stream) << 22;
}

// p[key][lane] of a span of the block at k0: dropped weights become 0, the others grow by 1 / (1 -
// dropout).
template <class T>
HWY_NOINLINE void DropWeights(const AttentionTask& task, const Panel<T>& panel, int64_t k0,
                              const Span& span, T* HWY_RESTRICT p) {
  const double threshold = task.dropout * 4294967296.0;
  const T factor = task.dropout < 1 ? static_cast<T>(1.0 / (1.0 - task.dropout)) : T{0};
  for (int w = span.v0 * kLanes<T>; w < (span.v0 + span.nv) * kLanes<T>; w++) {
    const int64_t i = panel.token[w];
    const int64_t stream = task.dropout_stream + panel.head[w];
    uint32_t random[4];
    int64_t group = -1;
    for (int x = span.begin; x < span.end; x++) {
      const int64_t j = k0 + x;
      if (j / 4 != group) {
        group = j / 4;
        PhiloxCounter(group, i, stream, random);
        PhiloxBlock(task.seed, random);
      }
      T* at = p + x * kPanel<T> + w;
      *at = random[j % 4] < threshold ? T{0} : *at * factor;
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::kernels
HWY_AFTER_NAMESPACE();

#endif  // toggle
