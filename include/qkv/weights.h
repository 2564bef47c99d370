// SPDX-License-Identifier: Apache-2.0
// Tier: call. Weight files: safetensors (read by mapping, written atomically), npy, and the namings of layers.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "qkv/layer.h"
#include "qkv/tensor.h"

namespace qkv {

/// One entry of a file. Offsets count bytes from the start of the file.
struct TensorInfo {
  std::string name;
  DType dtype = DType::f32;
  std::vector<int64_t> shape;
  int64_t begin_bytes = 0;
  int64_t end_bytes = 0;
};

/// A safetensors file, mapped. Every offset, size, overlap, dtype and shape is checked in open(); errors carry the path and
/// the byte offset. Views stay valid while the object lives. Tensor data may start at any address.
class QKV_EXPORT SafetensorsFile {
 public:
  static SafetensorsFile open(const std::string& path);
  /// The same checks on bytes in memory (copied); name stands for the path in errors.
  static SafetensorsFile from_bytes(std::string_view bytes, const std::string& name = "memory");

  const std::vector<TensorInfo>& tensors() const;  ///< in the order of their offsets
  const std::map<std::string, std::string>& metadata() const;
  const TensorInfo* find(std::string_view name) const;  ///< nullptr if absent
  /// Throws Error if absent or of more than 4 axes.
  ConstTensor tensor(std::string_view name) const;
  const void* data(const TensorInfo& info) const;
  const std::string& path() const;

 private:
  struct Impl;
  explicit SafetensorsFile(std::shared_ptr<const Impl> impl);
  std::shared_ptr<const Impl> impl_;
};

struct NamedTensor {
  std::string name;
  ConstTensor tensor;  ///< any strides
};

/// Writes to a temporary file beside path, syncs, renames: the file appears whole or not at all.
QKV_EXPORT void save_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                                 const std::map<std::string, std::string>& metadata = {});

/// An npy file (versions 1 to 3, C or Fortran order, little endian), mapped. ConstTensor has the strides of the file.
class QKV_EXPORT NpyFile {
 public:
  static NpyFile open(const std::string& path);
  static NpyFile from_bytes(std::string_view bytes, const std::string& name = "memory");
  const TensorInfo& info() const;
  bool fortran_order() const;
  ConstTensor tensor() const;
  const std::string& path() const;

 private:
  struct Impl;
  explicit NpyFile(std::shared_ptr<const Impl> impl);
  std::shared_ptr<const Impl> impl_;
};
QKV_EXPORT void save_npy(const std::string& path, ConstTensor tensor);

/// A copy in f32, C order. f32, f64, f16, bf16 only.
QKV_EXPORT std::vector<float> to_f32(ConstTensor tensor);

/// How a file names the parameters of a layer. Any prefix that ends in a dot may stand in front ("model.layers.0.self_attn.").
///   lesson  fc_q.weight fc_q.bias fc_k.* fc_v.* fc_o.*
///   torch   in_proj_weight in_proj_bias, or q_proj_weight k_proj_weight v_proj_weight; out_proj.*; bias_k / bias_v are refused
///   bert    self.query.* self.key.* self.value.*, output.dense.* ("attention." is part of the prefix)
///   llama   q_proj.* k_proj.* v_proj.* o_proj.*, or fused qkv_proj.*
enum class Naming : uint8_t { automatic, lesson, torch, bert, llama };
QKV_EXPORT Naming naming_from_name(std::string_view name);  ///< "auto", "lesson", ...; throws Error
QKV_EXPORT std::string_view name(Naming naming);

struct LoadLayerOptions {
  Naming naming = Naming::automatic;
  int64_t num_heads = 0;     ///< 0: from the file's metadata
  int64_t num_kv_heads = 0;  ///< 0: from the file's metadata, else from the sizes
  /// Selects the layer where a file has several: the start of the names, "model.layers.0" or "model.layers.0.self_attn".
  /// Empty: the layer whose names have no prefix, else the only one.
  std::string prefix = {};
};

/// A layer that a file seems to hold: at least one of the names of its naming is there under this prefix.
struct LayerName {
  Naming naming = Naming::automatic;
  std::string prefix;  ///< up to the name itself: "model.layers.0.self_attn."
};
/// In the order of the namings, then of the prefixes. Whether a layer is complete shows when it is loaded.
QKV_EXPORT std::vector<LayerName> list_layers(const SafetensorsFile& file);

/// Reads a layer. Sizes come from the shapes and must agree with each other and with the metadata; both shapes are named
/// if they do not. Unknown tensors and metadata are ignored; absent biases are absent.
QKV_EXPORT LayerWeights load_layer(const std::string& path, const LoadLayerOptions& options = {});
QKV_EXPORT LayerWeights load_layer(const SafetensorsFile& file,
                                   const LoadLayerOptions& options = {});
/// Writes with the lesson's names and num_heads / num_kv_heads in the metadata; scale and softcap as "qkv.scale" and
/// "qkv.softcap" if they are not the defaults. load_layer() reads these four.
QKV_EXPORT void save_layer(const std::string& path, const LayerWeights& weights);

}  // namespace qkv
