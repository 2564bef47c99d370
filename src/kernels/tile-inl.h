// SPDX-License-Identifier: Apache-2.0
// Tier: kernel (compiled once per Highway target). The register tile under every product of the
// library, 4^s, and the coding rules that make gcc 12 and clang 14 both keep the accumulators in
// registers:
//   - accumulators are a plain local array indexed by compile-time constants only (Each);
//   - each loaded panel vector is pinned by value (Pin), never by reference to an array element;
//   broadcasts are not pinned;
//   - the loop over the inner dimension is not unrolled by hand;
//   - one HWY_NOINLINE function per hot loop nest.
#if defined(QKV_KERNELS_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_KERNELS_TILE_INL_H_
#undef QKV_KERNELS_TILE_INL_H_
#else
#define QKV_KERNELS_TILE_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <utility>

#include "hwy/highway.h"

// Inline-assembly constraint of a vector register.
#undef QKV_VECTOR_REGISTER
#if HWY_TARGET <= HWY_AVX3
#define QKV_VECTOR_REGISTER "+v"
#elif HWY_ARCH_X86
#define QKV_VECTOR_REGISTER "+x"
#else
#define QKV_VECTOR_REGISTER "+w"
#endif

HWY_BEFORE_NAMESPACE();
namespace qkv::kernels {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <class T>
using Tag = hn::ScalableTag<T>;
template <class T>
using Vec = hn::Vec<Tag<T>>;
template <class T>
inline constexpr int kLanes = static_cast<int>(hn::MaxLanes(Tag<T>()));

// Rows and vectors of the tile, chosen so that accumulators + panel vectors + 1 fit the register
// file and loads do not limit the FMAs (measured on Zen 3, Zen 4 and Zen 5: 8 x 2 of 512 bits and 4
// x 3 of 256 bits run at 0.99 of the peak).
#if HWY_TARGET <= HWY_AVX3
inline constexpr int kTileRows = 8, kTileVectors = 2;
#elif HWY_TARGET == HWY_AVX2
inline constexpr int kTileRows = 4, kTileVectors = 3;
#elif HWY_TARGET == HWY_SCALAR
inline constexpr int kTileRows = 4, kTileVectors = 4;
#elif HWY_ARCH_X86
inline constexpr int kTileRows = 4, kTileVectors = 2;
#else  // 32 registers: NEON
inline constexpr int kTileRows = 8, kTileVectors = 2;
#endif

// Rows of a tile of other widths. Eight accumulators hide the latency of the FMAs (256 bits: 4 x 1 runs
// at 0.5 of the peak, 8 x 1 at 0.8).
template <int kVectors>
inline constexpr int kRowsOf = kVectors > kTileVectors ? kTileRows* kTileVectors / kVectors
                                                       : HWY_MAX(kTileRows, 8 / kVectors);

// Lanes of a panel: the leading dimension of every transposed block.
template <class T>
inline constexpr int kPanel = kTileVectors* kLanes<T>;

// Keeps a loaded vector in a register, so that gcc does not fold the load into every FMA that uses
// it.
template <class V>
HWY_INLINE V Pin(V v) {
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
  return v;
#else
  auto r = v.raw;
  asm("" : QKV_VECTOR_REGISTER(r));
  return V{r};
#endif
}

template <int... kI, class F>
HWY_INLINE void EachOf(std::integer_sequence<int, kI...>, F f) {
  (f(std::integral_constant<int, kI>()), ...);
}
// f(0) ... f(kN - 1), every index a compile-time constant.
template <int kN, class F>
HWY_INLINE void Each(F f) {
  EachOf(std::make_integer_sequence<int, kN>(), f);
}

struct NoStep {
  HWY_INLINE void operator()() const {}
};

// acc[i][j] += sum_u A(i, u) * B[u][j] for n steps of u.
//   A(i, u): kRowsAreStrided ? a[i * lda + u] : a[u * lda + i]   broadcast, natural layout
//   B[u][j]: vector j of b + u * ldb                             aligned panel
// step() runs once per u: room for a prefetch.
template <class T, int kRows, int kVectors, bool kRowsAreStrided, class Step = NoStep>
HWY_INLINE void TileSteps(const T* HWY_RESTRICT a, size_t lda, const T* HWY_RESTRICT b, size_t ldb,
                          size_t n, Vec<T> (&acc)[kRows][kVectors], Step step = Step()) {
  const Tag<T> d;
  for (size_t u = 0; u < n; u++) {
    Vec<T> panel[kVectors];
    Each<kVectors>([&](auto j) HWY_ATTR { panel[j] = Pin(hn::Load(d, b + j * kLanes<T>)); });
    step();
    Each<kRows>([&](auto i) HWY_ATTR {
      const Vec<T> x = hn::Set(d, kRowsAreStrided ? a[i * lda] : a[i]);
      Each<kVectors>([&](auto j) HWY_ATTR { acc[i][j] = hn::MulAdd(x, panel[j], acc[i][j]); });
    });
    a += kRowsAreStrided ? 1 : lda;
    b += ldb;
  }
}

// acc[i][j] = init(i, j), n steps, then done(i, j, acc).
template <class T, int kRows, int kVectors, bool kRowsAreStrided, class Init, class Done,
          class Step = NoStep>
HWY_INLINE void Tile(const T* HWY_RESTRICT a, size_t lda, const T* HWY_RESTRICT b, size_t ldb,
                     size_t n, Init init, Done done, Step step = Step()) {
  Vec<T> acc[kRows][kVectors];
  Each<kRows>([&](auto i)
                  HWY_ATTR { Each<kVectors>([&](auto j) HWY_ATTR { acc[i][j] = init(i, j); }); });
  TileSteps<T, kRows, kVectors, kRowsAreStrided>(a, lda, b, ldb, n, acc, step);
  Each<kRows>([&](auto i)
                  HWY_ATTR { Each<kVectors>([&](auto j) HWY_ATTR { done(i, j, acc[i][j]); }); });
}

// Cuts n rows into tiles: calls body(first row, rows, rows of a tile as a constant) for whole tiles of
// kRows, then with powers of two for what is left.
template <int kRows, class Body>
HWY_INLINE void ForTiles(size_t n, Body body, size_t begin = 0) {
  const size_t whole = (n - begin) / kRows * kRows;
  if (whole) body(begin, whole, std::integral_constant<int, kRows>());
  if constexpr (kRows > 1) {
    constexpr int kNext = kRows > 8 ? 8 : kRows > 4 ? 4 : kRows > 2 ? 2 : 1;
    if (begin + whole < n) ForTiles<kNext>(n, body, begin + whole);
  }
}

// max(low, s) that keeps a NaN in s. maxps returns its second operand if one is NaN; NEON's fmaxnm and
// the scalar target's Max return the other one.
template <class V>
HWY_INLINE V AtLeast(V low, V s) {
#if !HWY_ARCH_X86 || HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
  return hn::IfThenElse(hn::Lt(s, low), low, s);
#else
  return hn::Max(low, s);
#endif
}

// 4^s, for s < 64. Exact at s = 0 and exactly 0 for s <= -63.5 (-inf too): a hidden score needs no other
// treatment. NaN stays NaN. Base 4 because log4(e) < 1: no finite score overflows on its way here.
// f32: 2^(2s) with degree 5 and constant term 1 (own minimax fit), 2.1 ulp. f64: Taylor, degree 13,
// about 1 ulp.
HWY_INLINE Vec<float> Exp4(Vec<float> s) {
  const Tag<float> d;
#if HWY_TARGET <= HWY_AVX3
  // For s = -inf, f and the polynomial are NaN, but vscalefps of NaN by -inf is 0 by definition; it
  // also underflows by itself. The only intrinsic here. vreduceps for f is slower (5.0 against 3.5
  // cycles per vector on Zen 5).
  constexpr float kF = 1.0f;
  s = hn::Add(s, s);
  const Vec<float> r = hn::Round(s);
  const Vec<float> f = hn::Sub(s, r);
#else
  // t holds 2s rounded in its low bits, f is half of what is left.
  constexpr float kF = 2.0f;
  s = AtLeast(hn::Set(d, -63.5f), s);
  const Vec<float> magic = hn::Set(d, 6291456.0f);  // 1.5 * 2^22
  const Vec<float> t = hn::Add(s, magic);
  const Vec<float> f = hn::Sub(s, hn::Sub(t, magic));
#endif
  Vec<float> p = hn::MulAdd(hn::Set(d, 0.0013264727f * kF * kF * kF * kF * kF), f,
                            hn::Set(d, 0.0096715127f * kF * kF * kF * kF));
  p = hn::MulAdd(p, f, hn::Set(d, 0.055507337f * kF * kF * kF));
  p = hn::MulAdd(p, f, hn::Set(d, 0.24022242f * kF * kF));
  p = hn::MulAdd(p, f, hn::Set(d, 0.693146978f * kF));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
#if HWY_TARGET <= HWY_AVX3
  return Vec<float>{_mm512_scalef_ps(p.raw, r.raw)};
#else
  const hn::RebindToSigned<Tag<float>> di;
  return hn::BitCast(d, hn::Add(hn::BitCast(di, p), hn::ShiftLeft<23>(hn::BitCast(di, t))));
#endif
}

#if HWY_HAVE_FLOAT64
HWY_INLINE Vec<double> Exp4(Vec<double> s) {
  const Tag<double> d;
  constexpr double kCoefficients[] = {
      // ln(4)^k / k!, k = 13 ... 1
      1.3691488853904128e-12 * 8192, 2.5678435993488201e-11 * 4096, 4.4455382718708116e-10 * 2048,
      7.0549116208011233e-09 * 1024, 1.0178086009239699e-07 * 512,  1.3215486790144310e-06 * 256,
      1.5252733804059841e-05 * 128,  1.5403530393381608e-04 * 64,   1.3333558146428443e-03 * 32,
      9.6181291076284772e-03 * 16,   5.5504108664821580e-02 * 8,    2.4022650695910071e-01 * 4,
      6.9314718055994531e-01 * 2};
  s = AtLeast(hn::Set(d, -511.5), s);
  const Vec<double> magic = hn::Set(d, 3377699720527872.0);  // 1.5 * 2^51: t holds 2s rounded
  const Vec<double> t = hn::Add(s, magic);
  const Vec<double> f = hn::Sub(s, hn::Sub(t, magic));
  Vec<double> p = hn::Set(d, kCoefficients[0]);
  for (int i = 1; i < 13; i++) p = hn::MulAdd(p, f, hn::Set(d, kCoefficients[i]));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0));
  const hn::RebindToSigned<Tag<double>> di;
  return hn::BitCast(d, hn::Add(hn::BitCast(di, p), hn::ShiftLeft<52>(hn::BitCast(di, t))));
}
#endif

}  // namespace HWY_NAMESPACE
}  // namespace qkv::kernels
HWY_AFTER_NAMESPACE();

#endif  // toggle
