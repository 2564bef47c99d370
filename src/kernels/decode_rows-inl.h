// SPDX-License-Identifier: Apache-2.0
// Tier: kernel (compiled once per Highway target). The two products of decode, with the head dim in the lanes: scores of a
// few query rows against natural K rows, and sums of natural V rows. K and V are read once per group of rows and converted
// in registers. Every (row, key) and (row, column) has one accumulator that is filled in order, so a row's bits do not
// depend on the rows beside it.
#if defined(QKV_KERNELS_DECODE_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QKV_KERNELS_DECODE_ROWS_INL_H_
#undef QKV_KERNELS_DECODE_ROWS_INL_H_
#else
#define QKV_KERNELS_DECODE_ROWS_INL_H_
#endif

#include "kernels/ahead-inl.h"
#include "kernels/convert-inl.h"
#include "kernels/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qkv::kernels {
namespace HWY_NAMESPACE {

// Query rows that share the loads and conversions of K and V, and accumulators of a tile: they fit the
// registers beside their operands.
inline constexpr int kRowsAtOnce = 4;
#if HWY_TARGET <= HWY_AVX3 || HWY_ARCH_ARM_A64
inline constexpr int kSums = 16;
#else
inline constexpr int kSums = 8;
#endif

#undef QKV_HAS_F16
#if HWY_TARGET <= HWY_AVX2 && HWY_ARCH_X86 || HWY_ARCH_ARM_A64
#define QKV_HAS_F16 1
#else
#define QKV_HAS_F16 0
#endif

HWY_INLINE Vec<float> LoadKv(const float* p) { return hn::LoadU(Tag<float>(), p); }
HWY_INLINE Vec<float> LoadKv(const bf16_t* p) {
  const hn::Rebind<uint16_t, Tag<float>> d16;
  const hn::RebindToUnsigned<Tag<float>> d32;
  const auto bits = hn::PromoteTo(d32, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(p)));
  return hn::BitCast(Tag<float>(), hn::ShiftLeft<16>(bits));
}
#if QKV_HAS_F16
HWY_INLINE Vec<float> LoadKv(const f16_t* p) {
  const hn::Rebind<hwy::float16_t, Tag<float>> d16;
  return hn::PromoteTo(Tag<float>(), hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(p)));
}
#endif
HWY_INLINE Vec<float> LoadKv(const int8_t* p) {
  const hn::Rebind<int8_t, Tag<float>> d8;
  const hn::RebindToSigned<Tag<float>> d32;
  return hn::ConvertTo(Tag<float>(), hn::PromoteTo(d32, hn::LoadU(d8, p)));
}
HWY_INLINE Vec<double> LoadKv(const double* p) { return hn::LoadU(Tag<double>(), p); }

// The first n < kLanes elements, then zeros. Nothing behind them is read.
template <class T, class KV>
HWY_INLINE Vec<T> LoadKvTail(const KV* p, int n) {
#if HWY_TARGET <= HWY_AVX2 && HWY_ARCH_X86
  if constexpr (sizeof(KV) >= 4) {
    const Tag<T> d;
    return hn::MaskedLoad(hn::FirstN(d, static_cast<size_t>(n)), d, p);
  }
#endif
  KV padded[kLanes<T>] = {};
  for (int i = 0; i < n; i++) padded[i] = p[i];
  return LoadKv(padded);
}

