// SPDX-License-Identifier: Apache-2.0
// Tier: command line. Reading and checking of q, k, v and mask.
#include "layer_input.h"

#include <fmt/format.h>

#include <cstdint>

namespace qkv::cli {
namespace {

bool is_aligned(const ConstTensor& t) {
  return reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(size_bytes(t.dtype)) == 0;
}

class Reader {
 public:
  Reader(const std::string& path, const LayerConfig& config)
      : path_(path), config_(config), file_(open(path)) {}

  LayerInput read() {
    const bool has_x = file_.find("x") != nullptr;
    const std::string q = has("q") ? "q" : "x";
    if (q == "x" && !has_x) {
      throw Error(
          fmt::format("{}: holds neither q nor x, but {}; name the tensors q, k, v, or x for "
                      "self-attention",
                      path_, names()));
    }
    if (q == "x") note("q", "x");
    const std::string k = stand_in("k", has_x ? "x" : q);
    const std::string v = stand_in("v", has_x ? "x" : k);
    input_.q = features(q, "dim_q", config_.dim_q, "fc_q", config_.num_heads * config_.head_dim_qk);
    input_.k =
        features(k, "dim_k", config_.dim_k, "fc_k", config_.num_kv_heads * config_.head_dim_qk);
    input_.v =
        features(v, "dim_v", config_.dim_v, "fc_v", config_.num_kv_heads * config_.head_dim_v);
    if (input_.k.shape[0] != input_.v.shape[0] || input_.k.shape[1] != input_.v.shape[1]) {
      mismatch(k, input_.k, v, input_.v, "batch and n_kv");
    }
    if (input_.q.shape[0] != input_.k.shape[0]) mismatch(q, input_.q, k, input_.k, "batch");
    read_mask();
    input_.files.push_back(file_);
    return std::move(input_);
  }

 private:
  static SafetensorsFile open(const std::string& path) try {
    return SafetensorsFile::open(path);
  } catch (const Error& e) {
    throw Error(fmt::format("{}; give a safetensors file that holds q, k and v, or x", e.what()));
  }

  bool has(const char* name) const { return file_.find(name) != nullptr; }

  std::string names() const {
    std::string text;
    for (const TensorInfo& t : file_.tensors()) {
      if (text.size() > 60) return text + " ...";
      text += (text.empty() ? "" : ", ") + t.name;
    }
    return text.empty() ? "no tensor" : text;
  }

  void note(const char* wanted, const std::string& taken) {
    input_.notes.push_back(fmt::format("{} is not in the file: {} is taken", wanted, taken));
  }

  std::string stand_in(const char* wanted, const std::string& other) {
    if (has(wanted)) return wanted;
    note(wanted, other);
    return other;
  }

  [[noreturn]] void mismatch(const std::string& a, const ConstTensor& ta, const std::string& b,
                             const ConstTensor& tb, const char* what) const {
    throw Error(fmt::format("{}: {} {} and {} {} differ in {}; make them equal", path_, a,
                            shape_text(ta), b, shape_text(tb), what));
  }

  // A tensor of the file in f32.
  ConstTensor f32(const std::string& name, const ConstTensor& t) {
    if (!info(t.dtype).is_float) {
      throw Error(fmt::format("{}: {} {} has element type {}; store it as f32, f64, f16 or bf16",
                              path_, name, shape_text(t), qkv::name(t.dtype)));
    }
    if (t.dtype == DType::f32 && is_aligned(t)) return t;
    input_.storage.push_back(to_f32(t));
    return ConstTensor(input_.storage.back().data(), DType::f32,
                       std::span<const int64_t>(t.shape, static_cast<size_t>(t.rank)));
  }

  ConstTensor features(const std::string& name, const char* dim, int64_t width,
                       const char* parameter, int64_t rows) {
    const ConstTensor t = file_.tensor(name);
    if (t.rank != 3) {
      throw Error(
          fmt::format("{}: {} {} has {} axes; store it as [batch, tokens, {}], here [batch, "
                      "tokens, {}]",
                      path_, name, shape_text(t), t.rank, dim, width));
    }
    if (t.shape[2] != width) {
      throw Error(
          fmt::format("{}: {} {} does not fit {}.weight [{}, {}] of the layer; its last axis "
                      "must be {} = {}",
                      path_, name, shape_text(t), parameter, rows, width, dim, width));
    }
    return f32(name, t);
  }

  void read_mask() {
    if (!has("mask")) return;
    const ConstTensor t = file_.tensor("mask");
    const int64_t batch = input_.q.shape[0], n_q = input_.q.shape[1], n_kv = input_.k.shape[1];
    const int64_t wanted[] = {batch, config_.num_heads, n_q, n_kv};
    bool fits = t.rank >= 2 && t.rank <= 4;
    for (int a = 0; fits && a < t.rank; ++a) {
      // The axes of a mask count from the right; the first of three is the batch.
      const int64_t want = t.rank == 3 && a == 0 ? batch : wanted[4 - t.rank + a];
      fits = t.shape[a] == want || t.shape[a] == 1;
    }
    if (!fits) {
      throw Error(fmt::format(
          "{}: mask {} does not fit q {} and k {}; store it as [batch, n_q, n_kv], "
          "here [{}, {}, {}]",
          path_, shape_text(t), shape_text(input_.q), shape_text(input_.k), batch, n_q, n_kv));
    }
    if (t.dtype == DType::boolean) {
      input_.mask = Mask::dense(t);
      input_.mask_text = fmt::format("boolean mask {} of the file (true = attend)", shape_text(t));
      return;
    }
    if (!info(t.dtype).is_float) {
      throw Error(
          fmt::format("{}: mask {} has element type {}; store it as a float type (added to the "
                      "scores) or bool (true = attend)",
                      path_, shape_text(t), qkv::name(t.dtype)));
    }
    input_.bias = f32("mask", t);
    input_.mask_text = fmt::format("additive mask {} of the file", shape_text(t));
  }

  std::string path_;
  const LayerConfig& config_;
  SafetensorsFile file_;
  LayerInput input_;
};

}  // namespace

LayerInput read_layer_input(const std::string& path, const LayerConfig& config) {
  return Reader(path, config).read();
}

}  // namespace qkv::cli
