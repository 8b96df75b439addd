#include "modicum/stream/coverage.h"

#include <fmt/format.h>

namespace modicum {
namespace {

__extension__ typedef unsigned __int128 Wide;

}  // namespace

// Computed wide, so that the division is exact.
uint64_t sum_below(uint64_t n) noexcept {
  return n == 0 ? 0 : static_cast<uint64_t>(Wide{n} * (n - 1) / 2);
}

uint64_t sum_of_squares_below(uint64_t n) noexcept {
  if (n == 0) return 0;
  // n (n - 1) / 2 is below 2^126 only for n below 2^63; times (2 n - 1) it must be taken modulo
  // first, and a third modulo 2^64 is a product with the inverse of 3.
  constexpr uint64_t kInverseOf3 = 0xaaaaaaaaaaaaaaabULL;
  return sum_below(n) * (2 * n - 1) * kInverseOf3;
}

Coverage::Coverage(const Plan& plan)
    : plan_(plan), sums_(std::make_unique<Sums[]>(buffer_count(plan))) {}

void Coverage::tick(const Transfer& done) noexcept {
  const auto u = [](int64_t value) { return static_cast<uint64_t>(value); };
  const Runs& r = done.runs;
  const uint64_t k = u(r.runs), i = u(r.run);
  const uint64_t a = u(r.at_stride), s = u(r.at_step), at = u(r.at);
  const uint64_t k1 = sum_below(k), i1 = sum_below(i);
  Sums& sums = sums_[done.buffer];
  sums.count.fetch_add(k * i, std::memory_order_relaxed);
  // The sums over all (k, i) of at + a k + s i, and of its square.
  sums.places.fetch_add(k * i * at + a * i * k1 + s * k * i1, std::memory_order_relaxed);
  sums.squares.fetch_add(k * i * at * at + a * a * i * sum_of_squares_below(k) +
                             s * s * k * sum_of_squares_below(i) + 2 * at * a * i * k1 +
                             2 * at * s * k * i1 + 2 * a * s * k1 * i1,
                         std::memory_order_relaxed);
}

void Coverage::prove(int rank) const {
  for (uint32_t b = 0; b < buffer_count(plan_); ++b) {
    const auto due = static_cast<uint64_t>(buffer_of(plan_, b, rank).padded_numel);
    const Sums& sums = sums_[b];
    if (sums.count == due && sums.places == sum_below(due) &&
        sums.squares == sum_of_squares_below(due)) {
      continue;
    }
    fail(Category::integrity, "a local buffer was not written exactly once",
         {.tensor = buffer_name(plan_, b),
          .rank = rank,
          .expected = fmt::format("{} elements", due),
          .got = fmt::format("{} elements", sums.count.load())});
  }
}

}  // namespace modicum
