#include "modicum/spec/powers.h"

namespace modicum {
namespace {

__extension__ typedef unsigned __int128 Wide;

constexpr uint64_t kPrime = Powers::kPrime;

// `value` modulo p = 2^61 - 1, for values up to (p - 1)^2. Since 2^61 = 1 modulo p, the high bits
// can be added to the low 61.
uint64_t reduce(Wide value) noexcept {
  const uint64_t sum = static_cast<uint64_t>(value & kPrime) + static_cast<uint64_t>(value >> 61);
  return sum >= kPrime ? sum - kPrime : sum;
}
uint64_t subtract(uint64_t a, uint64_t b) noexcept { return reduce(Wide{a} + kPrime - b); }
uint64_t multiply(uint64_t a, uint64_t b) noexcept { return reduce(Wide{a} * b); }

// a^(p - 2), the inverse by Fermat's little theorem.
uint64_t inverse(uint64_t a) noexcept {
  uint64_t result = 1;
  for (uint64_t exponent = kPrime - 2; exponent > 0; exponent >>= 1) {
    if (exponent & 1) result = multiply(result, a);
    a = multiply(a, a);
  }
  return result;
}

// stride * n as an exponent, modulo p - 1 since x^(p - 1) = 1.
uint64_t exponent_of(int64_t stride, uint64_t n) noexcept {
  const uint64_t size =
      stride < 0 ? uint64_t{0} - static_cast<uint64_t>(stride) : static_cast<uint64_t>(stride);
  const auto residue = static_cast<uint64_t>(Wide{size} * n % (kPrime - 1));
  return stride < 0 && residue > 0 ? kPrime - 1 - residue : residue;
}

}  // namespace

Powers::Powers(uint64_t x) noexcept : inverse_(inverse(subtract(x, 1))) {
  for (auto& row : table_) {
    row[0] = 1;
    for (std::size_t d = 1; d < row.size(); ++d) row[d] = multiply(row[d - 1], x);
    x = multiply(row.back(), x);
  }
}

uint64_t Powers::power(uint64_t exponent) const noexcept {
  uint64_t result = 1;
  for (std::size_t i = 0; exponent > 0; ++i, exponent >>= 4) {
    result = multiply(result, table_[i][exponent & 15]);
  }
  return result;
}

// x^at times the geometric series (y^n - 1) / (y - 1) with y = x^stride. If y = 1, the series is n.
uint64_t Powers::sum(uint64_t at, int64_t stride, uint64_t n) const noexcept {
  const uint64_t first = power(at);
  if (n == 1) return first;
  const uint64_t y = power(exponent_of(stride, 1));
  if (y == 1) return multiply(first, reduce(n));
  const uint64_t divisor = stride == 1 ? inverse_ : inverse(subtract(y, 1));
  return multiply(first, multiply(subtract(power(exponent_of(stride, n)), 1), divisor));
}

uint64_t Powers::sum(uint64_t at, const Series& inner, const Series& outer) const noexcept {
  return multiply(sum(at, inner.step, inner.n), sum(0, outer.step, outer.n));
}

uint64_t Powers::add(uint64_t a, uint64_t b) noexcept { return reduce(Wide{a} + b); }

}  // namespace modicum
