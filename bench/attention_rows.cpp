// SPDX-License-Identifier: Apache-2.0
// Tier: benchmark. attention() over the table of cases.h, as a fraction of the FMA peak. Useful flop only:
// 2 * visible pairs * (head_dim_qk + head_dim_v).
#include <memory>

#include "rows.h"

namespace qkv::bench {
namespace {

struct Arrays {
  Buffer memory;
  ConstTensor q, k, v;
  AttentionOutputs outputs;
  AttentionOptions options;

  Arrays(const AttentionCase& c, int num_threads) : memory(4 * (2 * q_size(c) + 2 * kv_size(c))) {
    float *q_data = memory.floats(), *k_data = q_data + q_size(c), *v_data = k_data + kv_size(c),
          *out_data = v_data + kv_size(c);
    fill_normal(q_data, q_size(c) + 2 * kv_size(c));
    q = ConstTensor(q_data, {c.batch, c.num_heads, c.n_q, c.head_dim});
    k = ConstTensor(k_data, {c.batch, c.num_kv_heads, c.n_kv, c.head_dim});
    v = ConstTensor(v_data, {c.batch, c.num_kv_heads, c.n_kv, c.head_dim});
    outputs.out = Tensor(out_data, {c.batch, c.num_heads, c.n_q, c.head_dim});
    options.mask = mask_of(c.mask), options.num_threads = num_threads;
  }
  static int64_t q_size(const AttentionCase& c) {
    return c.batch * c.num_heads * c.n_q * c.head_dim;
  }
  static int64_t kv_size(const AttentionCase& c) {
    return c.batch * c.num_kv_heads * c.n_kv * c.head_dim;
  }
};

Run prepare(const AttentionCase& c, int num_threads) {
  const auto a = std::make_shared<Arrays>(c, num_threads);
  Run run;
  run.call = [a] { attention(a->q, a->k, a->v, a->outputs, a->options); };
  run.call();
  run.error = forward_error(a->q, a->k, a->v, a->outputs.out, a->options.mask);
  run.work.flop =
      4.0 * static_cast<double>(c.head_dim) *
      static_cast<double>(a->options.mask.count_visible({c.batch, c.num_heads, c.n_q, c.n_kv}));
  run.work.num_threads = num_threads;
  run.work.reach = reach_of(c.reach_avx512, c.reach_avx2);
  return run;
}

}  // namespace

std::vector<Row> attention_rows() {
  std::vector<Row> rows;
  for (const AttentionCase& c : kAttentionCases)
    rows.push_back({std::string("attention/") + c.name, [&c](int n) { return prepare(c, n); }});
  return rows;
}

}  // namespace qkv::bench
