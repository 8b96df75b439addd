#include "modicum/kernels/adamw.h"

// This file is compiled once per instruction set, except the part below HWY_ONCE.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "modicum/kernels/adamw.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "modicum/kernels/planes-inl.h"

// Calls function<format>(...).
#define MODICUM_BY_FORMAT(format, function, ...)                                                   \
  switch (format) {                                                                                \
    case StateFormat::fp32: return function<StateFormat::fp32>(__VA_ARGS__);                       \
    case StateFormat::fp32_split: return function<StateFormat::fp32_split>(__VA_ARGS__);           \
    case StateFormat::bf16_moments: return function<StateFormat::bf16_moments>(__VA_ARGS__);       \
    case StateFormat::int8_moments: return function<StateFormat::int8_moments>(__VA_ARGS__);       \
    case StateFormat::int8_moments_24: return function<StateFormat::int8_moments_24>(__VA_ARGS__); \
    case StateFormat::bf16_moments_fp32:                                                           \
      return function<StateFormat::bf16_moments_fp32>(__VA_ARGS__);                                \
    case StateFormat::int8_moments_fp32:                                                           \
      return function<StateFormat::int8_moments_fp32>(__VA_ARGS__);                                \
  }

HWY_BEFORE_NAMESPACE();
namespace modicum {
namespace HWY_NAMESPACE {

void step_span(const AdamNumbers& numbers, const AdamSpan& span) {
  MODICUM_BY_FORMAT(span.format, step_by_rule, numbers, span)
}

void export_span(const AdamSpan& span, StatePlane plane, float* to) {
  MODICUM_BY_FORMAT(span.format, export_all, span, plane, to)
}

void import_span(const AdamNumbers& numbers, const AdamSpan& span, StatePlane plane,
                 const float* from) {
  MODICUM_BY_FORMAT(span.format, import_all, numbers, span, plane, from)
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace modicum
HWY_AFTER_NAMESPACE();

#undef MODICUM_BY_FORMAT

#if HWY_ONCE
namespace modicum {
namespace {

HWY_EXPORT(step_span);
HWY_EXPORT(export_span);
HWY_EXPORT(import_span);

}  // namespace

void adamw(const AdamNumbers& numbers, const AdamSpan& span) noexcept {
  HWY_DYNAMIC_DISPATCH(step_span)(numbers, span);
}

void export_state(const AdamSpan& span, StatePlane plane, float* to) noexcept {
  HWY_DYNAMIC_DISPATCH(export_span)(span, plane, to);
}

void import_state(const AdamNumbers& numbers, const AdamSpan& span, StatePlane plane,
                  const float* from) noexcept {
  HWY_DYNAMIC_DISPATCH(import_span)(numbers, span, plane, from);
}

}  // namespace modicum
#endif
