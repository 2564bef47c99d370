// SPDX-License-Identifier: Apache-2.0
// Tier: benchmark. Few queries against long caches, over the table of cases.h: bytes of K, V and scales per second as a
// fraction of the plain read bandwidth (or of the FMA peak). Several caches are used in turn, so that K and V come from
// memory.
#include <algorithm>
#include <memory>

#include "element.h"
#include "reference.h"
#include "rows.h"

namespace qkv::bench {
namespace {

// K and V of one batch: tensors of the caller, or a KvCache.
struct Keys {
  ConstTensor k, v;
  std::unique_ptr<KvCache> cache;
};

class Caches {
 public:
  Caches(const DecodeCase& c, int num_threads)
      : c_(c),
        q_(normal(c.batch * c.num_heads * c.n_q * c.head_dim)),
        out_(q_.size()),
        count_(std::max<int64_t>(2, memory_bytes() / bytes())),
        memory_(c.store == DecodeStore::tensors ? count_ * bytes() : 0) {
    options_.num_threads = num_threads;
    for (int64_t i = 0; i < count_; ++i) keys_.push_back(make_keys(i));
  }

  int64_t bytes() const {
    const int64_t rows = 2 * c_.batch * c_.num_kv_heads * c_.n_kv;
    return rows * (c_.head_dim * size_bytes(c_.kv_dtype) + (c_.kv_dtype == DType::i8 ? 4 : 0));
  }
  void attend() {
    at_ = (at_ + 1) % count_;
    const Keys& keys = keys_[static_cast<size_t>(at_)];
    AttentionOutputs outputs;
    outputs.out = Tensor(out_.data(), {c_.batch, c_.num_heads, c_.n_q, c_.head_dim});
    if (keys.cache) {
      keys.cache->attend(queries(), outputs, options_);
    } else {
      attention(queries(), keys.k, keys.v, outputs, options_);
    }
  }
  // Of what attend() made last.
  double error() const {
    const Keys& keys = keys_[static_cast<size_t>(at_)];
    const ConstTensor out(out_.data(), {c_.batch, c_.num_heads, c_.n_q, c_.head_dim});
    if (!keys.cache) return forward_error(queries(), keys.k, keys.v, out, Mask::full());
    const int64_t b = c_.batch - 1, h = c_.num_heads - 1;
    std::vector<double> k, v;
    for (const KvCacheSegment& s : keys.cache->segments(b, c_.num_kv_heads - 1))
      add_numbers(s.k, s.k_scale, &k), add_numbers(s.v, s.v_scale, &v);
    const std::vector<double> want =
        reference::forward(tokens(queries(), b, h, c_.n_q - 1, 1),
                           ConstTensor(k.data(), {1, 1, c_.n_kv, c_.head_dim}),
                           ConstTensor(v.data(), {1, 1, c_.n_kv, c_.head_dim}))
            .out;
    return largest_error(out_.data() + out_.size() - c_.head_dim, want);
  }

 private:
  ConstTensor queries() const {
    return ConstTensor(q_.data(), {c_.batch, c_.num_heads, c_.n_q, c_.head_dim});
  }
  Keys make_keys(int64_t i) {
    const int64_t size = c_.batch * c_.num_kv_heads * c_.n_kv * c_.head_dim;
    const std::vector<int64_t> shape = {c_.batch, c_.num_kv_heads, c_.n_kv, c_.head_dim};
    const std::vector<float> k = normal(size), v = normal(size);
    Keys keys;
    if (c_.store == DecodeStore::tensors) {
      char* at = static_cast<char*>(memory_.data()) + i * bytes();
      keys.k = stored(k, at, shape), keys.v = stored(v, at + bytes() / 2, shape);
      return keys;
    }
    KvCacheConfig config;
    config.batch = c_.batch, config.num_kv_heads = c_.num_kv_heads, config.capacity = c_.n_kv;
    config.head_dim_qk = config.head_dim_v = c_.head_dim, config.dtype = c_.kv_dtype;
    if (c_.store == DecodeStore::paged) config.kind = KvCacheKind::paged;
    keys.cache = std::make_unique<KvCache>(config);
    keys.cache->append(ConstTensor(k.data(), DType::f32, shape),
                       ConstTensor(v.data(), DType::f32, shape));
    return keys;
  }
  ConstTensor stored(const std::vector<float>& x, void* to, const std::vector<int64_t>& shape) {
    for (size_t i = 0; i < x.size(); ++i) {
      if (c_.kv_dtype == DType::bf16) {
        static_cast<bf16_t*>(to)[i] = to_bf16(x[i]);
      } else if (c_.kv_dtype == DType::f16) {
        static_cast<f16_t*>(to)[i] = to_f16(x[i]);
      } else {
        static_cast<float*>(to)[i] = x[i];
      }
    }
    return ConstTensor(to, c_.kv_dtype, shape);
  }
  // The numbers that a segment [count, dim] stands for.
  static void add_numbers(const ConstTensor& t, const ConstTensor& scale,
                          std::vector<double>* numbers) {
    for (int64_t i = 0; i < t.shape[0]; ++i) {
      const double s = scale ? element(scale, i * scale.stride[0]) : 1;
      for (int64_t d = 0; d < t.shape[1]; ++d)
        numbers->push_back(s * element(t, i * t.stride[0] + d * t.stride[1]));
    }
  }

  const DecodeCase& c_;
  AttentionOptions options_;
  std::vector<float> q_, out_;
  int64_t count_, at_ = 0;
  Buffer memory_;
  std::vector<Keys> keys_;
};

Run prepare(const DecodeCase& c, int num_threads) {
  if (c.num_threads > 0) num_threads = c.num_threads;
  const auto caches = std::make_shared<Caches>(c, num_threads);
  Run run;
  run.call = [caches] { caches->attend(); };
  run.call();
  run.error = caches->error();
  run.work.bytes = static_cast<double>(caches->bytes());
  run.work.roof_bytes = static_cast<double>(memory_bytes());
  if (c.is_compute_bound)
    run.work.flop = 4.0 * static_cast<double>(c.batch * c.num_heads * c.n_q * c.n_kv * c.head_dim);
  run.work.num_threads = num_threads;
  run.work.reach = c.reach;
  return run;
}

}  // namespace

std::vector<Row> decode_rows() {
  std::vector<Row> rows;
  for (const DecodeCase& c : kDecodeCases)
    rows.push_back({std::string("decode/") + c.name, [&c](int n) { return prepare(c, n); }});
  return rows;
}

}  // namespace qkv::bench
