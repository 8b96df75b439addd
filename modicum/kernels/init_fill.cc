#include <cmath>
#include <cstring>
#include <numbers>

#include "modicum/kernels/kernels.h"

namespace modicum {
namespace {

// The finalizer of SplitMix64.
uint64_t mixed(uint64_t x) noexcept {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ULL;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// A normal variate by Box-Muller, from two uniform variates: u in (0, 1], v in [0, 1).
double normal_of(uint64_t seed, int64_t index) noexcept {
  constexpr double kUnit = 0x1p-53;
  const uint64_t counter = seed + 2 * static_cast<uint64_t>(index) * 0x9e3779b97f4a7c15ULL;
  const double u = static_cast<double>((mixed(counter) >> 11) + 1) * kUnit;
  const double v = static_cast<double>(mixed(counter + 0x9e3779b97f4a7c15ULL) >> 11) * kUnit;
  return std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * v);
}

}  // namespace

void init_fill(const InitFill& fill, int64_t first, int64_t n, std::byte* to) noexcept {
  const int64_t size = bits_per_element(fill.dtype) / 8;
  for (int64_t i = 0; i < n; ++i) {
    float value = fill.kind == InitKind::ones ? 1.0F : 0.0F;
    if (fill.kind == InitKind::normal) {
      value = static_cast<float>(fill.std * normal_of(fill.seed, first + i));
    }
    std::byte bits[sizeof value];
    std::memcpy(bits, &value, sizeof value);
    cast(bits, DType::f32, to + i * size, fill.dtype, 1);
  }
}

}  // namespace modicum
