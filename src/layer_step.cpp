// SPDX-License-Identifier: Apache-2.0
// Tier: call. AttentionLayer on a KvCache: step() for self-attention, project_kv() and attend() for
// cross-attention. Nothing changes before all checks have passed.
#include <fmt/format.h>

#include "layer_impl.h"
#include "qkv/kv_cache.h"

namespace qkv {
namespace {

void check_input(const Check& check, const ConstTensor& t, const char* what, int64_t batch,
                 int64_t width) {
  if (t.rank != 3 || t.shape[0] != batch || t.shape[2] != width)
    check.refuse(
        fmt::format("{} needs shape [{}, n, {}], got {}", what, batch, width, shape_text(t)));
  if (t.dtype != DType::f32)
    check.refuse(fmt::format("{} must be f32, got {}", what, name(t.dtype)));
  check.layout(t, what);
}

void check_cache(const Check& check, const LayerConfig& c, const KvCacheConfig& k) {
  if (k.num_kv_heads != c.num_kv_heads || k.head_dim_qk != c.head_dim_qk ||
      k.head_dim_v != c.head_dim_v)
    check.refuse(fmt::format(
        "the cache is of another layer: num_kv_heads, head_dim_qk and head_dim_v "
        "{}, {}, {}, and here {}, {}, {}",
        k.num_kv_heads, k.head_dim_qk, k.head_dim_v, c.num_kv_heads, c.head_dim_qk, c.head_dim_v));
  if (k.dtype == DType::f64) check.refuse("the cache must not be f64: the layer computes in f32");
}

void check_outputs(const Check& check, const LayerConfig& c, int64_t batch, int64_t n, int64_t n_kv,
                   const LayerOutputs& outputs) {
  if (outputs.output) {
    check.output(outputs.output, "outputs.output", {batch, n, c.dim_out}, DType::f32);
    check.layout(outputs.output, "outputs.output");
  }
  if (outputs.weights) {
    check.output(outputs.weights, "outputs.weights",
                 {layer_times(check, c.num_heads, batch), n, n_kv}, DType::f32);
    check.layout(outputs.weights, "outputs.weights");
  }
}

ProjectionJob job_to(const Projection& projection, const ConstTensor& x, const LayerHeads& to) {
  ProjectionJob j;
  j.projection = &projection;
  j.groups = x.shape[0], j.rows = x.shape[1];
  j.x = static_cast<const float*>(x.data);
  j.x_group_stride = x.stride[0], j.x_row_stride = x.stride[1];
  j.y = to.data, j.y_group_stride = to.batch_stride, j.y_row_stride = to.row_stride;
  j.y_head = to.y_head, j.y_head_stride = to.y_head_stride;
  join_groups(&j);
  return j;
}

// Memory for some projected tensors, one behind the other.
void use_memory(const Check& check, ScratchBuffer* memory, std::initializer_list<LayerHeads*> all) {
  int64_t floats = 0;
  for (const LayerHeads* h : all) floats += h->floats;
  auto* at = static_cast<float*>(memory->reserve(layer_times(check, floats, 4)));
  for (LayerHeads* h : all) h->data = at, at += h->floats;
}

// Attends from the projected q, then projects into outputs.output.
void attend_and_project(const LayerConfig& c, const Projection& o, const LayerHeads& hq,
                        const LayerHeads& ho, int64_t batch, int64_t n, const KvCache& cache,
                        const LayerOutputs& outputs, const AttentionOptions& options,
                        bool are_outside) {
  AttentionOutputs results;
  if (outputs.output) results.out = ho.view(batch, c.num_heads, n, c.head_dim_v);
  if (const Tensor& t = outputs.weights) {
    results.weights = Tensor(static_cast<float*>(t.data), {batch, c.num_heads, n, t.shape[2]},
                             {t.stride[0], batch * t.stride[0], t.stride[1], 1});
  }
  cache.attend(hq.view(batch, c.num_heads, n, c.head_dim_qk), results, options,
               {.are_outside = are_outside});
  if (!outputs.output) return;
  ProjectionJob last;
  last.projection = &o;
  last.groups = batch, last.rows = n;
  last.x = ho.data, last.x_group_stride = ho.batch_stride, last.x_row_stride = ho.row_stride;
  last.y = static_cast<float*>(outputs.output.data);
  last.y_group_stride = outputs.output.stride[0], last.y_row_stride = outputs.output.stride[1];
  join_groups(&last);
  project({&last, 1}, options.num_threads, options.executor);
}

}  // namespace

KvCacheConfig AttentionLayer::cache_config(int64_t batch, int64_t capacity) const {
  const LayerConfig& c = impl_->config;
  KvCacheConfig k;
  k.batch = batch, k.capacity = capacity;
  k.num_kv_heads = c.num_kv_heads, k.head_dim_qk = c.head_dim_qk, k.head_dim_v = c.head_dim_v;
  return k;
}

void AttentionLayer::step(ConstTensor x, KvCache& cache, const LayerOutputs& outputs,
                          const LayerOptions& options) const {
  const Check check("AttentionLayer::step");
  const LayerConfig& c = impl_->config;
  if (c.dim_q != c.dim_k || c.dim_q != c.dim_v)
    check.refuse(fmt::format("self-attention needs one width, got dim_q {}, dim_k {} and dim_v {}",
                             c.dim_q, c.dim_k, c.dim_v));
  check_cache(check, c, cache.config());
  const int64_t batch = cache.config().batch;
  check_input(check, x, "x", batch, c.dim_q);
  const int64_t n = x.shape[1];
  check_outputs(check, c, batch, n, cache.longest() + n, outputs);
  LayerHeads hq = heads_of(check, impl_->q, batch, n, c.num_heads, c.head_dim_qk);
  LayerHeads hk = heads_of(check, impl_->k, batch, n, c.num_kv_heads, c.head_dim_qk);
  LayerHeads hv = heads_of(check, impl_->v, batch, n, c.num_kv_heads, c.head_dim_v);
  LayerHeads ho = token_major(check, batch, n, c.num_heads, c.head_dim_v);
  ScratchBuffer memory;
  use_memory(check, &memory, {&hq, &hk, &hv, &ho});
  const ProjectionJob jobs[] = {job_to(impl_->q, x, hq), job_to(impl_->k, x, hk),
                                job_to(impl_->v, x, hv)};
  project(jobs, options.num_threads, options.executor);
  const std::vector<int64_t> before(cache.lengths().begin(), cache.lengths().end());
  cache.append(hk.view(batch, c.num_kv_heads, n, c.head_dim_qk),
               hv.view(batch, c.num_kv_heads, n, c.head_dim_v));
  try {
    attend_and_project(c, impl_->o, hq, ho, batch, n, cache, outputs,
                       impl_->attention_options(options), false);
  } catch (...) {
    cache.truncate(before);
    throw;
  }
}

void AttentionLayer::project_kv(ConstTensor k, ConstTensor v, KvCache& cache,
                                const LayerOptions& options) const {
  const Check check("AttentionLayer::project_kv");
  const LayerConfig& c = impl_->config;
  check_cache(check, c, cache.config());
  const int64_t batch = cache.config().batch;
  check_input(check, k, "k", batch, c.dim_k);
  check_input(check, v, "v", batch, c.dim_v);
  const int64_t n = k.shape[1];
  if (v.shape[1] != n)
    check.refuse(
        fmt::format("n of k and v differ, got k {} and v {}", shape_text(k), shape_text(v)));
  LayerHeads hk = heads_of(check, impl_->k, batch, n, c.num_kv_heads, c.head_dim_qk);
  LayerHeads hv = heads_of(check, impl_->v, batch, n, c.num_kv_heads, c.head_dim_v);
  ScratchBuffer memory;
  use_memory(check, &memory, {&hk, &hv});
  const ProjectionJob jobs[] = {job_to(impl_->k, k, hk), job_to(impl_->v, v, hv)};
  project(jobs, options.num_threads, options.executor);
  cache.append(hk.view(batch, c.num_kv_heads, n, c.head_dim_qk),
               hv.view(batch, c.num_kv_heads, n, c.head_dim_v));
}

void AttentionLayer::attend(ConstTensor q, const KvCache& cache, const LayerOutputs& outputs,
                            const LayerOptions& options) const {
  const Check check("AttentionLayer::attend");
  const LayerConfig& c = impl_->config;
  check_cache(check, c, cache.config());
  const int64_t batch = cache.config().batch;
  check_input(check, q, "q", batch, c.dim_q);
  const int64_t n = q.shape[1];
  check_outputs(check, c, batch, n, cache.longest(), outputs);
  LayerHeads hq = heads_of(check, impl_->q, batch, n, c.num_heads, c.head_dim_qk);
  LayerHeads ho = token_major(check, batch, n, c.num_heads, c.head_dim_v);
  ScratchBuffer memory;
  use_memory(check, &memory, {&hq, &ho});
  const ProjectionJob jobs[] = {job_to(impl_->q, q, hq)};
  project(jobs, options.num_threads, options.executor);
  attend_and_project(c, impl_->o, hq, ho, batch, n, cache, outputs,
                     impl_->attention_options(options), true);
}

}  // namespace qkv
