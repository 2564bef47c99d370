// SPDX-License-Identifier: Apache-2.0
// Tier: schedule. Cuts a validated backward call into tasks without atomics on results: dq of a row
// belongs to one task; dk and dv are summed per part of the rows and the parts added in order. What
// the bits depend on is the cut, and that is made by shape alone.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "backward.h"
#include "checked_sizes.h"
#include "element.h"
#include "task.h"

namespace qkv {
namespace {

using kernels::BackwardTask;

// Rows of a bias that a task of the pass for shared biases takes at least, in key blocks.
constexpr int64_t kBiasBlocks = 4;

class BackwardSchedule {
 public:
  explicit BackwardSchedule(const BackwardCall& backward)
      : b_(backward),
        c_(backward.call),
        cut_(backward_cut(*c_.kernels, c_.arithmetic, c_.num_kv_heads, c_.group_size, c_.n_q)),
        maker_(c_,
               c_.kernels->backward_scratch_bytes[c_.arithmetic](c_.head_dim_qk, c_.head_dim_v)),
        pairs_(c_.batch * c_.num_kv_heads),
        rows_(c_.n_q * c_.group_size),
        part_elements_(
            part_elements(*c_.kernels, c_.arithmetic, c_.n_kv, c_.head_dim_qk, c_.head_dim_v)),
        threads_wanted_(c_.options->num_threads ? c_.options->num_threads : default_num_threads()) {
    const BackwardOutputs& o = b_.outputs;
    const auto numbers = [&](bool wanted, std::vector<double>* v) {
      if (wanted) v->resize(static_cast<size_t>(pairs_ * rows_));
    };
    numbers(static_cast<bool>(o.dsinks), &dlogsum_);
    numbers(static_cast<bool>(o.dalibi_slopes), &dslope_);
    numbers(static_cast<bool>(o.dscale), &dscale_);
    if (o.dbias) {
      bias_ = score_strides(o.dbias);
      // Within the products of a task if no other task adds to the same elements.
      is_bias_own_ = (bias_.batch != 0 || c_.batch == 1) &&
                     (bias_.head != 0 || c_.num_kv_heads == 1) &&
                     (bias_.query != 0 || cut_.parts == 1);
    }
  }

  void run() {
    const BackwardOutputs& o = b_.outputs;
    if (o.dbias && !is_bias_own_) run_bias();
    if (o.dq || o.dk || o.dv || o.dsinks || o.dalibi_slopes || o.dscale ||
        (o.dbias && is_bias_own_)) {
      run_products();
    }
    store_sums();
  }

 private:
  // f(item) for all items, on as many threads as are worth it.
  template <class F>
  void for_items(int64_t items, int64_t item_flop, const std::vector<int64_t>& order, F f) const {
    const int threads = useful_threads(item_flop, items, threads_wanted_);
    if (threads <= 1) {
      for (int64_t i = 0; i < items; ++i) f(i);
      return;
    }
    struct Context {
      F* f;
      const std::vector<int64_t>* order;
      int64_t items, batch;
    };
    // Small items go out in batches of about 50 us.
    const int64_t batch = std::max<int64_t>(1, 10'000'000 / std::max<int64_t>(item_flop, 1));
    Context context{&f, &order, items, batch};
    Executor& executor = c_.options->executor ? *c_.options->executor : default_executor();
    executor.run((items + batch - 1) / batch, threads,
                 [](void* self, int64_t ticket) {
                   const Context& x = *static_cast<Context*>(self);
                   for (int64_t i = ticket * x.batch; i < std::min(x.items, (ticket + 1) * x.batch);
                        ++i) {
                     (*x.f)(x.order->empty() ? i : (*x.order)[static_cast<size_t>(i)]);
                   }
                 },
                 &context);
  }

  // The longest first, by the keys that the middle token of an item sees.
  std::vector<int64_t> longest_first(int64_t first_pair, int64_t items, int64_t parts) const {
    std::vector<int64_t> order;
    if (!maker_.has_ranges() || c_.n_q == 0) return order;
    std::vector<int64_t> keys(static_cast<size_t>(items));
    for (int64_t i = 0; i < items; ++i) {
      const int64_t pair = first_pair + i / parts;
      const int64_t begin = parts == 1 ? 0 : i % parts * cut_.part_tokens;
      const int64_t end = parts == 1 ? c_.n_q : std::min(begin + cut_.part_tokens, c_.n_q);
      RowRange range;
      c_.options->mask.row_ranges(c_.mask_shape(), pair / c_.num_kv_heads, (begin + end) / 2, 1,
                                  &range);
      keys[static_cast<size_t>(i)] = range.hi - range.lo;
    }
    order.resize(static_cast<size_t>(items));
    std::iota(order.begin(), order.end(), int64_t{0});
    std::stable_sort(order.begin(), order.end(), [&](int64_t x, int64_t y) {
      return keys[static_cast<size_t>(x)] > keys[static_cast<size_t>(y)];
    });
    return order;
  }

