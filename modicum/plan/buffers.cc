// A rank's local buffers: one per target, then one per flat group.
#include <fmt/format.h>

#include <algorithm>

#include "modicum/plan/plan.h"

namespace modicum {
namespace {

uint32_t target_count(const Plan& plan) noexcept {
  return static_cast<uint32_t>(plan.recipe->targets.size());
}

// The flat group of a buffer; null for a target's own buffer.
const FlatGroup* flat_of_buffer(const Plan& plan, uint32_t buffer) noexcept {
  return buffer < target_count(plan) ? nullptr : &plan.layout.flats[buffer - target_count(plan)];
}

void require_buffer(const Plan& plan, uint32_t buffer) {
  checked_index("local buffer", buffer, buffer_count(plan));
}

}  // namespace

uint32_t buffer_count(const Plan& plan) noexcept {
  return target_count(plan) + static_cast<uint32_t>(plan.layout.flats.size());
}

LocalBuffer buffer_of(const Plan& plan, uint32_t buffer, int rank) {
  require_buffer(plan, buffer);
  checked_rank(rank, plan.ranks());
  if (const FlatGroup* flat = flat_of_buffer(plan, buffer)) return local_buffer(*flat, rank);
  const TensorSpec& spec = plan.recipe->targets[buffer].spec;
  if (plan.recipe->is_alias(buffer) || plan.layout.is_flat(buffer)) return {spec.dtype, 0, 0};
  return local_buffer(plan.layout.sharding_of(buffer), spec, rank);
}

uint32_t holder_of(const Plan& plan, uint32_t buffer) {
  require_buffer(plan, buffer);
  const Recipe& recipe = *plan.recipe;
  const bool is_alias = buffer < target_count(plan) && recipe.is_alias(buffer);
  return is_alias ? recipe.nodes[recipe.targets[buffer].root].from : buffer;
}

Destination destination_of(const Plan& plan, uint32_t buffer) {
  require_buffer(plan, buffer);
  const PlanOptions& options = plan.options;
  return buffer < options.destination_of.size() ? options.destination_of[buffer]
                                                : options.destination;
}

std::vector<uint64_t> arena_begins(const Plan& plan, int rank) {
  checked_rank(rank, plan.ranks());
  std::vector<uint64_t> begins;
  begins.reserve(buffer_count(plan) + 1);
  uint64_t end = 0;
  for (uint32_t b = 0; b < buffer_count(plan); ++b) {
    const bool is_in_arena = destination_of(plan, b) == Destination::cpu;
    const uint64_t bytes = is_in_arena ? buffer_of(plan, b, rank).bytes() : 0;
    const uint64_t begin = bytes > 0 ? round_up(end, kBufferAlignment) : end;
    begins.push_back(begin);
    end = begin + bytes;
  }
  begins.push_back(end);
  return begins;
}

std::string buffer_name(const Plan& plan, uint32_t buffer) {
  require_buffer(plan, buffer);
  if (buffer < target_count(plan)) return plan.recipe->targets[buffer].spec.fqn;
  if (plan.layout.flats.size() == 1) return "flat";
  return fmt::format("flat.{}", buffer - target_count(plan));
}

void for_each_piece(const Recipe& recipe, const Layout& layout, uint32_t target, int rank,
                    FunctionRef<void(uint32_t buffer, const Box& piece)> piece) {
  checked_index("target", target, recipe.targets.size());
  checked_rank(rank, layout.world_size());
  const TensorSpec& spec = recipe.targets[target].spec;
  if (!layout.is_flat(target)) {
    for_each_piece(layout.sharding_of(target), spec, rank,
                   [&](const Box& box) { piece(target, box); });
    return;
  }
  const Layout::Place& place = layout.places[target];
  const Box box = flat_piece(layout.flats[place.flat], place.begin, numel_of(spec.shape), rank);
  if (!box.empty()) piece(static_cast<uint32_t>(recipe.targets.size()) + place.flat, box);
}

void for_each_held_run(
    const Plan& plan, uint32_t buffer, int rank, const Chunk& chunk,
    FunctionRef<void(uint32_t target, int64_t global, int64_t local, int64_t n)> run) {
  require_buffer(plan, buffer);
  checked_rank(rank, plan.ranks());
  const auto of_target = [&](uint32_t target) {
    for_each_piece(*plan.recipe, plan.layout, target, rank, [&](uint32_t, const Box& piece) {
      for_each_global_run(
          piece, chunk.lo, chunk.hi,
          [&](int64_t global, int64_t local, int64_t count) { run(target, global, local, count); });
    });
  };
  const FlatGroup* flat = flat_of_buffer(plan, buffer);
  if (flat == nullptr) return of_target(buffer);
  const int64_t begin = rank * flat->part + chunk.lo;
  const auto after = std::upper_bound(flat->begins.begin(), flat->begins.end(), begin);
  for (auto i = static_cast<size_t>(std::max<int64_t>(0, after - flat->begins.begin() - 1));
       i < flat->targets.size() && flat->begins[i] < begin + chunk.size(); ++i) {
    of_target(flat->targets[i]);
  }
}

bool is_primary(const Recipe& recipe, const Layout& layout, uint32_t target, int rank) {
  checked_index("target", target, recipe.targets.size());
  checked_rank(rank, layout.world_size());
  if (layout.is_flat(target)) return true;  // each element is held once
  return is_primary(layout.sharding_of(target), recipe.targets[target].spec, rank);
}

}  // namespace modicum
