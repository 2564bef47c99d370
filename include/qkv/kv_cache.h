// SPDX-License-Identifier: Apache-2.0
// Tier: call. KvCache: keys and values of the tokens seen so far, and attention over them; and
// attention over the pages of a caller.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "qkv/attention.h"
#include "qkv/rope.h"

namespace qkv {

/// contiguous  one piece of memory for each batch entry
/// ring        the window - 1 newest tokens and the last append, in a ring that does not grow with
///             the sequence
/// paged       pages of page_size tokens, taken as they are needed and shared between forks
enum class KvCacheKind : uint8_t { contiguous, ring, paged };

struct KvCacheConfig {
  int64_t batch = 1;
  int64_t num_kv_heads = 1;
  int64_t head_dim_qk = 0, head_dim_v = 0;
  int64_t capacity = 0;      ///< most tokens of a batch entry; 0: no limit. A ring has none
  DType dtype = DType::f32;  ///< f32, f64, bf16, f16, or i8 with a scale per token and head
  KvCacheKind kind = KvCacheKind::contiguous;
  /// Tokens of a page; of a ring: what it holds beyond the window. Each page and head is a new place in
  /// memory: pages of 64 take up to 1.4 times as long as contiguous memory (i8: 2.2), pages of 256
  /// nearly nothing more (i8: 1.3), measured at d 128, n_kv 4096 on a busy Zen 5.
  int64_t page_size = 64;
  int64_t window = 0;           ///< a query sees the last `window` tokens, itself included; 0: all
  int64_t num_sink_tokens = 0;  ///< with a window: the first tokens stay visible and are kept
  std::optional<RopeOptions> rope{};  ///< turns k in append() and q in attend()
  /// [head_dim_qk] or empty: x = x / rms(x) * weight before rope, rms(x) = sqrt(mean(x^2) + norm_eps)
  std::vector<float> k_norm{}, q_norm{};
  double norm_eps = 1e-6;
};

struct KvAppendOptions {
  /// [batch]: entry b gets the first counts[b] of the n tokens, the others are padding and not read.
  /// Empty: all get n.
  std::span<const int64_t> counts{};
  /// [n] or [batch, n], i32 | i64: positions for rope (a tree of guesses). Empty: the token's index.
  ConstTensor positions{};
  int num_threads = 0;           ///< 0: default_num_threads(); same bits for any number
  Executor* executor = nullptr;  ///< nullptr: default_executor()
};

struct KvQueryOptions {
  /// [batch]: the first counts[b] rows of q are the last counts[b] tokens of entry b; the other rows
  /// are padding: out 0, lse -inf, weights 0. Empty: n_q for all.
  std::span<const int64_t> counts{};
  ConstTensor positions{};  ///< [n_q] or [batch, n_q]: as in KvAppendOptions, of the queries
  /// The queries are no tokens of the cache (cross-attention): n_q is free, and without options.mask
  /// every row sees every key. For a cache without window and rope.
  bool are_outside = false;
};

/// What rounding to i8 did to the tokens appended so far; row = one token of one head.
struct KvQuantError {
  double max_abs_k = 0, max_abs_v = 0;            ///< largest |x - stored x|
  double rms_k = 0, rms_v = 0;                    ///< root of the mean square of x - stored x
  double max_relative_k = 0, max_relative_v = 0;  ///< largest |x - stored x| / max |x of the row|
  int64_t num_rows = 0;                           ///< of K, and as many of V
};

/// Keys [begin, begin + count) of one batch entry and head, where they lie.
struct KvCacheSegment {
  ConstTensor k, v;              ///< [count, head_dim_qk], [count, head_dim_v]
  ConstTensor k_scale, v_scale;  ///< [count] f32 for i8, else empty
  int64_t begin, count;
};

/// Keys and values of the tokens seen so far.
///
///   append(k, v)   k [batch, num_kv_heads, n, head_dim_qk], v [batch, num_kv_heads, n, head_dim_v]
///   attend(q)      q [batch, num_heads, n_q, head_dim_qk]: the last n_q tokens
///
/// Batch entries may have different lengths. Appending never copies the past: contiguous memory with
/// a capacity is taken at once, without one it doubles; pages stay where they are. K and V are never
/// copied or gathered by attend(): the kernels read them where they lie. Every kind gives the same
/// bits, the bits of attention() on the same tokens of an entry alone (with num_sink_tokens: of two
/// calls and merge_states()).
///
/// i8: every row is stored as integers q and a scale s = max |x| / 127, x = s * q. The kernels read
/// the integers; s multiplies scores (K) and weights (V) in f32. A row with NaN or Inf becomes NaN.
///
/// Errors (qkv::Error) are thrown before anything changes. A failed allocation (std::bad_alloc) leaves
/// the tokens of every entry as they were.
/// Movable, not copyable: fork() makes an independent cache that shares memory until one of the two
/// writes to it. Const functions may run in several threads at once; forks may be used by different
/// threads.
///
/// Sources: one query against a cache arXiv:1911.02150; paging arXiv:2309.06180; tokens kept in front
/// of a window arXiv:2309.17453.
class QKV_EXPORT KvCache {
 public:
  explicit KvCache(const KvCacheConfig& config);
  ~KvCache();
  KvCache(KvCache&&) noexcept;
  KvCache& operator=(KvCache&&) noexcept;

