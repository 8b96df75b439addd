// Instruction sets, from Highway's tables of compiled and supported targets.
#include <fmt/format.h>

#include <string>

#include "modicum/base/base.h"
#include "modicum/kernels/adamw.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "modicum/kernels/isa.cc"
#include <hwy/foreach_target.h>
#include <hwy/nanobenchmark.h>
// After foreach_target.h.
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace modicum {
namespace HWY_NAMESPACE {

int64_t target_in_force() { return HWY_TARGET; }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace modicum
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
// When libhwy is loaded, it measures a timer that nothing here uses. That takes 3 ms of CPU time in
// every process, which is half of what a short command takes. The dynamic linker prefers this
// definition to libhwy's.
namespace hwy::platform {
__attribute__((visibility("default"))) uint64_t TimerResolution() { return 1; }
}  // namespace hwy::platform

namespace modicum {
namespace {

HWY_EXPORT(target_in_force);

struct Isa {
  int64_t target;
  std::string_view name;
};
// Best first.
constexpr Isa kIsas[] = {
    {HWY_AVX3_DL, "avx3_dl"},   {HWY_AVX3, "avx3"},       {HWY_AVX2, "avx2"},
    {HWY_SVE2_128, "sve2_128"}, {HWY_SVE_256, "sve_256"}, {HWY_SVE2, "sve2"},
    {HWY_SVE, "sve"},           {HWY_NEON, "neon"},       {HWY_EMU128, "emulated"},
    {HWY_SCALAR, "scalar"},
};

// The static target always runs, since the compiler assumes it. Computed once: CPUID takes tens of
// microseconds in a virtual machine.
int64_t runnable() {
  static const int64_t targets = (hwy::SupportedTargets() | HWY_STATIC_TARGET) & HWY_TARGETS;
  return targets;
}

std::vector<std::string_view> names_of(int64_t targets) {
  std::vector<std::string_view> names;
  for (const Isa& isa : kIsas) {
    if ((isa.target & targets) != 0) names.push_back(isa.name);
  }
  return names;
}

}  // namespace

std::vector<std::string_view> isas() { return names_of(runnable()); }
std::vector<std::string_view> isas_not_run() { return names_of(HWY_TARGETS & ~runnable()); }

std::string_view isa() noexcept {
  const int64_t target = HWY_DYNAMIC_DISPATCH(target_in_force)();
  for (const Isa& isa : kIsas) {
    if (isa.target == target) return isa.name;
  }
  return "";
}

void use_isa(std::string_view name) {
  std::vector<std::string> names;
  for (const Isa& isa : kIsas) {
    if ((isa.target & runnable()) == 0) continue;
    if (isa.name == name) return hwy::GetChosenTarget().Update(isa.target);
    names.emplace_back(isa.name);
  }
  fail(Category::usage,
       fmt::format("kernels for the instruction set '{}' don't run here", printable(name)),
       {.expected = fmt::format("one of {}", fmt::join(names, ", ")), .got = printable(name)});
}

}  // namespace modicum
#endif
