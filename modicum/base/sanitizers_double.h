// Whether the tests run under AddressSanitizer or ThreadSanitizer. Both hold memory of their own
// and replace pthread_create. Tests that measure memory, and those in which pthread_create has to
// fail, are therefore skipped.
#pragma once

namespace modicum {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kIsSanitized = true;
#elif defined(__has_feature)
constexpr bool kIsSanitized = __has_feature(address_sanitizer) || __has_feature(thread_sanitizer);
#else
constexpr bool kIsSanitized = false;
#endif

}  // namespace modicum
