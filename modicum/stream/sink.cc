#include "modicum/stream/sink.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "modicum/kernels/kernels.h"

namespace modicum {
namespace {

// What tells one tensor's elements from another's in the digest: name, dtype and shape.
uint64_t digest_seed(const TensorSpec& spec) {
  return name_hash(
      fmt::format("{}|{}|{}", spec.fqn, torch_name(spec.dtype), shape_text(spec.shape)));
}

}  // namespace

HostSink::HostSink(const Plan& plan, int rank, Ledger& ledger, int threads) : plan_(plan) {
  begins_.reserve(buffer_count(plan) + 1);
  uint64_t end = 0;
  for (uint32_t b = 0; b < buffer_count(plan); ++b) {
    const uint64_t bytes = buffer_of(plan, b, rank).bytes();
    const uint64_t begin = bytes > 0 ? round_up(end, kBufferAlignment) : end;
    begins_.push_back(begin);
    end = begin + bytes;
  }
  begins_.push_back(end);
  arena_ = ledger.charge(Purpose::shards, end, threads);
  rank_ = rank;
}

std::span<std::byte> HostSink::host(uint32_t buffer) noexcept {
  buffer = holder_of(plan_, buffer);
  return arena_.bytes().subspan(begins_[buffer], buffer_of(plan_, buffer, rank_).bytes());
}

void HostSink::copy(uint32_t buffer, int64_t at, std::span<const std::byte> elements) {
  const auto begin =
      static_cast<size_t>(at * bytes_per_element(buffer_of(plan_, buffer, rank_).dtype));
  std::memcpy(host(buffer).data() + begin, elements.data(), elements.size());
}

void HostSink::poison() noexcept {
  const std::span<std::byte> all = arena_.bytes();  // none, where a rank has no elements
  std::fill(all.begin(), all.end(), std::byte{0xa5});
}

DigestSum::DigestSum(const Plan& plan, int rank) : plan_(plan), rank_(rank) {
  const Recipe& recipe = *plan.recipe;
  seeds_.reserve(recipe.targets.size());
  for (uint32_t t = 0; t < recipe.targets.size(); ++t) {
    seeds_.push_back(digest_seed(recipe.targets[t].spec));
    if (recipe.is_alias(t)) {
      alias_seeds_.emplace_back(recipe.nodes[recipe.targets[t].root].from, seeds_.back());
    }
    // The tensor itself, so that empty ones count too.
    if (rank == 0) sum_ += name_hash(fmt::format("{:016x}", seeds_.back()));
  }
}

void DigestSum::add(uint32_t buffer, int64_t at, std::span<const std::byte> elements) noexcept {
  const int bits = bits_per_element(buffer_of(plan_, buffer, rank_).dtype);
  const auto n = static_cast<int64_t>(elements.size()) * 8 / bits;
  // Elements below a byte are digested by the byte.
  const auto scaled = [&](int64_t count) { return bits < 8 ? count * bits / 8 : count; };
  const bool is_target = buffer < plan_.recipe->targets.size();
  if (is_target && !is_primary(plan_, buffer, rank_)) return;  // what is flat is held once
  uint64_t sum = 0;
  for_each_held_run(plan_, buffer, rank_, at, n,
                    [&](uint32_t target, int64_t global, int64_t local, int64_t count) {
                      const std::byte* from = elements.data() + (local - at) * bits / 8;
                      const auto add_with = [&](uint64_t seed) {
                        sum += digest_run(seed, from, std::max(8, bits) / 8, scaled(global),
                                          scaled(count));
                      };
                      add_with(seeds_[target]);
                      for (const auto& [of, seed] : alias_seeds_) {
                        if (of == target) add_with(seed);
                      }
                    });
  sum_.fetch_add(sum, std::memory_order_relaxed);
}

}  // namespace modicum
