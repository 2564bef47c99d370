// SPDX-License-Identifier: Apache-2.0
// Tier: call. Element types: one table from which names, sizes and file tags are read.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace qkv {

/// Storage types of the 16-bit floating-point formats; arithmetic happens in f32.
struct bf16_t {
  uint16_t bits;
};
struct f16_t {
  uint16_t bits;
};

enum class DType : uint8_t { f32, f64, bf16, f16, i8, u8, i16, u16, i32, u32, i64, u64, boolean };

struct DTypeInfo {
  DType dtype;
  std::string_view name;         // "f32"
  std::string_view safetensors;  // tag in a safetensors header
  std::string_view npy;          // npy descr without the byte-order mark; empty: not a npy type
  int bytes;
  bool is_float;
};

/// One row per element type, in the order of the enumeration.
inline constexpr std::array<DTypeInfo, 13> kDTypes = {{
    {DType::f32, "f32", "F32", "f4", 4, true},
    {DType::f64, "f64", "F64", "f8", 8, true},
    {DType::bf16, "bf16", "BF16", "", 2, true},
    {DType::f16, "f16", "F16", "f2", 2, true},
    {DType::i8, "i8", "I8", "i1", 1, false},
    {DType::u8, "u8", "U8", "u1", 1, false},
    {DType::i16, "i16", "I16", "i2", 2, false},
    {DType::u16, "u16", "U16", "u2", 2, false},
    {DType::i32, "i32", "I32", "i4", 4, false},
    {DType::u32, "u32", "U32", "u4", 4, false},
    {DType::i64, "i64", "I64", "i8", 8, false},
    {DType::u64, "u64", "U64", "u8", 8, false},
    {DType::boolean, "bool", "BOOL", "b1", 1, false},
}};

constexpr const DTypeInfo& info(DType t) { return kDTypes[static_cast<size_t>(t)]; }
constexpr int64_t size_bytes(DType t) { return info(t).bytes; }
constexpr std::string_view name(DType t) { return info(t).name; }

/// The element type of a C++ type: dtype_of<float>() == DType::f32.
template <class T>
constexpr DType dtype_of();
// clang-format off
template <> constexpr DType dtype_of<float>() { return DType::f32; }
template <> constexpr DType dtype_of<double>() { return DType::f64; }
template <> constexpr DType dtype_of<bf16_t>() { return DType::bf16; }
template <> constexpr DType dtype_of<f16_t>() { return DType::f16; }
template <> constexpr DType dtype_of<int8_t>() { return DType::i8; }
template <> constexpr DType dtype_of<uint8_t>() { return DType::u8; }
template <> constexpr DType dtype_of<int16_t>() { return DType::i16; }
template <> constexpr DType dtype_of<uint16_t>() { return DType::u16; }
template <> constexpr DType dtype_of<int32_t>() { return DType::i32; }
template <> constexpr DType dtype_of<uint32_t>() { return DType::u32; }
template <> constexpr DType dtype_of<int64_t>() { return DType::i64; }
template <> constexpr DType dtype_of<uint64_t>() { return DType::u64; }
template <> constexpr DType dtype_of<bool>() { return DType::boolean; }
// clang-format on

/// Scalar conversions of the 16-bit formats (round to nearest even; NaN stays NaN). dtype.cpp.
float to_float(bf16_t x);
float to_float(f16_t x);
bf16_t to_bf16(float x);
f16_t to_f16(float x);

}  // namespace qkv
