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

// The same for kN counters at once, word by word: plain loops that compilers turn into vectors.
template <int kN>
HWY_INLINE void PhiloxBlocks(uint64_t seed, uint32_t (&c)[4][kN]) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; round++, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u) {
    for (int i = 0; i < kN; i++) {
      const uint64_t a = uint64_t{0xD2511F53u} * c[0][i], b = uint64_t{0xCD9E8D57u} * c[2][i];
      c[0][i] = static_cast<uint32_t>(b >> 32) ^ c[1][i] ^ key0;
      c[1][i] = static_cast<uint32_t>(b);
      c[2][i] = static_cast<uint32_t>(a >> 32) ^ c[3][i] ^ key1;
      c[3][i] = static_cast<uint32_t>(a);
    }
  }
}

// p[key][lane] of a span of the block at k0: dropped weights become 0, the others grow by 1 / (1 -
// dropout).
template <class T>
HWY_NOINLINE void DropWeights(const AttentionTask& task, const Panel<T>& panel, int64_t k0,
                              const Span& span, T* HWY_RESTRICT p) {
  constexpr int kL = kLanes<T>;
  const double exact = task.dropout * 4294967296.0;  // a word below it is dropped
  const bool drop_all = exact > 4294967295.0;
  const uint32_t whole = drop_all ? 0 : static_cast<uint32_t>(exact);
  const uint32_t threshold = whole + (static_cast<double>(whole) < exact ? 1 : 0);
  const T factor = task.dropout < 1 ? static_cast<T>(1.0 / (1.0 - task.dropout)) : T{0};
  for (int w = span.v0 * kL; w < (span.v0 + span.nv) * kL; w += kL) {
    uint32_t start[4][kL];
    for (int i = 0; i < kL; i++) {
      uint32_t c[4];
      PhiloxCounter(0, panel.token[w + i], task.dropout_stream + panel.head[w + i], c);
      for (int word = 0; word < 4; word++) start[word][i] = c[word];
    }
    for (int64_t group = (k0 + span.begin) / 4; group * 4 < k0 + span.end; group++) {
      uint32_t c[4][kL];
      uint32_t of_group[4];
      PhiloxCounter(group, 0, 0, of_group);
      for (int i = 0; i < kL; i++) {
        c[0][i] = of_group[0], c[1][i] = start[1][i], c[2][i] = start[2][i];
        c[3][i] = start[3][i] | of_group[3];
      }
      PhiloxBlocks(task.seed, c);
      const int first = static_cast<int>(group * 4 - k0);
      for (int x = HWY_MAX(first, span.begin); x < HWY_MIN(first + 4, span.end); x++) {
        const uint32_t* HWY_RESTRICT random = c[x - first];
        T* HWY_RESTRICT at = p + x * kPanel<T> + w;
        for (int i = 0; i < kL; i++) {
          at[i] = drop_all || random[i] < threshold ? T{0} : at[i] * factor;
        }
      }
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::kernels
HWY_AFTER_NAMESPACE();

#endif  // toggle