  /// A contiguous cache on the caller's memory: [batch, num_kv_heads, capacity, dim] each, any
  /// strides with a contiguous last axis; the first lengths[b] tokens of entry b are in use. append()
  /// writes there; the memory must outlive the cache. fork() copies the tokens.
  static KvCache from_buffers(Tensor k, Tensor v, std::span<const int64_t> lengths);

  const KvCacheConfig& config() const;
  int64_t length(int64_t entry = 0) const;
  std::span<const int64_t> lengths() const;  ///< [batch]; valid until the cache changes
  int64_t longest() const;
  /// The first token that is still held, apart from num_sink_tokens: 0 unless this is a ring.
  int64_t first_token(int64_t entry = 0) const;
  /// Bytes of memory for keys, values and scales; what forks share is counted in each. Not counted: free pages that
  /// a paged cache holds ready (at most as many as it uses, and a few MB).
  int64_t bytes() const;
  KvQuantError quant_error() const;
  /// Where the tokens of a batch entry and head lie, in order; valid until the cache changes.
  std::vector<KvCacheSegment> segments(int64_t entry, int64_t h_kv) const;

  /// Adds n tokens behind those that are there. k and v may have another floating-point type than
  /// the cache; they are converted, after norm and rope, once. Long prompts are shared among threads.
  /// All entries get their tokens or none does. Throws Error if they do not fit, the capacity would be
  /// passed, or k and v have a type that cannot be converted.
  void append(ConstTensor k, ConstTensor v, const KvAppendOptions& options = {});

  /// attention() of the last n_q tokens over the cache; q, outputs and options as there. Causal by
  /// position unless options.mask is given (one that hides nothing: Mask::window(-1, -1)); each entry
  /// is aligned by its own length; config().window applies to any mask. Where lengths differ, dense
  /// masks and bias have the keys of the longest entry, and rows of tokens before the first are empty.
  /// So do outputs: weights and forms of weights are 0 for keys that an entry lacks and for padding
  /// (top_keys -1). Where num_sink_tokens are kept, weights and their forms are refused.
  /// Throws Error if n_q is larger than every length, or a ring no longer holds what a query may see.
  void attend(ConstTensor q, const AttentionOutputs& outputs, const AttentionOptions& options = {},
              const KvQueryOptions& queries = {}) const;

  /// attend() for a tree of guesses: the last n_q tokens are nodes, parents[i] < i is the node before
  /// node i, or -1 for a child of the last token before the tree. A node sees all tokens before the
  /// tree, its ancestors and itself. options.mask combines with that. Cost beside attend(): a table of
  /// n_q * length bytes.
  /// Source: arXiv:2305.09781.
  void attend_tree(ConstTensor q, std::span<const int64_t> parents, const AttentionOutputs& outputs,
                   const AttentionOptions& options = {}, const KvQueryOptions& queries = {}) const;

  /// Keeps the first n tokens of every entry; a larger n changes nothing. Throws Error if a ring has
  /// lost what the token behind them may see.
  void truncate(int64_t n);
  void truncate(std::span<const int64_t> lengths);
  /// Of the last n tokens keeps those at these ascending places (0 ... n - 1): the accepted path of a
  /// tree of n guesses.
  void keep_of_last(int64_t n, std::span<const int64_t> places);
  void clear();                  ///< truncate(0); the memory is kept
  void reserve(int64_t tokens);  ///< memory for entries of that many tokens

  KvCache fork() const;

  /// A safetensors file with k, v, lengths, scales and the configuration; written atomically.
  void save(const std::string& path) const;
  static KvCache load(const std::string& path);

 private:
  struct Impl;
  explicit KvCache(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// attention() over keys and values in pages of the caller: token t of entry b is row
/// t % page_size of page block_table[b, t / page_size].
///
///   q                  [batch, num_heads, n_q, head_dim_qk]: the last n_q tokens of each entry
///   k_pages            [num_pages, page_size, num_kv_heads, head_dim_qk]   f32 | f64 | bf16 | f16
///   v_pages            [num_pages, page_size, num_kv_heads, head_dim_v]    same dtype
///   block_table        [batch, max_pages]   i32 | i64; entries behind a length are not looked at
///   lengths            [batch]              i32 | i64; 0 <= length <= max_pages * page_size
///   outputs            as attention(), with n_kv the longest length
///
/// Causal by position unless options.mask is given; each entry is aligned by its own length. Pages may
/// lie in any order and be shared; nothing is copied, and slots behind a length are never read.
/// Errors, numerics, bits and threads as KvCache::attend().
/// Source: arXiv:2309.06180.
QKV_EXPORT void attention_paged(ConstTensor q, ConstTensor k_pages, ConstTensor v_pages,
                                ConstTensor block_table, ConstTensor lengths,
                                const AttentionOutputs& outputs,
                                const AttentionOptions& options = {});

}  // namespace qkv
