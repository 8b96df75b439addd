#include "modicum/stream/sink.h"

#include <fmt/format.h>

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
  begins_.reserve(plan.recipe->targets.size() + 1);
  uint64_t end = 0;
  for (uint32_t t = 0; t < plan.recipe->targets.size(); ++t) {
    if (plan.recipe->is_alias(t)) {
      begins_.push_back(end);
      continue;
    }
    const uint64_t begin = round_up(end, kBufferAlignment);
    begins_.push_back(begin);
    end = begin + local_buffer(plan.layout, plan.recipe->targets[t].spec, rank).bytes();
  }
  begins_.push_back(end);
  arena_ = ledger.charge(Purpose::shards, end, threads);
  rank_ = rank;
}

std::span<std::byte> HostSink::host(uint32_t buffer) noexcept {
  if (plan_.recipe->is_alias(buffer))
    buffer = plan_.recipe->nodes[plan_.recipe->targets[buffer].root].from;
  const LocalBuffer local = local_buffer(plan_.layout, plan_.recipe->targets[buffer].spec, rank_);
  return arena_.bytes().subspan(begins_[buffer], local.bytes());
}

void HostSink::copy(uint32_t buffer, int64_t at, std::span<const std::byte> elements) {
  const auto begin =
      static_cast<size_t>(at * bytes_per_element(plan_.recipe->targets[buffer].spec.dtype));
  std::memcpy(host(buffer).data() + begin, elements.data(), elements.size());
}

void HostSink::poison() noexcept {
  std::memset(arena_.bytes().data(), 0xa5, arena_.bytes().size());
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
  const TensorSpec& spec = plan_.recipe->targets[buffer].spec;
  if (!is_primary(plan_.layout, spec, rank_)) return;
  // Elements below a byte are digested by the byte.
  const int bits = std::max(8, bits_per_element(spec.dtype));
  const int64_t per_byte = bits_per_element(spec.dtype) < 8 ? 8 : bits;
  const auto n = static_cast<int64_t>(elements.size()) * 8 / bits_per_element(spec.dtype);
  const int64_t numel = local_buffer(plan_.layout, spec, rank_).numel;
  uint64_t sum = 0;
  for_each_piece(plan_.layout, spec, rank_, [&](const Box& piece) {
    const int64_t end = std::min(at + n, std::min(numel, piece.at + piece.numel()));
    const auto scaled = [&](int64_t count) {
      return count * bits_per_element(spec.dtype) / per_byte;
    };
    if (end <= std::max(at, piece.at)) return;
    for_each_global_run(piece, std::max(at, piece.at) - piece.at, end - piece.at,
                        [&](int64_t global, int64_t local, int64_t count) {
                          const std::byte* from =
                              elements.data() +
                              (local + piece.at - at) * bits_per_element(spec.dtype) / 8;
                          const auto add_with = [&](uint64_t seed) {
                            sum += digest_run(seed, from, bits / 8, scaled(global), scaled(count));
                          };
                          add_with(seeds_[buffer]);
                          for (const auto& [target, seed] : alias_seeds_) {
                            if (target == buffer) add_with(seed);
                          }
                        });
  });
  sum_.fetch_add(sum, std::memory_order_relaxed);
}

}  // namespace modicum