#if HWY_TARGET != HWY_SCALAR
template <class D, class V>
HWY_INLINE auto SumBlocks(D d, V v) {  // adds the 128-bit blocks
  if constexpr (hn::MaxLanes(D()) * sizeof(hn::TFromD<D>) <= 16) {
    (void)d;
    return v;
  } else {
    const hn::Half<D> half;
    return SumBlocks(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}
#endif

#if HWY_TARGET != HWY_SCALAR
// Lane i of every 128-bit block = sum of this block of the i-th vector.
HWY_INLINE Vec<float> SumFourths(Vec<float> a, Vec<float> b, Vec<float> c, Vec<float> e) {
  const Tag<float> d;
  const auto ac = hn::Add(hn::InterleaveLower(d, a, c), hn::InterleaveUpper(d, a, c));
  const auto be = hn::Add(hn::InterleaveLower(d, b, e), hn::InterleaveUpper(d, b, e));
  return hn::Add(hn::InterleaveLower(d, ac, be), hn::InterleaveUpper(d, ac, be));
}
// Every lane = the sum of the lanes of its block.
template <class V>
HWY_INLINE V SumInBlocks(V v) {
  v = hn::Add(v, hn::Shuffle1032(v));
  return hn::Add(v, hn::Shuffle2301(v));
}
#endif

// Sums of the lanes of four vectors, the same tree for each.
HWY_INLINE void StoreSums(Vec<float> a, Vec<float> b, Vec<float> c, Vec<float> e, float* to) {
#if HWY_TARGET == HWY_SCALAR
  to[0] = hn::GetLane(a), to[1] = hn::GetLane(b), to[2] = hn::GetLane(c), to[3] = hn::GetLane(e);
#else
  hn::StoreU(SumBlocks(Tag<float>(), SumFourths(a, b, c, e)), hn::Full128<float>(), to);
#endif
}
HWY_INLINE void StoreSums(Vec<double> a, Vec<double> b, Vec<double> c, Vec<double> e, double* to) {
#if HWY_TARGET == HWY_SCALAR
  to[0] = hn::GetLane(a), to[1] = hn::GetLane(b), to[2] = hn::GetLane(c), to[3] = hn::GetLane(e);
#else
  const Tag<double> d;
  const auto ab = hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
  const auto ce = hn::Add(hn::InterleaveLower(d, c, e), hn::InterleaveUpper(d, c, e));
  hn::StoreU(SumBlocks(d, ab), hn::Full128<double>(), to);
  hn::StoreU(SumBlocks(d, ce), hn::Full128<double>(), to + 2);
#endif
}
// The same for two rows of two.
template <class T>
HWY_INLINE void StoreSums2(Vec<T> a, Vec<T> b, Vec<T> c, Vec<T> e, T* to, T* to2) {
  T sums[4];
  StoreSums(a, b, c, e, sums);
  to[0] = sums[0], to[1] = sums[1], to2[0] = sums[2], to2[1] = sums[3];
}

// 128-bit blocks first: the same bits whether the blocks behind the first are empty or not there.
HWY_INLINE float SumOfLanes(Vec<float> v) {
#if HWY_TARGET == HWY_SCALAR
  return hn::GetLane(v);
#else
  return hn::GetLane(SumInBlocks(SumBlocks(Tag<float>(), v)));
#endif
}
HWY_INLINE double SumOfLanes(Vec<double> v) {
  return hn::GetLane(hn::SumOfLanes(Tag<double>(), v));
}

// Writes the first n < kLanes elements, and nothing behind them.
template <class T>
HWY_INLINE void StoreTail(Vec<T> v, int n, T* p) {
  const Tag<T> d;
#if HWY_TARGET <= HWY_AVX2 && HWY_ARCH_X86
  hn::BlendedStore(v, hn::FirstN(d, static_cast<size_t>(n)), d, p);
#else
  alignas(64) T room[kLanes<T>];
  hn::Store(v, d, room);
  for (int i = 0; i < n; i++) p[i] = room[i];
#endif
}

// A value of K or V for kRows rows: loaded once, unless one FMA alone can load it. A converted one is in a
// register anyway.
template <class KV, int kRows, class V>
HWY_INLINE V Shared(V v) {
  return kRows > 1 && sizeof(KV) == sizeof(hn::TFromV<V>) ? Pin(v) : v;
}

// Keys whose scores are made together.
constexpr int KeysOfTile(int rows) { return kSums / rows >= 4 ? 4 : 2; }

// One vector of the head dim for all rows and keys of a tile.
template <class KV, class T, int kRows, int kKeys, class Load>
HWY_INLINE void DotStep(const KV* (&key)[kKeys], int64_t u, const T* HWY_RESTRICT q,
                        int64_t q_stride, Vec<T> (&acc)[kRows][kKeys], Load load) {
  Vec<T> value[kKeys];
  Each<kKeys>([&](auto i) HWY_ATTR { value[i] = Shared<KV, kRows>(load(key[i] + u)); });
  Each<kRows>([&](auto r) HWY_ATTR {
    const Vec<T> qv = Pin(hn::Load(Tag<T>(), q + r * q_stride));
    Each<kKeys>([&](auto i) HWY_ATTR { acc[r][i] = hn::MulAdd(qv, value[i], acc[r][i]); });
  });
}

// s[r][x] = q[r] . k[x] for kRows rows and n keys, a strip at a time: up to three scores behind the
// last are garbage. q rows are padded with zeros to whole vectors.
template <class T, class KV, int kRows>
HWY_NOINLINE void DotRows(const KV* HWY_RESTRICT k, int64_t k_stride, int64_t dim,
                          const T* HWY_RESTRICT q, int64_t q_stride, T* HWY_RESTRICT s,
                          int64_t s_stride, int n, Ahead* next) {
  const Tag<T> d;
  constexpr int kKeys = KeysOfTile(kRows);
  Ahead ahead = *next;
  const int64_t whole = dim / kLanes<T> * kLanes<T>;
  const int tail = static_cast<int>(dim - whole);
  for (int x = 0; x < n; x += kKeys) {
    const KV* key[kKeys];
    key[0] = k + x * k_stride;
    Each<kKeys - 1>([&](auto i)
                        HWY_ATTR { key[i + 1] = x + i + 1 < n ? key[i] + k_stride : key[i]; });
    Vec<T> acc[kRows][kKeys];
    Each<kRows>([&](auto r)
                    HWY_ATTR { Each<kKeys>([&](auto i) HWY_ATTR { acc[r][i] = hn::Zero(d); }); });
    for (int64_t u = 0; u < whole; u += kLanes<T>) {
      ahead.step();
      DotStep<KV>(key, u, q + u, q_stride, acc, [](const KV* p) HWY_ATTR { return LoadKv(p); });
    }
    if (tail) {
      DotStep<KV>(key, whole, q + whole, q_stride, acc,
                  [=](const KV* p) HWY_ATTR { return LoadKvTail<T>(p, tail); });
    }
    T* to = s + x;
    if constexpr (kKeys == 4) {
      Each<kRows>([&](auto r) HWY_ATTR {
        StoreSums(acc[r][0], acc[r][1], acc[r][2], acc[r][3], to + r * s_stride);
      });
    } else {
      Each<(kRows + 1) / 2>([&](auto pair) HWY_ATTR {
        constexpr int kOne = 2 * pair, kOther = HWY_MIN(kOne + 1, kRows - 1);
        StoreSums2<T>(acc[kOne][0], acc[kOne][1], acc[kOther][0], acc[kOther][1],
                      to + kOne * s_stride, to + kOther * s_stride);
      });
    }
  }
  *next = ahead;
}

// out[r] += sum_x p[r][x] * v[x] for kRows rows, n keys and kVectors vectors of columns. With kTail
// there is one vector, of `tail` columns. out rows are whole aligned vectors.
template <class T, class KV, int kRows, int kVectors, bool kTail>
HWY_NOINLINE void AddRows(const KV* HWY_RESTRICT v, int64_t v_stride, int tail,
                          const T* HWY_RESTRICT p, int64_t p_stride, T* HWY_RESTRICT out,
                          int64_t out_stride, int n, Ahead* next) {
  const Tag<T> d;
  Ahead ahead = *next;
  Vec<T> acc[kRows][kVectors];
  const auto at = [&](int r, int c) HWY_ATTR { return out + r * out_stride + c * kLanes<T>; };
  Each<kRows>([&](auto r) HWY_ATTR {
    Each<kVectors>([&](auto c) HWY_ATTR { acc[r][c] = hn::Load(d, at(r, c)); });
  });
  for (int x = 0; x < n; x++, v += v_stride) {
    ahead.step();
    Vec<T> weight[kRows];
    Each<kRows>([&](auto r) HWY_ATTR { weight[r] = Pin(hn::Set(d, p[r * p_stride + x])); });
    Each<kVectors>([&](auto c) HWY_ATTR {
      const KV* from = v + c * kLanes<T>;
      const Vec<T> value = Shared<KV, kRows>(kTail ? LoadKvTail<T>(from, tail) : LoadKv(from));
      Each<kRows>([&](auto r) HWY_ATTR { acc[r][c] = hn::MulAdd(weight[r], value, acc[r][c]); });
    });
  }
  Each<kRows>([&](auto r) HWY_ATTR {
    Each<kVectors>([&](auto c) HWY_ATTR { hn::Store(acc[r][c], d, at(r, c)); });
  });
  *next = ahead;
}

// Calls body(first row, rows as a constant) for groups of at most kRowsAtOnce rows.
template <int kRows = kRowsAtOnce, class Body>
HWY_INLINE void ForRowGroups(int n, Body body, int begin = 0) {
  for (; begin + kRows <= n; begin += kRows) body(begin, std::integral_constant<int, kRows>());
  if constexpr (kRows > 1) {
    if (begin < n) ForRowGroups<kRows - 1>(n, body, begin);
  }
}

// Every row against n keys; meanwhile the rows of `next` are fetched, spread over all passes.
template <class T, class KV>
HWY_INLINE void Dot(const KV* k, int64_t k_stride, int64_t dim, const T* q, int64_t q_stride,
                    int rows, T* s, int64_t s_stride, int n, Ahead next) {
  const auto strips = [=](int tile_rows) HWY_ATTR {
    const int keys = KeysOfTile(tile_rows);
    return (n + keys - 1) / keys;
  };
  const int whole = rows / kRowsAtOnce, rest = rows % kRowsAtOnce;
  next.spread((whole * strips(kRowsAtOnce) + (rest ? strips(rest) : 0)) *
              ((dim + kLanes<T> - 1) / kLanes<T>));
  ForRowGroups(rows, [&](int r, auto count) HWY_ATTR {
    DotRows<T, KV, count>(k, k_stride, dim, q + r * q_stride, q_stride, s + r * s_stride, s_stride,
                          n, &next);
  });
}

template <class T, class KV>
HWY_INLINE void Add(const KV* v, int64_t v_stride, int64_t dim, const T* p, int64_t p_stride,
                    int rows, T* out, int64_t out_stride, int n, Ahead next) {
  const int64_t vectors = (dim + kLanes<T> - 1) / kLanes<T>;
  const int64_t passes = HWY_MAX((rows * vectors + kSums - 1) / kSums, int64_t{1});
  next.spread(passes * n);
  ForRowGroups(rows, [&](int r, auto count) HWY_ATTR {
    constexpr int kRows = count;
    constexpr int kMost = HWY_MIN((kSums + kRows - 1) / kRows, 8);
    const T* pr = p + r * p_stride;
    T* to = out + r * out_stride;
    int64_t c = 0;
    const auto columns = [&](auto number, auto is_tail, int tail) HWY_ATTR {
      AddRows<T, KV, kRows, number, is_tail>(v + c, v_stride, tail, pr, p_stride, to + c,
                                             out_stride, n, &next);
      c += number * kLanes<T>;
    };
    while (c + kMost * kLanes<T> <= dim)
      columns(std::integral_constant<int, kMost>(), std::false_type(), 0);
    const int left = static_cast<int>((dim - c) / kLanes<T>);  // 0 ... kMost - 1 vectors
    EachOf(std::make_integer_sequence<int, kMost>(), [&](auto number) HWY_ATTR {
      if constexpr (number > 0) {
        if (number == left) columns(number, std::false_type(), 0);
      }
    });
    if (c < dim)
      columns(std::integral_constant<int, 1>(), std::true_type(), static_cast<int>(dim - c));
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace qkv::kernels
HWY_AFTER_NAMESPACE();

#endif  // toggle