  int64_t bytes() const { return c_.arithmetic_bytes(); }
  char* dk_of(char* part) const { return part; }
  char* dv_of(char* part) const {
    const int64_t elements =
        c_.n_kv * c_.kernels->backward_row_elements[c_.arithmetic](c_.head_dim_v);
    const int64_t align = kernels::kAlignment / bytes();
    return part + (part_elements_ - (elements + align - 1) / align * align) * bytes();
  }

  // A kernel call for some rows: operands only.
  BackwardTask make_task(const TaskPlace& place, TaskMemory* memory) const {
    BackwardTask t{};
    t.attention = maker_.make(place, memory);
    const int64_t head = place.h_kv * c_.group_size;
    const auto at = [&](const auto& x) {
      return element_pointer(x, place.b * x.stride[0] + head * x.stride[1]);
    };
    t.out = at(b_.out), t.out_head_stride = b_.out.stride[1], t.out_token_stride = b_.out.stride[2];
    t.dout = at(b_.dout), t.dout_head_stride = b_.dout.stride[1],
    t.dout_token_stride = b_.dout.stride[2];
    t.lse = at(b_.lse), t.lse_head_stride = b_.lse.stride[1], t.lse_token_stride = b_.lse.stride[2];
    if (b_.dlse) {
      t.dlse = at(b_.dlse);
      t.dlse_head_stride = b_.dlse.stride[1], t.dlse_token_stride = b_.dlse.stride[2];
    }
    return t;
  }

  void add_dbias(const TaskPlace& place, BackwardTask* t) const {
    const Tensor& d = b_.outputs.dbias;
    t->dbias = element_pointer(d, bias_.offset(place.b, place.h_kv * c_.group_size, 0, 0));
    t->dbias_token_stride = bias_.query, t->dbias_head_stride = bias_.head,
    t->dbias_key_stride = bias_.key;
  }

  void clear_dbias(int64_t b, int64_t h_kv, int64_t token_begin, int64_t token_end,
                   int64_t kv_begin, int64_t kv_end) const {
    const Tensor& d = b_.outputs.dbias;
    const int64_t heads = bias_.head ? c_.group_size : 1, n = bias_.key ? kv_end - kv_begin : 1;
    const int64_t tokens = bias_.query ? token_end - token_begin : 1;
    for (int64_t g = 0; g < heads; ++g) {
      for (int64_t i = 0; i < tokens; ++i) {
        const int64_t at = bias_.offset(b, h_kv * c_.group_size + g, token_begin + i, kv_begin);
        if (bias_.key == 1) {
          std::memset(element_pointer(d, at), 0, static_cast<size_t>(n * bytes()));
        } else {
          for (int64_t j = 0; j < n; ++j) store_element(d, at + j * bias_.key, 0);
        }
      }
    }
  }

  // Kernel calls for the tokens of a part.
  template <class F>
  void for_blocks(int64_t b, int64_t h_kv, int64_t token_begin, int64_t token_end, F f) const {
    const int64_t end = token_end * c_.group_size;
    for (int64_t row = token_begin * c_.group_size; row < end; row += cut_.task_rows) {
      f(TaskPlace{b, h_kv, row, std::min(cut_.task_rows, end - row)});
    }
  }

  void run_part(int64_t pair, int64_t part, char* sums) const {
    thread_local TaskMemory memory;
    const int64_t b = pair / c_.num_kv_heads, h_kv = pair % c_.num_kv_heads;
    const int64_t begin = part * cut_.part_tokens, end = std::min(begin + cut_.part_tokens, c_.n_q);
    const BackwardOutputs& o = b_.outputs;
    if ((o.dk || o.dv) && sums) std::memset(sums, 0, static_cast<size_t>(part_elements_ * bytes()));
    if (o.dbias && is_bias_own_) clear_dbias(b, h_kv, begin, end, 0, c_.n_kv);
    for_blocks(b, h_kv, begin, end, [&](const TaskPlace& place) {
      BackwardTask t = make_task(place, &memory);
      if (o.dq) {
        t.dq = element_pointer(o.dq, b * o.dq.stride[0] + h_kv * c_.group_size * o.dq.stride[1]);
        t.dq_head_stride = o.dq.stride[1], t.dq_token_stride = o.dq.stride[2];
      }
      if (o.dk) t.dk = dk_of(sums);
      if (o.dv) t.dv = dv_of(sums);
      if (o.dbias && is_bias_own_) add_dbias(place, &t);
      const auto numbers = [&](const std::vector<double>& v) {
        return v.empty() ? nullptr : const_cast<double*>(v.data()) + pair * rows_ + place.row_begin;
      };
      t.dlogsum = numbers(dlogsum_), t.dslope = numbers(dslope_), t.dscale = numbers(dscale_);
      c_.kernels->backward[c_.arithmetic](t);
    });
  }

