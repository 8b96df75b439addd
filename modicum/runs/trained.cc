#include "modicum/runs/trained.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "modicum/plan/plan.h"

namespace modicum {
namespace {

constexpr std::string_view kAdamW = "adamw:";
// The limit per rank and parameter: each run takes 48 bytes in addition to the state, and a
// microsecond to plan.
constexpr size_t kMaxRuns = size_t{1} << 22;

bool is_trained(const Recipe& recipe, uint32_t target) {
  const TensorSpec& spec = recipe.targets[target].spec;
  if (recipe.is_alias(target) || spec.role != Role::param) return false;
  if (is_castable(spec.dtype)) return true;
  if (!can_require_grad(spec.dtype)) return false;
  const bool is_castable_code = recipe.nodes[recipe.targets[target].root].is_scaled;
  fail(Category::unsupported,
       fmt::format("AdamW can't train a parameter of dtype {}; {}", torch_name(spec.dtype),
                   is_castable_code ? "--dtype casts it" : "--frozen leaves it out"),
       {.tensor = spec.fqn,
        .expected = "float32, bfloat16 or float16",
        .got = std::string(torch_name(spec.dtype))});
}

}  // namespace

std::optional<StateFormat> optimizer_flag(const std::string& flag) {
  if (flag == "none") return std::nullopt;
  if (flag.starts_with(kAdamW)) return state_format_named(flag.substr(kAdamW.size())).format;
  std::vector<std::string_view> formats;
  for (const StateFormatRow& row : state_formats()) formats.push_back(row.name);
  fail(
      Category::usage, fmt::format("unknown optimizer '{}'", printable(flag)),
      {.expected = fmt::format("none or adamw:FORMAT, of the formats {}", fmt::join(formats, ", ")),
       .got = printable(flag)});
}

FrozenSet::FrozenSet(const std::string& expression, std::span<const std::string> names)
    : expression_(printable(expression)), names_(names.begin(), names.end()) {
  if (!expression.empty()) pattern_.emplace("--frozen", expression);
}

void FrozenSet::mark(Recipe& recipe) const {
  bool has_match = false;
  for (uint32_t t = 0; t < recipe.targets.size(); ++t) {
    const uint32_t target = recipe.is_alias(t) ? recipe.nodes[recipe.targets[t].root].from : t;
    TensorSpec& spec = recipe.targets[target].spec;
    if (!can_require_grad(spec.dtype)) continue;
    const std::string& fqn = recipe.targets[t].spec.fqn;
    const bool is_match = pattern_ && pattern_->finds(fqn);
    has_match |= is_match;
    if (is_match || names_.contains(fqn)) spec.role = Role::buffer;
  }
  if (!pattern_ || has_match) return;
  fail(Category::usage, fmt::format("--frozen '{}' matches no parameter", expression_),
       {.expected = "a regular expression that a parameter's name matches", .got = expression_});
}

void for_each_trained(const Recipe& recipe, const Layout& layout, StateFormat format, int rank,
                      FunctionRef<void(TrainedShard&& shard)> fn) {
  for (uint32_t t = 0; t < recipe.targets.size(); ++t) {
    if (!is_trained(recipe, t)) continue;
    const TensorSpec& spec = recipe.targets[t].spec;
    TrainedShard shard{.format = state_format_of(spec.dtype, spec.shape, format),
                       .target = t,
                       .dtype = spec.dtype};
    if (row_of(shard.format).has_scales()) shard.shard.row = moment_row(spec.shape);
    std::vector<ShardRun>& of_shard = shard.shard.runs;
    int64_t next_at = 0;
    // Appends a run, or extends the last one if the new run continues it.
    const auto add = [&](uint32_t buffer, int64_t at, const ShardRun& run) {
      const int64_t next_first = of_shard.empty() ? 0 : of_shard.back().first + of_shard.back().n;
      if (of_shard.empty()) {
        shard.buffer = buffer;
        shard.at = next_at = at;
      }
      // In all layouts a parameter's elements are contiguous and in order in the local buffer.
      MODICUM_ASSERT(at == next_at);
      MODICUM_ASSERT(run.first >= next_first);
      next_at += run.n;
      if (of_shard.size() == kMaxRuns) {
        fail(Category::unsupported, "a shard has too many separate runs to be trained",
             {.tensor = spec.fqn, .expected = fmt::format("at most {} runs in a rank", kMaxRuns)});
      }
      if (of_shard.empty() || run.first > next_first) return of_shard.push_back(run);
      of_shard.back().n += run.n;
    };
    for_each_piece(recipe, layout, t, rank, [&](uint32_t buffer, const Box& piece) {
      for_each_runs(piece, [&](const Runs& runs) {
        MODICUM_ASSERT(runs.at_step == 1 || runs.length == 1);
        for (int64_t k = 0; k < runs.count; ++k) {
          add(buffer, runs.at + k * runs.at_stride, {runs.first + k * runs.stride, runs.length});
        }
      });
    });
    if (of_shard.empty()) continue;
    of_shard.shrink_to_fit();  // kept as long as the state; the promise counts its size
    shard.shard.fqn = spec.fqn;
    shard.shard.counts = is_primary(recipe, layout, t, rank);
    fn(std::move(shard));
  }
}

std::vector<uint32_t> trained_targets(const Recipe& recipe) {
  std::vector<uint32_t> targets;
  for (uint32_t t = 0; t < recipe.targets.size(); ++t) {
    if (is_trained(recipe, t)) targets.push_back(t);
  }
  return targets;
}

std::vector<int64_t> trained_sizes(const Recipe& recipe) {
  std::vector<int64_t> sizes;
  for (const uint32_t t : trained_targets(recipe)) {
    sizes.push_back(numel_of(recipe.targets[t].spec.shape));
  }
  return sizes;
}

namespace {

Footprint footprint_of(std::span<const AdamWCount> states) {
  Footprint footprint;
  for (const AdamWCount& state : states) {
    footprint += state.footprint();
    footprint[Purpose::plan] += state.held_bytes();
  }
  return footprint;
}

}  // namespace

Footprint training_footprint(std::span<const AdamWCount> states) {
  Footprint footprint = footprint_of(states);
  footprint[Purpose::staging] += kGradientStagingBytes;
  return footprint;
}

Footprint device_training_footprint(std::span<const AdamWCount> states, int threads) {
  Footprint footprint = footprint_of(states);
  const auto used = std::count_if(states.begin(), states.end(), [](const AdamWCount& state) {
    return state.footprint().total() > 0;
  });
  footprint[Purpose::staging] += static_cast<uint64_t>(used) * static_cast<uint64_t>(threads) *
                                 kDeviceSlotsPerThread * kRingSlotBytes;
  return footprint;
}

Phase step_phase(const Recipe& recipe, const Layout& layout, StateFormat format,
                 std::optional<int> device_threads) {
  const auto footprint_on = [&](int rank) {
    std::vector<AdamWCount> states;
    for (const StateFormatRow& row : all_state_formats()) {
      states.emplace_back(row.format, std::vector{AdamOptions{}});
    }
    for_each_trained(recipe, layout, format, rank, [&](TrainedShard&& shard) {
      states[static_cast<size_t>(shard.format)].add(shard.shard,
                                                    device_threads || !shard.is_master());
    });
    return device_threads ? device_training_footprint(states, *device_threads)
                          : training_footprint(states);
  };
  Phase phase{"step", std::vector<Footprint>(static_cast<size_t>(layout.world_size()))};
  for_each_replica_group(layout, [&](std::span<const int> ranks) {
    const Footprint footprint = footprint_on(ranks.front());
    for (const int rank : ranks) phase.of_rank[static_cast<size_t>(rank)] = footprint;
  });
  return phase;
}

}  // namespace modicum
