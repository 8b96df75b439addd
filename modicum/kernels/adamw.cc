#include "modicum/kernels/adamw.h"

// The file is compiled once per instruction set, the best ones first; what follows HWY_ONCE, once.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "modicum/kernels/adamw.cc"
#include <hwy/foreach_target.h>
// The order matters.
#include "modicum/kernels/adamw-inl.h"

HWY_BEFORE_NAMESPACE();
namespace modicum {
namespace HWY_NAMESPACE {

void step_all(const AdamNumbers& numbers, const AdamSpan& span) {
  switch (span.format) {
    case StateFormat::fp32: return step_by_rule<StateFormat::fp32>(numbers, span);
    case StateFormat::fp32_split: return step_by_rule<StateFormat::fp32_split>(numbers, span);
    case StateFormat::bf16_moments: return step_by_rule<StateFormat::bf16_moments>(numbers, span);
    case StateFormat::int8_moments: return step_by_rule<StateFormat::int8_moments>(numbers, span);
    case StateFormat::int8_moments_24:
      return step_by_rule<StateFormat::int8_moments_24>(numbers, span);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace modicum
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace modicum {
namespace {

HWY_EXPORT(step_all);

}  // namespace

void adamw(const AdamNumbers& numbers, const AdamSpan& span) noexcept {
  HWY_DYNAMIC_DISPATCH(step_all)(numbers, span);
}

}  // namespace modicum
#endif
