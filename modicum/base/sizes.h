// Sizes as people write them, arithmetic that cannot overflow, and the nearest name to a typo.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace modicum {

constexpr uint64_t kKiB = 1024;
constexpr uint64_t kMiB = 1024 * kKiB;
constexpr uint64_t kGiB = 1024 * kMiB;
constexpr uint64_t kPageBytes = 4096;

// `B KB MB GB TB` are powers of 1000, `KiB MiB GiB TiB` and single letters (`16G`) of 1024, no unit
// is bytes. Units in any case, with or without a space before them; fractions are allowed
// ("1.5 GiB") and rounded down to a byte. Anything else, also a sum over 2^63-1: USAGE.
uint64_t parse_size(std::string_view text);
// `K M B` are powers of 1000 ("500M"), in any case; fractions allowed.
uint64_t parse_count(std::string_view text);
// "1.50 GiB"; below one KiB "17 B".
std::string format_size(uint64_t bytes);

// Nothing when the result would not fit.
std::optional<uint64_t> checked_add(uint64_t a, uint64_t b) noexcept;
std::optional<uint64_t> checked_mul(uint64_t a, uint64_t b) noexcept;
std::optional<int64_t> checked_mul(int64_t a, int64_t b) noexcept;

constexpr uint64_t round_up(uint64_t value, uint64_t step) noexcept {
  return (value + step - 1) / step * step;
}
constexpr int64_t ceil_div(int64_t value, int64_t by) noexcept { return (value + by - 1) / by; }

// The candidate with the smallest edit distance, or "" where none is near (distance over 3 or over
// half the name's length).
std::string nearest_name(std::string_view name, const std::vector<std::string>& candidates);
// The same as the end of a message: "; nearest is 'NAME'", or "".
std::string nearest_hint(std::string_view name, const std::vector<std::string>& candidates);

}  // namespace modicum
