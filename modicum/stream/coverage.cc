#include "modicum/stream/coverage.h"

#include <fmt/format.h>

#include <algorithm>
#include <random>
#include <utility>

namespace modicum {
namespace {

// Whether all places of `runs` are in [begin, end). The lowest and the highest place are among the
// ends of the first and of the last run. They are computed in 128 bits, since the products of a
// defective transfer could overflow 64.
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
  while (
      !sum.compare_exchange_weak(before, Powers::add(before, value), std::memory_order_relaxed)) {
  }
}

}  // namespace

uint64_t Coverage::random_point() {
  std::random_device device;
  return std::uniform_int_distribution<uint64_t>(2, Powers::kPrime - 2)(device);
}

Coverage::Coverage(const Plan& plan, int rank, uint64_t point)
    : plan_(plan),
      rank_(rank),
      powers_(point),
      written_(std::make_unique<WrittenElements[]>(buffer_count(plan))) {
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

// Powers::sum is a closed form, so the cost does not depend on the transfer's size. Relaxed atomics
// suffice, since `prove` runs after the workers are joined.
void Coverage::tick(const Transfer& done) noexcept {
  const Runs& r = done.runs;
  if (r.count <= 0 || r.length <= 0) return;
  // A compared alias has no elements in a local buffer. Its comparison is counted at the alias's
  // index in `written_`.
  const uint32_t number = done.compared ? done.target : done.buffer;
  WrittenElements& written = written_[number];
  const Places& places = expected_[number];
  if (!lies_within(r, places.begin, places.end)) {
    written.outside.store(true, std::memory_order_relaxed);
    return;
  }
  const auto runs = static_cast<uint64_t>(r.count), run = static_cast<uint64_t>(r.length);
  add_to(written.fingerprint,
         powers_.sum(static_cast<uint64_t>(r.at), {r.at_step, run}, {r.at_stride, runs}));
  written.count.fetch_add(runs * run, std::memory_order_relaxed);
}

void Coverage::prove() const {
  for (uint32_t b = 0; b < buffer_count(plan_); ++b) {
    const auto [begin, end] = expected_[b];
    const WrittenElements& written = written_[b];
    const uint64_t fingerprint = begin == end ? 0 : powers_.sum(begin, 1, end - begin);
    if (!written.outside && written.count == end - begin && written.fingerprint == fingerprint) {
      continue;
    }
    Facts facts{.tensor = buffer_name(plan_, b), .rank = rank_};
    if (written.outside) {
      facts.expected = fmt::format("elements [{}, {})", begin, end);
      facts.got = "an element outside";
      fail(Category::integrity, "a transfer was written outside its local buffer",
           std::move(facts));
    }
    facts.expected = fmt::format("{} elements", end - begin);
    facts.got = written_text(written.count, end - begin);
    fail(Category::integrity, "the elements of a local buffer were not written exactly once each",
         std::move(facts));
  }
}

std::string written_text(uint64_t count, uint64_t expected) {
  return fmt::format("{} elements{}", count,
                     count == expected ? ", some of them more than once" : "");
}

}  // namespace modicum
