// SPDX-License-Identifier: Apache-2.0
// The program that the README quotes; prints what each query sees on average: 1, 1.5, 2, 2.5.
#include <qkv/qkv.h>

#include <cstdio>
#include <vector>

int main() {  // grouped-query attention: 8 query heads on 2 KV heads, 4 new tokens, 6 in all
  std::vector<float> q(8 * 4 * 64, 1), k(2 * 6 * 64, 1), v(2 * 6 * 64), out(8 * 4 * 64);
  for (size_t n = 0; n < v.size(); ++n) v[n] = static_cast<float>(n / 64 % 6);  // key j has value j
  qkv::attention({q.data(), {1, 8, 4, 64}}, {k.data(), {1, 2, 6, 64}}, {v.data(), {1, 2, 6, 64}},
                 {.out = {out.data(), {1, 8, 4, 64}}}, {.mask = qkv::Mask::causal_bottom_right()});
  for (int i = 0; i < 4; ++i) std::printf("query %d: %g\n", i, out[i * 64]);
}