  // dk and dv of a pair from its parts.
  void add_parts(int64_t pair, char* sums) const {
    const int64_t b = pair / c_.num_kv_heads, h_kv = pair % c_.num_kv_heads;
    const auto add = [&](const Tensor& t, char* first, int64_t dim, double factor) {
      if (!t) return;
      kernels::SumTask s{};
      s.parts = first, s.n_parts = cut_.parts, s.part_stride = part_elements_;
      s.row_stride = c_.kernels->backward_row_elements[c_.arithmetic](dim);
      s.n_rows = c_.n_kv, s.dim = dim, s.factor = factor;
      s.out = element_pointer(t, b * t.stride[0] + h_kv * t.stride[1]);
      s.out_dtype = t.dtype, s.out_row_stride = t.stride[2];
      c_.kernels->sum_parts[c_.arithmetic](s);
    };
    add(b_.outputs.dk, dk_of(sums), c_.head_dim_qk, c_.scale);
    add(b_.outputs.dv, dv_of(sums), c_.head_dim_v, 1);
  }

  void run_products() {
    const int64_t dims = 3 * c_.head_dim_qk + 2 * c_.head_dim_v;
    const int64_t part_flop = 2 * cut_.part_tokens * c_.group_size * c_.n_kv * dims;
    const int64_t pair_bytes = cut_.parts * part_elements_ * bytes();
    if (!splits_parts(cut_, pairs_, threads_wanted_)) {
      for_items(pairs_, cut_.parts * part_flop, longest_first(0, pairs_, 1), [&](int64_t pair) {
        thread_local ScratchBuffer buffer;
        char* sums = static_cast<char*>(buffer.reserve(pair_bytes));
        for (int64_t part = 0; part < cut_.parts; ++part) {
          run_part(pair, part, sums + part * part_elements_ * bytes());
        }
        add_parts(pair, sums);
      });
      return;
    }
    const int64_t at_once = pairs_at_once(cut_, pairs_, threads_wanted_);
    ScratchBuffer buffer;  // large: given back at the end of the call
    char* sums = static_cast<char*>(buffer.reserve(at_once * pair_bytes));
    const auto missing = std::make_unique<std::atomic<int64_t>[]>(static_cast<size_t>(at_once));
    for (int64_t first = 0; first < pairs_; first += at_once) {
      const int64_t n = std::min(at_once, pairs_ - first);
      for (int64_t i = 0; i < n; ++i) missing[static_cast<size_t>(i)] = cut_.parts;
      for_items(
          n * cut_.parts, part_flop, longest_first(first, n * cut_.parts, cut_.parts),
          [&](int64_t item) {
            const int64_t slot = item / cut_.parts, part = item % cut_.parts;
            char* own = sums + slot * pair_bytes;
            run_part(first + slot, part, own + part * part_elements_ * bytes());
            if (missing[static_cast<size_t>(slot)].fetch_sub(1, std::memory_order_acq_rel) == 1) {
              add_parts(first + slot, own);
            }
          });
    }
  }

