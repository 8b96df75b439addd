// Parsing and printing of sizes, arithmetic without overflow, and suggestions for misspelled names.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace modicum {

constexpr uint64_t kKiB = 1024;
constexpr uint64_t kMiB = 1024 * kKiB;
constexpr uint64_t kGiB = 1024 * kMiB;
constexpr uint64_t kPageBytes = 4096;

// Bytes of a size such as "1.5 GiB". `KB MB GB TB` are powers of 1000; `KiB MiB GiB TiB` and the
// letters `K M G T` are powers of 1024; `B` or no unit means bytes. The case of a unit is ignored,
// and spaces may precede the unit. A fraction of a byte is dropped. Throws USAGE for any other text
// and for sizes over 2^63-1 bytes.
uint64_t parse_size(std::string_view text);
// The value of a text such as "500M". The units are `K`, `M` and `B`, for 10^3, 10^6 and 10^9.
// Case, spaces, fractions and errors are as for parse_size.
uint64_t parse_count(std::string_view text);
// "1.50 GiB", or "17 B" below 1 KiB: in the largest unit, up to PiB, in which the number is at
// least 1.
std::string format_size(uint64_t bytes);
// "budget 1.00 GiB (flag), needed 1.50 GiB, short by 512.00 MiB". `source`: of the budget; may be
// empty. Requires needed >= budget.
std::string over_budget(uint64_t budget, uint64_t needed, std::string_view source = {});
// "1 node", "2 nodes".
std::string counted(uint64_t count, std::string_view noun);

// nullopt if the result overflows.
template <typename T>
constexpr std::optional<T> checked_add(T a, std::type_identity_t<T> b) noexcept {
  static_assert(sizeof(T) == sizeof(int64_t));
  if (T sum = 0; !__builtin_add_overflow(a, b, &sum)) return sum;
  return std::nullopt;
}
template <typename T>
constexpr std::optional<T> checked_mul(T a, std::type_identity_t<T> b) noexcept {
  static_assert(sizeof(T) == sizeof(int64_t));
  if (T product = 0; !__builtin_mul_overflow(a, b, &product)) return product;
  return std::nullopt;
}

// UINT64_MAX if the result overflows. For bytes that are then compared with a limit, such as a sum
// over a user-chosen number of ranks: limits are below 2^63, so an overflow is above every limit.
constexpr uint64_t saturating_add(uint64_t a, uint64_t b) noexcept {
  return b > UINT64_MAX - a ? UINT64_MAX : a + b;
}
constexpr uint64_t saturating_mul(uint64_t a, uint64_t b) noexcept {
  return a != 0 && b > UINT64_MAX / a ? UINT64_MAX : a * b;
}

// The smallest multiple of `step` that is not below `value`. If it does not fit 64 bits, the
// largest multiple that does.
constexpr uint64_t round_up(uint64_t value, uint64_t step) noexcept {
  if (value > UINT64_MAX - (step - 1)) return UINT64_MAX / step * step;
  return (value + step - 1) / step * step;
}
// Expects value >= 0 and by > 0.
constexpr int64_t ceil_div(int64_t value, int64_t by) noexcept {
  return value / by + (value % by != 0 ? 1 : 0);
}

// The candidate with the smallest edit distance to `name`; "" if that distance is over
// min(3, max(1, name.size() / 2)).
std::string nearest_name(std::string_view name, const std::vector<std::string>& candidates);
// For an error message to end with: "; nearest is 'NAME'" with the name that nearest_name returns,
// or "" if it returns "".
std::string nearest_hint(std::string_view name, const std::vector<std::string>& candidates);

}  // namespace modicum
