#include "modicum/stream/coverage.h"

#include <fmt/format.h>

#include <algorithm>
#include <random>

namespace modicum {
namespace {

__extension__ typedef unsigned __int128 Wide;

constexpr uint64_t kPrime = Powers::kPrime;

// `value` modulo 2^61 - 1 for any value below 2^122: since 2^61 = 1, high and low bits add up.
uint64_t reduce(Wide value) noexcept {
  const uint64_t sum = static_cast<uint64_t>(value & kPrime) + static_cast<uint64_t>(value >> 61);
  return sum >= kPrime ? sum - kPrime : sum;
}
uint64_t add(uint64_t a, uint64_t b) noexcept { return reduce(Wide{a} + b); }
uint64_t subtract(uint64_t a, uint64_t b) noexcept { return reduce(Wide{a} + kPrime - b); }
uint64_t multiply(uint64_t a, uint64_t b) noexcept { return reduce(Wide{a} * b); }

// By Fermat's little theorem: a^(p - 2).
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

// Whether all places of `runs` are in [begin, end). The extremes are at the first or last run.
bool lies_within(const Runs& runs, uint64_t begin, uint64_t end) noexcept {
  __extension__ typedef __int128 Signed;
  const Signed outer = Signed{runs.at_stride} * (runs.count - 1);
  const Signed inner = Signed{runs.at_step} * (runs.length - 1);
  const Signed lowest = runs.at + std::min<Signed>(outer, 0) + std::min<Signed>(inner, 0);
  const Signed highest = runs.at + std::max<Signed>(outer, 0) + std::max<Signed>(inner, 0);
  return lowest >= Signed{begin} && highest < Signed{end};
}

void add_to(std::atomic<uint64_t>& sum, uint64_t value) noexcept {
  uint64_t before = sum.load(std::memory_order_relaxed);
  while (!sum.compare_exchange_weak(before, add(before, value), std::memory_order_relaxed)) {
  }
}

}  // namespace

Powers::Powers(uint64_t x) noexcept : inverse_(inverse(subtract(x, 1))) {
  for (auto& row : table_) {
    row[0] = 1;
    for (size_t d = 1; d < row.size(); ++d) row[d] = multiply(row[d - 1], x);
    x = multiply(row.back(), x);
  }
}

uint64_t Powers::power(uint64_t exponent) const noexcept {
  uint64_t result = 1;
  for (size_t i = 0; exponent > 0; ++i, exponent >>= 4) {
    result = multiply(result, table_[i][exponent & 15]);
  }
  return result;
}

// x^at times the geometric series (y^n - 1) / (y - 1) of y = x^stride; if y = 1 its n terms are 1.
uint64_t Powers::sum(uint64_t at, int64_t stride, uint64_t n) const noexcept {
  const uint64_t first = power(at);
  if (n == 1) return first;
  const uint64_t y = power(exponent_of(stride, 1));
  if (y == 1) return multiply(first, reduce(n));
  const uint64_t divisor = stride == 1 ? inverse_ : inverse(subtract(y, 1));
  return multiply(first, multiply(subtract(power(exponent_of(stride, n)), 1), divisor));
}

uint64_t Coverage::random_point() {
  std::random_device device;
  return std::uniform_int_distribution<uint64_t>(2, kPrime - 2)(device);
}

Coverage::Coverage(const Plan& plan, int rank, uint64_t point)
    : plan_(plan),
      rank_(rank),
      powers_(point),
      written_(std::make_unique<Written[]>(buffer_count(plan))) {
  for (uint32_t b = 0; b < buffer_count(plan); ++b) expected_.push_back(expected(b));
}

Coverage::Places Coverage::expected(uint32_t buffer) const {
  if (buffer >= plan_.recipe->targets.size() || !plan_.recipe->is_compared(buffer)) {
    return {0, static_cast<uint64_t>(buffer_of(plan_, buffer, rank_).padded_numel)};
  }
  Places places{UINT64_MAX, 0};
  uint64_t count = 0;
  for_each_piece(*plan_.recipe, plan_.layout, holder_of(plan_, buffer), rank_,
                 [&](uint32_t, const Box& piece) {
                   places.begin = std::min(places.begin, static_cast<uint64_t>(piece.at));
                   count += static_cast<uint64_t>(piece.numel());
                 });
  return count == 0 ? Places{} : Places{places.begin, places.begin + count};
}

// The sum over all (k, i) of x^(at + k at_stride + i at_step) is the product of two geometric
// series, so a transfer of any size costs the same.
void Coverage::tick(const Transfer& done) noexcept {
  const Runs& r = done.runs;
  if (r.count <= 0 || r.length <= 0) return;
  // A compared alias has no buffer, and is counted under its own number.
  const uint32_t number = done.compared ? done.target : done.buffer;
  Written& written = written_[number];
  const Places& places = expected_[number];
  if (!lies_within(r, places.begin, places.end)) {
    written.outside.store(true, std::memory_order_relaxed);
    return;
  }
  const auto runs = static_cast<uint64_t>(r.count), run = static_cast<uint64_t>(r.length);
  const uint64_t inner = powers_.sum(static_cast<uint64_t>(r.at), r.at_step, run);
  const uint64_t outer = powers_.sum(0, r.at_stride, runs);
  add_to(written.fingerprint, multiply(inner, outer));
  written.count.fetch_add(runs * run, std::memory_order_relaxed);
}

void Coverage::prove() const {
  for (uint32_t b = 0; b < buffer_count(plan_); ++b) {
    const auto [begin, end] = expected_[b];
    const Written& written = written_[b];
    const uint64_t fingerprint = begin == end ? 0 : powers_.sum(begin, 1, end - begin);
    if (!written.outside && written.count == end - begin && written.fingerprint == fingerprint) {
      continue;
    }
    fail(Category::integrity,
         written.outside ? "a transfer was written outside its local buffer"
                         : "the elements of a local buffer were not written exactly once each",
         {.tensor = buffer_name(plan_, b),
          .rank = rank_,
          .expected = fmt::format("{} elements", end - begin),
          .got = fmt::format("{} elements", written.count.load())});
  }
}

}  // namespace modicum