  // A bias that several pairs share: scores and their gradients once more, cut by elements of dbias,
  // so that each element is one task's. Everything that adds to it comes in order.
  void run_bias() const {
    const int64_t step =
        cut_.task_rows / std::gcd(cut_.task_rows, std::max<int64_t>(c_.group_size, 1));
    const int64_t block_keys = kBiasBlocks * c_.kernels->tile_kv;
    const int64_t tokens = bias_.query ? step : c_.n_q;
    const int64_t keys = bias_.query == 0 && bias_.key != 0 ? block_keys : c_.n_kv;
    const auto pieces = [](int64_t n, int64_t size) { return n == 0 ? 1 : divide_up(n, size); };
    const int64_t n_tokens = pieces(c_.n_q, tokens), n_keys = pieces(c_.n_kv, keys);
    const int64_t n_batch = bias_.batch ? c_.batch : 1, n_heads = bias_.head ? c_.num_kv_heads : 1;
    const int64_t batch_step = bias_.batch ? 1 : c_.batch,
                  head_step = bias_.head ? 1 : c_.num_kv_heads;
    if (c_.batch == 0 || c_.num_heads == 0) {
      if (b_.outputs.dbias.num_elements() > 0) clear_all(b_.outputs.dbias);
      return;
    }
    const int64_t flop = 2 * batch_step * head_step * tokens * c_.group_size * keys *
                         (c_.head_dim_qk + c_.head_dim_v);
    for_items(n_batch * n_heads * n_tokens * n_keys, flop, {}, [&](int64_t item) {
      thread_local TaskMemory memory;
      const int64_t kv_begin = item % n_keys * keys, kv_end = std::min(kv_begin + keys, c_.n_kv);
      const int64_t begin = item / n_keys % n_tokens * tokens,
                    end = std::min(begin + tokens, c_.n_q);
      const int64_t first_h = item / (n_keys * n_tokens) % n_heads * head_step;
      const int64_t first_b = item / (n_keys * n_tokens * n_heads) * batch_step;
      clear_dbias(first_b, first_h, begin, end, kv_begin, kv_end);
      for (int64_t b = first_b; b < first_b + batch_step; ++b) {
        for (int64_t h_kv = first_h; h_kv < first_h + head_step; ++h_kv) {
          for_blocks(b, h_kv, begin, end, [&](const TaskPlace& place) {
            BackwardTask t = make_task(place, &memory);
            t.attention.kv_begin = kv_begin, t.attention.kv_end = kv_end;
            add_dbias(place, &t);
            c_.kernels->backward[c_.arithmetic](t);
          });
        }
      }
    });
  }

  static void clear_all(const Tensor& t) {
    int64_t shape[4] = {1, 1, 1, 1}, stride[4] = {};
    for (int a = 0; a < t.rank; ++a) shape[a] = t.shape[a], stride[a] = t.stride[a];
    for (int64_t e = 0; e < shape[0] * shape[1] * shape[2] * shape[3]; ++e) {
      const int64_t d = e % shape[3], c = e / shape[3] % shape[2],
                    b = e / (shape[3] * shape[2]) % shape[1];
      const int64_t a = e / (shape[3] * shape[2] * shape[1]);
      store_element(t, a * stride[0] + b * stride[1] + c * stride[2] + d * stride[3], 0);
    }
  }

  // Sums of one number per row, in order of batch and rows, in double.
  void store_sums() const {
    const BackwardOutputs& o = b_.outputs;
    const auto per_head = [&](const Tensor& t, const std::vector<double>& numbers, auto weight) {
      if (!t) return;
      for (int64_t h = 0; h < c_.num_heads; ++h) {
        const int64_t h_kv = h / c_.group_size, g = h % c_.group_size;
        double sum = 0;
        for (int64_t b = 0; b < c_.batch; ++b) {
          const double* x = numbers.data() + (b * c_.num_kv_heads + h_kv) * rows_;
          for (int64_t i = 0; i < c_.n_q; ++i) sum += weight(b, h, i) * x[i * c_.group_size + g];
        }
        store_element(t, h * t.stride[0], sum);
      }
    };
    per_head(o.dsinks, dlogsum_, [&](int64_t b, int64_t h, int64_t i) {
      const ConstTensor& lse = b_.lse;
      const double sink = c_.sinks.data()[h];
      if (sink == -HUGE_VAL) return 0.0;
      return std::exp(sink -
                      element(lse, b * lse.stride[0] + h * lse.stride[1] + i * lse.stride[2]));
    });
    per_head(o.dalibi_slopes, dslope_, [](int64_t, int64_t, int64_t) { return 1.0; });
    if (o.dscale) store_element(o.dscale, 0, std::accumulate(dscale_.begin(), dscale_.end(), 0.0));
  }

  const BackwardCall& b_;
  const Call& c_;
  const BackwardCut cut_;
  const TaskMaker maker_;
  const int64_t pairs_, rows_, part_elements_;
  const int threads_wanted_;
  std::vector<double> dlogsum_, dslope_, dscale_;  // [pair][row]
  ScoreStrides bias_{};
  bool is_bias_own_ = false;
};

}  // namespace

void run(const BackwardCall& call) { BackwardSchedule(call).run(); }

}  // namespace qkv
