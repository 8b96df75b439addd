#include "modicum/training/state_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <tuple>
#include <utility>

namespace modicum {
namespace {

struct PlaneName {
  Plane plane;
  std::string_view suffix;
};
constexpr const char* kLacksTensor = "the saved state lacks this tensor";
constexpr std::array<PlaneName, 4> kPlaneNames = {{{Plane::master, "master"},
                                                   {Plane::master_low, "master_low"},
                                                   {Plane::exp_avg, "exp_avg"},
                                                   {Plane::exp_avg_sq, "exp_avg_sq"}}};

// The dtype of a stored plane; empty if it is not stored. `has_master`: the parameter itself is the
// master, or its upper half.
std::optional<DType> stored_dtype(const StateFormatRow& row, Plane plane, bool has_master) {
  switch (plane) {
    case Plane::master: return has_master ? std::nullopt : std::optional(row.master);
    case Plane::master_low: return row.is_split() ? std::optional(row.master_low) : std::nullopt;
    case Plane::exp_avg: return row.moment;
    case Plane::exp_avg_sq: return row.has_scales() ? DType::u8 : row.moment;
    default: return std::nullopt;
  }
}

std::span<const StateOf> with_state(std::span<const StateOf> parameters) {
  if (!parameters.empty()) return parameters;
  fail(Category::unsupported,
       "no parameter is trained; the optimizer has no state that can be saved",
       {.expected = "an element that is not frozen"});
}

int64_t blocks_of(int64_t row, int64_t numel) {
  return numel == 0 ? 0 : ScaleBlocks(row).block_of(numel - 1) + 1;
}

std::vector<TensorSpec> specs_of(const StateOf& state) {
  const TensorSpec& parameter = state.parameter;
  std::vector<TensorSpec> specs;
  const auto add = [&](std::string name, DType dtype, std::vector<int64_t> shape) {
    specs.push_back({std::move(name), Role::param, dtype, std::move(shape)});
  };
  for (const StoredPlane& plane : stored_planes(state.format, state.is_master)) {
    std::string name = fmt::format("{}.{}", parameter.fqn, plane.suffix);
    add(name, plane.dtype, parameter.shape);
    if (!plane.has_scales) continue;
    name += kScaleSuffix;
    add(std::move(name), DType::f32,
        {blocks_of(moment_row(parameter.shape), numel_of(parameter.shape))});
  }
  return specs;
}

// Throws MISMATCH if the parameter can't get its master from a state of the form `saved`.
void require_master(const StateOf& state, const StateForm& saved) {
  const DType dtype = state.parameter.dtype;
  if (!saved.is_master || dtype == DType::f32 || dtype == row_of(saved.format).master) return;
  const bool was_f32 = !row_of(saved.format).is_split();
  fail(Category::mismatch,
       fmt::format("{}: the parameter was {} when it was saved", kLacksTensor,
                   was_f32 ? "float32" : "bfloat16"),
       {.tensor = fmt::format("{}.master", state.parameter.fqn)});
}

}  // namespace

bool is_moment_converted(const StateForm& saved, StateFormat format) noexcept {
  return row_of(saved.format).moment != row_of(format).moment;
}

// A parameter that is its own fp32 master has no stored plane to convert.
bool is_master_converted(const StateForm& saved, StateFormat format) noexcept {
  const StateFormatRow &from = row_of(saved.format), &to = row_of(format);
  if (saved.is_master && !from.is_split()) return false;
  return from.master != to.master || from.master_low != to.master_low;
}

std::vector<StoredPlane> stored_planes(StateFormat format, bool is_master) {
  const StateFormatRow& row = row_of(format);
  std::vector<StoredPlane> planes;
  for (const auto& [plane, suffix] : kPlaneNames) {
    const auto dtype = stored_dtype(row, plane, is_master);
    if (!dtype) continue;
    const bool has_scales =
        row.has_scales() && bits_per_element(*dtype) == 8 && plane != Plane::master_low;
    planes.push_back({plane, suffix, *dtype, has_scales});
  }
  return planes;
}

std::vector<TensorSpec> state_specs(std::span<const StateOf> parameters) {
  std::vector<TensorSpec> specs;
  for (const StateOf& state : parameters) {
    for (TensorSpec& spec : specs_of(state)) specs.push_back(std::move(spec));
  }
  std::sort(specs.begin(), specs.end(),
            [](const TensorSpec& a, const TensorSpec& b) { return a.fqn < b.fqn; });
  return specs;
}

std::vector<StateOf> state_of(const Run& run) {
  std::vector<StateOf> parameters;
  bool has_scales = false;
  for (const uint32_t t : trained_targets(run.recipe)) {
    const TensorSpec& spec = run.recipe.targets[t].spec;
    if (numel_of(spec.shape) == 0) continue;  // no rank has a shard of it
    const TrainedShard shard{.format = state_format_of(spec.dtype, spec.shape, *run.optimizer),
                             .dtype = spec.dtype};
    parameters.push_back({spec, shard.format, shard.is_master()});
    has_scales |= row_of(shard.format).has_scales();
  }
  if (!has_scales) return parameters;
  for_each_replica_group(run.layout, [&](std::span<const int> ranks) {
    for_each_trained(
        run.recipe, run.layout, *run.optimizer, ranks.front(), [&](TrainedShard&& shard) {
          if (!row_of(shard.format).has_scales()) return;
          require_whole_blocks(shard.shard, numel_of(run.recipe.targets[shard.target].spec.shape));
        });
  });
  return parameters;
}

void for_each_held(const RankOptimizer& optimizer, bool to_save,
                   FunctionRef<void(const HeldShard&)> fn) {
  optimizer.for_each_state([&](AdamW& state) {
    for (size_t shard = 0; shard < state.shards(); ++shard) {
      const ShardSpec& spec = state.shard(shard);
      if (!to_save || spec.counts) fn({state, shard, spec.fqn});
    }
  });
}

// A run that begins or ends within a block holds a part of the block.
void require_whole_blocks(const ShardSpec& shard, int64_t numel) {
  const ScaleBlocks blocks(shard.row);
  const auto is_edge = [&](int64_t at) { return at == numel || blocks.edge_after(at) == at; };
  for (const ShardRun& run : shard.runs) {
    if (is_edge(run.first) && is_edge(run.first + run.n)) continue;
    fail(Category::unsupported,
         "this layout divides blocks of 8-bit moments between ranks; their state can't be saved",
         {.tensor = shard.fqn,
          .expected = fmt::format("shards that end at multiples of {} within a row", kScaleBlock),
          .got = fmt::format("elements {} to {}", run.first, run.first + run.n)});
  }
}

StateFiles::StateFiles(const Run& run) : StateFiles(state_of(run)) {}

StateFiles::StateFiles(std::span<const StateOf> parameters)
    : manifest_(
          output_manifest(split_into_files(state_specs(with_state(parameters)), kStateFileBytes))) {
  sort_names();
}

void StateFiles::require_of(const Run& run) const { require_of(state_of(run)); }

void StateFiles::require_of(std::span<const StateOf> parameters) const {
  std::vector<bool> is_left(by_name_.size(), true);
  for (const StateOf& state : parameters) {
    const StateForm form = form_of(state.parameter.fqn);
    if (has_masters_) require_master(state, form);
    for (const TensorSpec& spec : specs_of({state.parameter, form.format, form.is_master})) {
      const auto found = find(spec.fqn);
      if (found == by_name_.end()) fail(Category::mismatch, kLacksTensor, {.tensor = spec.fqn});
      is_left[static_cast<size_t>(found - by_name_.begin())] = false;
      const TensorSpec& saved = manifest_.tensors[*found].spec;
      if (saved.dtype == spec.dtype && saved.shape == spec.shape) continue;
      fail(Category::mismatch, "the saved tensor has another dtype or shape",
           {.tensor = spec.fqn,
            .expected = tensor_text(spec.dtype, spec.shape),
            .got = tensor_text(saved.dtype, saved.shape)});
    }
  }
  const auto left = std::find(is_left.begin(), is_left.end(), true);
  if (left == is_left.end()) return;
  fail(Category::mismatch, "the saved state has a tensor that is not in this run's state",
       {.tensor = name_of(by_name_[static_cast<size_t>(left - is_left.begin())])});
}

StateForm StateFiles::form_of(const std::string& fqn) const {
  const TensorSpec* const moment = spec_of(fqn, "exp_avg");
  const TensorSpec* const low = spec_of(fqn, "master_low");
  if (moment == nullptr) {
    fail(Category::mismatch, kLacksTensor, {.tensor = fmt::format("{}.exp_avg", fqn)});
  }
  for (const StateFormatRow& row : all_state_formats()) {
    if (row.moment != moment->dtype || row.is_split() != (low != nullptr)) continue;
    if (low != nullptr && low->dtype != row.master_low) continue;
    return {row.format, spec_of(fqn, "master") == nullptr};
  }
  fail(Category::mismatch, "the saved state has dtypes of no state format",
       {.tensor = fqn,
        .got = fmt::format(
            "exp_avg {}{}", torch_name(moment->dtype),
            low == nullptr ? "" : fmt::format(", master_low {}", torch_name(low->dtype)))});
}

bool StateFiles::is_converted(std::span<const StateOf> parameters) const {
  return std::any_of(parameters.begin(), parameters.end(), [this](const StateOf& state) {
    const StateForm saved = form_of(state.parameter.fqn);
    return is_moment_converted(saved, state.format) || is_master_converted(saved, state.format);
  });
}

StateFiles::StateFiles(Manifest saved, bool has_masters)
    : manifest_(std::move(saved)), has_masters_(has_masters) {
  manifest_.recorded = {};  // only the opened checkpoint needs it
  sort_names();
  if (has_masters) return;
  std::erase_if(by_name_, [this](uint32_t s) { return name_of(s).ends_with(".master"); });
}

void StateFiles::sort_names() {
  by_name_.resize(manifest_.tensors.size());
  std::iota(by_name_.begin(), by_name_.end(), 0U);
  std::sort(by_name_.begin(), by_name_.end(),
            [this](uint32_t a, uint32_t b) { return name_of(a) < name_of(b); });
}

std::vector<uint32_t>::const_iterator StateFiles::find(const std::string& name) const {
  const auto found = std::lower_bound(
      by_name_.begin(), by_name_.end(), name,
      [this](uint32_t s, const std::string& wanted) { return name_of(s) < wanted; });
  return found != by_name_.end() && name_of(*found) == name ? found : by_name_.end();
}

uint64_t StateFiles::held_bytes() const {
  return manifest_.held_bytes() + heap_block_bytes(by_name_.size() * sizeof(uint32_t));
}

Footprint StateFiles::footprint() const {
  Footprint result;
  result[Purpose::header] = held_bytes() + text_bytes(manifest_);
  result[Purpose::plan] = ChunkSums::held_bytes(manifest_);
  return result;
}

const TensorSpec* StateFiles::spec_of(const std::string& fqn, std::string_view suffix) const {
  const auto found = find(fmt::format("{}.{}", fqn, suffix));
  return found == by_name_.end() ? nullptr : &manifest_.tensors[*found].spec;
}

uint32_t StateFiles::stored(const std::string& fqn, std::string_view suffix) const {
  const auto found = find(fmt::format("{}.{}", fqn, suffix));
  MODICUM_ASSERT(found != by_name_.end());
  return *found;
}

// Goes in the order of the files, so that ranks which write to the same pages do so at about the
// same time.
void StateFiles::for_each_span(HeldShards shards, FunctionRef<void(const StoredSpan&)> fn) const {
  std::vector<HeldShard> held_shards;
  shards([&](const HeldShard& held_shard) {
    if (!held_shard.adamw.shard(held_shard.shard).runs.empty()) held_shards.push_back(held_shard);
  });
  std::vector<std::pair<const HeldShard*, Part>> parts;
  for (const HeldShard& held_shard : held_shards) {
    const bool has_master = held_shard.adamw.shard(held_shard.shard).master != nullptr;
    for (const StoredPlane& plane : stored_planes(held_shard.adamw.format(), has_master)) {
      parts.push_back({&held_shard, {stored(held_shard.fqn, plane.suffix), plane.plane, false}});
      if (held_shard.adamw.scales(held_shard.shard, plane.plane).empty()) continue;
      const std::string suffix = fmt::format("{}{}", plane.suffix, kScaleSuffix);
      parts.push_back({&held_shard, {stored(held_shard.fqn, suffix), plane.plane, true}});
    }
  }
  std::sort(parts.begin(), parts.end(),
            [](const auto& a, const auto& b) { return a.second.stored < b.second.stored; });
  for (const auto& [held_shard, part] : parts) for_each_span(*held_shard, part, fn);
}

void StateFiles::for_each_span(const HeldShard& held_shard, const Part& part,
                               FunctionRef<void(const StoredSpan&)> fn) const {
  AdamW& state = held_shard.adamw;
  const size_t shard = held_shard.shard;
  const ShardSpec& spec = state.shard(shard);
  const std::span<std::byte> plane_bytes =
      part.is_scale ? std::as_writable_bytes(state.scales(shard, part.plane))
                    : state.plane(shard, part.plane);
  const DType dtype = manifest_.tensors[part.stored].spec.dtype;
  const ScaleBlocks blocks(spec.row);
  uint64_t done = 0;
  for (const ShardRun& run : spec.runs) {
    int64_t first = run.first, end = run.first + run.n;
    if (part.is_scale) {
      first = blocks.block_of(first);
      end = blocks.block_of(end - 1) + 1;
    }
    const uint64_t bytes = bytes_of(dtype, end - first);
    MODICUM_ASSERT(done + bytes <= plane_bytes.size());
    fn({part.stored, bytes_of(dtype, first), plane_bytes.subspan(done, bytes)});
    done += bytes;
  }
}

}  // namespace modicum
