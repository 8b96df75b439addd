#include "modicum/kernels/kernels.h"

// This file is compiled once per instruction set, except the part below HWY_ONCE.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "modicum/kernels/copy.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/cache_control.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace modicum {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

void stream_bytes(const std::byte* from, std::byte* to, size_t n) {
  const hn::CappedTag<uint8_t, 64> d;  // at most a cache line
  const auto* const source = reinterpret_cast<const uint8_t*>(from);
  auto* const target = reinterpret_cast<uint8_t*>(to);
  for (size_t i = 0; i < n; i += hn::Lanes(d)) hn::Stream(hn::Load(d, source + i), d, target + i);
  hwy::FlushStream();
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace modicum
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace modicum {
namespace {

HWY_EXPORT(stream_bytes);

}  // namespace

void copy_streaming(const std::byte* from, std::byte* to, size_t n) noexcept {
  HWY_DYNAMIC_DISPATCH(stream_bytes)(from, to, n);
}

}  // namespace modicum
#endif
