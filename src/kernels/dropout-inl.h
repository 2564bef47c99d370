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

// Below it a word drops its weight; kAll: every word does.
struct DropThreshold {
  uint32_t word;
  bool all;
};
HWY_INLINE DropThreshold ThresholdOf(double dropout) {
  const double exact = dropout * 4294967296.0;
  if (exact > 4294967295.0) return {0, true};
  const uint32_t whole = static_cast<uint32_t>(exact);
  return {whole + (static_cast<double>(whole) < exact ? 1u : 0u), false};
}

#if HWY_TARGET == HWY_SCALAR
// Words of the keys of a group, for the lanes from w on: words[key][lane].
struct PhiloxLanes {
  uint64_t seed;
  explicit PhiloxLanes(uint64_t s) : seed(s) {}
  template <int kL>
  HWY_INLINE void words(const uint32_t (&start)[4][kL], const uint32_t* of_group,
                        uint32_t (&out)[4][kL]) const {
    for (int i = 0; i < kL; i++) {
      uint32_t c[4] = {of_group[0], start[1][i], start[2][i], start[3][i] | of_group[3]};
      PhiloxBlock(seed, c);
      for (int word = 0; word < 4; word++) out[word][i] = c[word];
    }
  }
};
#else
// The same, a word of a counter in each 64-bit lane: products of the low halves are all that a round
// needs, so what is left in the high halves is never cleared. 16 lanes of 32 bits are two such vectors
// (even and odd ones), whose rounds run side by side.
struct PhiloxLanes {
  uint64_t keys[20];  // of the rounds
  explicit PhiloxLanes(uint64_t seed) {
    uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; round++, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u)
      keys[2 * round] = key0, keys[2 * round + 1] = key1;
  }
  template <int kL>
  HWY_INLINE void words(const uint32_t (&start)[4][kL], const uint32_t* of_group,
                        uint32_t (&out)[4][kL]) const {
    const hn::ScalableTag<uint64_t> d64;
    const hn::ScalableTag<uint32_t> d32;
    using V = hn::Vec<hn::ScalableTag<uint64_t>>;
    constexpr int kHalf = static_cast<int>(hn::MaxLanes(d64));
    constexpr int kVectors = kL / kHalf;  // 2 for f32, 1 for f64
    V c[4][kVectors];
    for (int word = 0; word < 4; word++) {
      if constexpr (kVectors == 2) {
        const V both = hn::BitCast(d64, hn::Load(d32, start[word]));
        c[word][0] = both, c[word][1] = hn::ShiftRight<32>(both);
      } else {
        c[word][0] =
            hn::PromoteTo(d64, hn::Load(hn::Rebind<uint32_t, decltype(d64)>(), start[word]));
      }
    }
    const auto mul = [&](V a, V b)
                         HWY_ATTR { return hn::MulEven(hn::BitCast(d32, a), hn::BitCast(d32, b)); };
    const V m0 = hn::Set(d64, 0xD2511F53u), m1 = hn::Set(d64, 0xCD9E8D57u);
    Each<kVectors>([&](auto v) HWY_ATTR {
      c[0][v] = hn::Set(d64, of_group[0]);
      c[3][v] = hn::Or(c[3][v], hn::Set(d64, of_group[3]));
    });
    Each<10>([&](auto round) HWY_ATTR {
      const V key0 = hn::Set(d64, keys[2 * round]), key1 = hn::Set(d64, keys[2 * round + 1]);
      Each<kVectors>([&](auto v) HWY_ATTR {
        const V a = mul(c[0][v], m0), b = mul(c[2][v], m1);
        c[0][v] = hn::Xor(hn::Xor(hn::ShiftRight<32>(b), c[1][v]), key0), c[1][v] = b;
        c[2][v] = hn::Xor(hn::Xor(hn::ShiftRight<32>(a), c[3][v]), key1), c[3][v] = a;
      });
    });
    Each<4>([&](auto word) HWY_ATTR {
      if constexpr (kVectors == 2) {
        const auto odd = hn::BitCast(d32, hn::ShiftLeft<32>(c[word][1]));
        hn::Store(hn::OddEven(odd, hn::BitCast(d32, c[word][0])), d32, out[word]);
      } else {
        const hn::Rebind<uint32_t, decltype(d64)> half;
        hn::Store(hn::TruncateTo(half, c[word][0]), half, out[word]);
      }
    });
  }
};
#endif

// Weights of one key: 0 where the word is below the threshold, else p * factor.
template <class T>
HWY_INLINE void DropVector(const uint32_t* HWY_RESTRICT words, uint32_t threshold, Vec<T> factor,
                           T* HWY_RESTRICT p) {
  const Tag<T> d;
  const hn::RebindToSigned<Tag<T>> di;  // compares as integers with a sign
  const hn::RebindToUnsigned<Tag<T>> du;
  const auto drop = [&]() HWY_ATTR {
    if constexpr (sizeof(T) == 4) {
      const auto sign = hn::Set(du, 0x80000000u);
      return hn::Lt(hn::BitCast(di, hn::Xor(hn::Load(du, words), sign)),
                    hn::BitCast(di, hn::Xor(hn::Set(du, threshold), sign)));
    } else {
      const hn::Rebind<uint32_t, decltype(du)> half;
      return hn::Lt(hn::BitCast(di, hn::PromoteTo(du, hn::Load(half, words))),
                    hn::Set(di, static_cast<int64_t>(threshold)));
    }
  }();
  hn::Store(hn::IfThenZeroElse(hn::RebindMask(d, drop), hn::Mul(hn::Load(d, p), factor)), d, p);
}

// p[key][lane] of a span of the block at k0: dropped weights become 0, the others grow by 1 / (1 -
// dropout).
template <class T>
HWY_NOINLINE void DropWeights(const AttentionTask& task, const Panel<T>& panel, int64_t k0,
                              const Span& span, T* HWY_RESTRICT p) {
  constexpr int kL = kLanes<T>;
  const Tag<T> d;
  const DropThreshold threshold = ThresholdOf(task.dropout);
  const Vec<T> factor = hn::Set(d, static_cast<T>(1.0 / (1.0 - task.dropout)));
  const PhiloxLanes philox(task.seed);
  for (int w = span.v0 * kL; w < (span.v0 + span.nv) * kL; w += kL) {
    if (threshold.all) {
      for (int x = span.begin; x < span.end; x++) hn::Store(hn::Zero(d), d, p + x * kPanel<T> + w);
      continue;
    }
    alignas(64) uint32_t start[4][kL];
    alignas(64) uint32_t random[4][kL];
    for (int i = 0; i < kL; i++) {
      uint32_t c[4];
      PhiloxCounter(0, panel.token[w + i], task.dropout_stream + panel.head[w + i], c);
      for (int word = 0; word < 4; word++) start[word][i] = c[word];
    }
    for (int64_t group = (k0 + span.begin) / 4; group * 4 < k0 + span.end; group++) {
      uint32_t of_group[4];
      PhiloxCounter(group, 0, 0, of_group);
      philox.words(start, of_group, random);
      const int first = static_cast<int>(group * 4 - k0);
      for (int x = HWY_MAX(first, span.begin); x < HWY_MIN(first + 4, span.end); x++)
        DropVector(random[x - first], threshold.word, factor, p + x * kPanel<T> + w);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::kernels
HWY_AFTER_NAMESPACE();

#endif  // toggle
