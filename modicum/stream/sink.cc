#include "modicum/stream/sink.h"

#include <fmt/format.h>

#include <algorithm>

#include "modicum/kernels/kernels.h"
#include "modicum/stream/sums.h"

namespace modicum {
namespace {

constexpr size_t kPoisonStepBytes = 16 * kMiB;  // between calls of `poll`

}  // namespace

int checked_rank(int rank, const Plan& plan, const Sink& sink) {
  checked_rank(rank, plan.ranks());
  if (const int of_sink = sink.rank().value_or(rank); of_sink != rank) {
    fail(Category::usage, "the sink holds the shards of another rank",
         {.expected = fmt::format("rank {}", of_sink), .got = std::to_string(rank)});
  }
  return rank;
}

HostSink::HostSink(const Plan& plan, int rank, Ledger& ledger, CallerMemory caller_memory,
                   Copy copy)
    : plan_(plan),
      rank_(rank),
      begins_(arena_begins(plan, checked_rank(rank, plan.ranks()))),
      caller_memory_(std::move(caller_memory)),
      copy_(std::move(copy)) {
  for (uint32_t b = 0; b < buffer_count(plan); ++b) {
    if (destination_of(plan, b) != Destination::caller_memory || holder_of(plan, b) != b) continue;
    const uint64_t expected = buffer_of(plan, b, rank).bytes();
    const uint64_t got = b < caller_memory_.size() ? caller_memory_[b].size() : 0;
    if (got == expected) continue;
    fail(Category::usage, "the memory given for a tensor has the wrong size",
         {.tensor = buffer_name(plan, b),
          .rank = rank,
          .expected = fmt::format("{} bytes", expected),
          .got = fmt::format("{} bytes", got)});
  }
  arena_ = ledger.reserve(Purpose::shards, begins_.back(), plan.options.fork);
}

std::span<std::byte> HostSink::host(uint32_t buffer) {
  buffer = holder_of(plan_, buffer);
  const Destination to = destination_of(plan_, buffer);
  if (to == Destination::copy) return {};
  if (to == Destination::caller_memory) return caller_memory_[buffer];
  return arena_.bytes().subspan(begins_[buffer], buffer_of(plan_, buffer, rank_).bytes());
}

void HostSink::copy(uint32_t buffer, int64_t at, std::span<const std::byte> elements) {
  MODICUM_ASSERT(copy_ != nullptr);
  copy_(buffer, at, elements);
}

void HostSink::fetch(uint32_t buffer, int64_t, std::span<std::byte>) {
  fail(Category::unsupported, "the elements of this tensor can't be read back",
       {.tensor = buffer_name(plan_, buffer), .rank = rank_});
}

void HostSink::poison(Poll poll) {
  const auto fill = [&poll](std::span<std::byte> all) {
    while (!all.empty()) {
      poll();
      const std::span<std::byte> step = all.first(std::min(all.size(), kPoisonStepBytes));
      std::fill(step.begin(), step.end(), std::byte{0xa5});
      all = all.subspan(step.size());
    }
  };
  fill(arena_.bytes());
  for (const std::span<std::byte> memory : caller_memory_) fill(memory);
}

DigestSum::DigestSum(const Plan& plan, int rank)
    : plan_(plan), rank_(checked_rank(rank, plan.ranks())) {
  const Recipe& recipe = *plan.recipe;
  seeds_.reserve(recipe.targets.size());
  for (uint32_t t = 0; t < recipe.targets.size(); ++t) {
    seeds_.push_back(digest_seed(recipe.targets[t].spec));
    if (recipe.is_alias(t)) {
      alias_seeds_.emplace_back(recipe.nodes[recipe.targets[t].root].from, seeds_.back());
    }
    if (rank == 0) sum_ += digest_of_empty(recipe.targets[t].spec);
  }
}

void DigestSum::add(uint32_t buffer, int64_t at, std::span<const std::byte> elements) {
  const int bits = bits_per_element(buffer_of(plan_, buffer, rank_).dtype);
  const auto n = static_cast<int64_t>(elements.size()) * 8 / bits;
  // Elements smaller than a byte are digested byte by byte.
  const auto scaled = [&](int64_t count) { return bits < 8 ? count * bits / 8 : count; };
  const bool is_target = buffer < plan_.recipe->targets.size();
  // Flat groups have no replicas, so each rank digests its part of them.
  if (is_target && !is_primary(*plan_.recipe, plan_.layout, buffer, rank_)) return;
  uint64_t sum = 0;
  for_each_held_run(plan_, buffer, rank_, {at, at + n},
                    [&](uint32_t target, int64_t global, int64_t local, int64_t count) {
                      const std::byte* from = elements.data() + (local - at) * bits / 8;
                      const auto add_with = [&](uint64_t seed) {
                        sum += digest_run(seed, from, std::max(8, bits) / 8, scaled(global),
                                          scaled(count));
                      };
                      add_with(seeds_[target]);
                      for (const auto& [alias, seed] : alias_seeds_) {
                        if (alias == target) add_with(seed);
                      }
                    });
  sum_.fetch_add(sum, std::memory_order_relaxed);
}

}  // namespace modicum
