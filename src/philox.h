// SPDX-License-Identifier: Apache-2.0
// Tier: kernel. Counter-based random words for dropout: the word of (seed, b, h, i, j) needs no
// state, so that any tiling, any number of threads and the backward see the same drops. No
// dependencies, constexpr, usable everywhere. Philox4x32-10: Salmon et al., "Parallel random
// numbers: as easy as 1, 2, 3", SC 2011.
#pragma once
#include <cstdint>

namespace qkv {

struct PhiloxBlock {
  uint32_t word[4];
};

constexpr PhiloxBlock philox4x32(PhiloxBlock counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * counter.word[0];
    const uint64_t b = uint64_t{0xCD9E8D57u} * counter.word[2];
    counter = {{static_cast<uint32_t>(b >> 32) ^ counter.word[1] ^ key0, static_cast<uint32_t>(b),
                static_cast<uint32_t>(a >> 32) ^ counter.word[3] ^ key1, static_cast<uint32_t>(a)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

/// The block of keys [4 * quad, 4 * quad + 4) of query i in head `head` = h + num_heads * b. Key:
/// the seed. Counter: the low halves of quad, i and head, then a word with their high halves packed
/// to 11, 11 and 10 bits (0 below 2^32; blocks repeat only beyond 2^43 queries, 2^45 keys or 2^42
/// heads).
constexpr PhiloxBlock dropout_block(uint64_t seed, int64_t head, int64_t i, int64_t quad) {
  const auto low = [](int64_t x) { return static_cast<uint32_t>(x); };
  const auto high = [](int64_t x) { return static_cast<uint32_t>(static_cast<uint64_t>(x) >> 32); };
  const uint32_t packed = (high(quad) & 0x7FFu) | (high(i) & 0x7FFu) << 11 | high(head) << 22;
  return philox4x32({{low(quad), low(i), low(head), packed}}, static_cast<uint32_t>(seed),
                    static_cast<uint32_t>(seed >> 32));
}

constexpr uint32_t dropout_word(uint64_t seed, int64_t head, int64_t i, int64_t j) {
  return dropout_block(seed, head, i, j / 4).word[j % 4];
}

/// A weight is dropped if its word is below this: the smallest integer >= probability * 2^32. 1
/// drops everything.
constexpr uint64_t dropout_threshold(double probability) {
  const double exact = probability * 4294967296.0;
  const uint64_t whole = static_cast<uint64_t>(exact);
  return whole + (static_cast<double>(whole) < exact ? 1 : 0);
}

}  // namespace qkv
