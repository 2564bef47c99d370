// SPDX-License-Identifier: Apache-2.0
// Tier: kernel (compiled once per Highway target). Rows of any element type in and out of the
// arithmetic type. A new element type is a case here.
#if defined(QKV_KERNELS_CONVERT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_KERNELS_CONVERT_INL_H_
#undef QKV_KERNELS_CONVERT_INL_H_
#else
#define QKV_KERNELS_CONVERT_INL_H_
#endif

#include "kernels/kernels.h"
#include "kernels/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::kernels {
namespace HWY_NAMESPACE {

HWY_INLINE const void* Advance(const void* p, DType t, int64_t elements) {
  return static_cast<const char*>(p) + elements * info(t).bytes;
}
HWY_INLINE void* Advance(void* p, DType t, int64_t elements) {
  return static_cast<char*>(p) + elements * info(t).bytes;
}

// Asks for the cache lines of a row.
template <class T>
HWY_INLINE void PrefetchRow(const T* row, int64_t dim) {
  for (int64_t x = 0; x < dim; x += 64 / static_cast<int64_t>(sizeof(T)))
    __builtin_prefetch(row + x);
}

HWY_INLINE float FloatFromBits(uint32_t bits) {
  float f;
  hwy::CopyBytes<4>(&bits, &f);
  return f;
}

template <class T>
HWY_INLINE void ScaleRow(const T* HWY_RESTRICT src, int64_t n, T factor, T* HWY_RESTRICT dst) {
  const Tag<T> d;
  const auto f = hn::Set(d, factor);
  int64_t x = 0;
  for (; x + kLanes<T> <= n; x += kLanes<T>)
    hn::StoreU(hn::Mul(hn::LoadU(d, src + x), f), d, dst + x);
  for (; x < n; x++) dst[x] = src[x] * factor;
}

HWY_INLINE void ScaleRow(const bf16_t* HWY_RESTRICT src, int64_t n, float factor,
                         float* HWY_RESTRICT dst) {
  const Tag<float> d;
  const hn::Rebind<uint16_t, Tag<float>> d16;
  const hn::RebindToUnsigned<Tag<float>> d32;
  const auto f = hn::Set(d, factor);
  const uint16_t* bits = reinterpret_cast<const uint16_t*>(src);
  int64_t x = 0;
  for (; x + kLanes<float> <= n; x += kLanes<float>) {
    const auto wide = hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, bits + x)));
    hn::StoreU(hn::Mul(hn::BitCast(d, wide), f), d, dst + x);
  }
  for (; x < n; x++) dst[x] = FloatFromBits(static_cast<uint32_t>(bits[x]) << 16) * factor;
}

HWY_INLINE void ScaleRow(const f16_t* HWY_RESTRICT src, int64_t n, float factor,
                         float* HWY_RESTRICT dst) {
  int64_t x = 0;
#if HWY_TARGET <= HWY_AVX2 && HWY_ARCH_X86 || HWY_ARCH_ARM_A64
  const Tag<float> d;
  const hn::Rebind<hwy::float16_t, Tag<float>> d16;
  const auto f = hn::Set(d, factor);
  for (; x + kLanes<float> <= n; x += kLanes<float>) {
    const auto half = hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(src) + x);
    hn::StoreU(hn::Mul(hn::PromoteTo(d, half), f), d, dst + x);
  }
#endif
  for (; x < n; x++) dst[x] = to_float(src[x]) * factor;
}

HWY_INLINE void ScaleRow(const int8_t* HWY_RESTRICT src, int64_t n, float factor,
                         float* HWY_RESTRICT dst) {
  const Tag<float> d;
  const hn::Rebind<int8_t, Tag<float>> d8;
  const hn::RebindToSigned<Tag<float>> d32;
  const auto f = hn::Set(d, factor);
  int64_t x = 0;
  for (; x + kLanes<float> <= n; x += kLanes<float>) {
    const auto wide = hn::ConvertTo(d, hn::PromoteTo(d32, hn::LoadU(d8, src + x)));
    hn::StoreU(hn::Mul(wide, f), d, dst + x);
  }
  for (; x < n; x++) dst[x] = static_cast<float>(src[x]) * factor;
}

// dst[0, n) = src[0, n) * factor in the arithmetic type.
HWY_INLINE void LoadRow(const void* src, DType t, int64_t n, float factor,
                        float* HWY_RESTRICT dst) {
  if (t == DType::f32) return ScaleRow(static_cast<const float*>(src), n, factor, dst);
  if (t == DType::bf16) return ScaleRow(static_cast<const bf16_t*>(src), n, factor, dst);
  if (t == DType::i8) return ScaleRow(static_cast<const int8_t*>(src), n, factor, dst);
  ScaleRow(static_cast<const f16_t*>(src), n, factor, dst);
}
HWY_INLINE void LoadRow(const void* src, DType, int64_t n, double factor,
                        double* HWY_RESTRICT dst) {
  ScaleRow(static_cast<const double*>(src), n, factor, dst);
}

// dst[0, n) = src[0, n), rounded to nearest even.
HWY_INLINE void StoreRow(const float* HWY_RESTRICT src, DType t, int64_t n, void* dst) {
  int64_t x = 0;
  if (t == DType::f32) {
    __builtin_memcpy(dst, src, static_cast<size_t>(n) * sizeof(float));
  } else if (t == DType::bf16) {
    const Tag<float> d;
    const hn::Rebind<uint16_t, Tag<float>> d16;
    const hn::RebindToUnsigned<Tag<float>> d32;
    uint16_t* to = static_cast<uint16_t*>(dst);
    for (; x + kLanes<float> <= n; x += kLanes<float>) {
      const auto v = hn::LoadU(d, src + x);
      const auto u = hn::BitCast(d32, v);
      const auto odd = hn::And(hn::ShiftRight<16>(u), hn::Set(d32, 1));
      const auto rounded = hn::Add(u, hn::Add(odd, hn::Set(d32, 0x7fff)));
      const auto quiet = hn::Or(u, hn::Set(d32, 0x400000));
      const auto bits = hn::IfThenElse(hn::RebindMask(d32, hn::Eq(v, v)), rounded, quiet);
      hn::StoreU(hn::DemoteTo(d16, hn::BitCast(hn::RebindToSigned<decltype(d32)>(),
                                               hn::ShiftRight<16>(bits))),
                 d16, to + x);
    }
    for (; x < n; x++) to[x] = to_bf16(src[x]).bits;
  } else {
    f16_t* to = static_cast<f16_t*>(dst);
#if HWY_TARGET <= HWY_AVX2 && HWY_ARCH_X86 || HWY_ARCH_ARM_A64
    const Tag<float> d;
    const hn::Rebind<hwy::float16_t, Tag<float>> d16;
    for (; x + kLanes<float> <= n; x += kLanes<float>) {
      hn::StoreU(hn::DemoteTo(d16, hn::LoadU(d, src + x)), d16,
                 reinterpret_cast<hwy::float16_t*>(to) + x);
    }
#endif
    for (; x < n; x++) to[x] = to_f16(src[x]);
  }
}
HWY_INLINE void StoreRow(const double* HWY_RESTRICT src, DType, int64_t n, void* dst) {
  __builtin_memcpy(dst, src, static_cast<size_t>(n) * sizeof(double));
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::kernels
HWY_AFTER_NAMESPACE();

#endif  // toggle
