// SPDX-License-Identifier: Apache-2.0
// Tier: test. Is this a sanitizer build? Their allocators hold locks over fork(): a child of a
// program whose other threads allocate at that moment may hang inside the sanitizer.
#pragma once

#ifdef __has_feature
#define QKV_HAS_FEATURE(x) __has_feature(x)
#else
#define QKV_HAS_FEATURE(x) 0
#endif

namespace qkv::test {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__) || \
    QKV_HAS_FEATURE(thread_sanitizer) || QKV_HAS_FEATURE(address_sanitizer)
inline constexpr bool kSanitizedAllocator = true;
#else
inline constexpr bool kSanitizedAllocator = false;
#endif

}  // namespace qkv::test
