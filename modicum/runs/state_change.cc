#include "modicum/runs/state_change.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "modicum/runs/runs.h"

namespace modicum {
namespace {

std::string_view moments_text(DType moment) {
  switch (moment) {
    case DType::f32: return "fp32 moments";
    case DType::bf16: return "bf16 moments";
    default: return "8-bit moments";
  }
}

std::string state_text(DType dtype, const StateFormatRow& row) {
  if (dtype == DType::f32) {
    const bool is_torchs = row.format == StateFormat::fp32;
    return fmt::format("as torch's AdamW over fp32 parameters{}",
                       is_torchs ? "" : fmt::format(", but with {}", moments_text(row.moment)));
  }
  if (!row.is_split()) {
    return fmt::format("with separate fp32 masters, fp32 gradients and {}",
                       moments_text(row.moment));
  }
  return fmt::format("as upper half of {}-bit masters, with bf16 gradients and {}",
                     row.master_bits(), moments_text(row.moment));
}

// The dtypes of stored elements that `other` rounds to bfloat16 and `run` does not. Scales that
// `other` multiplies into their codes are targets of `run` only.
std::set<std::string_view> rounded_dtypes(const Run& run, const Run& other) {
  std::map<std::string_view, DType> dtypes;
  for (const Target& target : run.recipe.targets) {
    dtypes.emplace(target.spec.fqn, target.spec.dtype);
  }
  std::set<std::string_view> names;
  for (const Target& target : other.recipe.targets) {
    const auto same = dtypes.find(target.spec.fqn);
    if (same == dtypes.end() || same->second == target.spec.dtype) continue;
    for (const uint32_t stored : stored_under(other.recipe, target.root)) {
      const DType dtype = other.checkpoint.manifest.tensors[stored].spec.dtype;
      if (dtype != DType::bf16) names.insert(torch_name(dtype));
    }
  }
  return names;
}

// How coarse moments are: 0 for fp32.
int moment_loss(DType moment) { return moment == DType::f32 ? 0 : moment == DType::bf16 ? 1 : 2; }

// Bytes per parameter over all parameters.
double mean_bytes(std::span<const ParametersOfDType> groups, bool on_device) {
  double bytes = 0;
  double numel = 0;
  for (const auto& [dtype, row, numel_of_group] : groups) {
    bytes += bytes_per_parameter(dtype, *row, on_device) * static_cast<double>(numel_of_group);
    numel += static_cast<double>(numel_of_group);
  }
  return numel == 0 ? 0 : bytes / numel;
}

// The least bits of a master, the coarsest moments and the widest gradients.
struct Precision {
  int master_bits = 32;
  int loss_of_moments = 0;
  int grad_bits = 0;
  std::string_view moments = "fp32 moments";

  explicit Precision(std::span<const ParametersOfDType> groups) {
    for (const ParametersOfDType& group : groups) {
      const StateFormatRow& row = *group.row;
      master_bits = std::min(master_bits, row.master_bits());
      grad_bits = std::max(grad_bits, bits_per_element(row.grad));
      if (moment_loss(row.moment) <= loss_of_moments) continue;
      loss_of_moments = moment_loss(row.moment);
      moments = moments_text(row.moment);
    }
  }
};

class Note {
 public:
  void add(std::string_view clause) {
    text_ += fmt::format("{}{}", text_.empty() ? "" : "; ", clause);
  }
  void lose(int loss, std::string_view clause) {
    add(fmt::format("{}{}", loss_ == 0 ? "lossy: " : "", clause));
    loss_ += loss;
  }
  StateChange finish() && { return {loss_, std::move(text_)}; }

 private:
  int loss_ = 0;
  std::string text_;
};

// Without an optimizer in the plan, the loaded parameters are what an optimizer would update.
StateChange change_of_weights(const std::set<std::string_view>& rounded) {
  Note note;
  note.lose(1, "the loaded weights have 16 bits, with no 32-bit master");
  if (!rounded.empty()) {
    note.lose(1, fmt::format("{} is rounded to bf16", fmt::join(rounded, ", ")));
  }
  return std::move(note).finish();
}

}  // namespace

std::vector<ParametersOfDType> parameters_by_dtype(const Recipe& recipe, StateFormat asked) {
  static constexpr std::array<int64_t, 2> kMatrix = {kLeastCoded, kScaleBlock};
  std::vector<ParametersOfDType> groups;
  for (const uint32_t t : trained_targets(recipe)) {
    const TensorSpec& spec = recipe.targets[t].spec;
    auto same = std::find_if(groups.begin(), groups.end(), [&](const ParametersOfDType& group) {
      return group.dtype == spec.dtype;
    });
    if (same == groups.end()) {
      const StateFormat format = state_format_of(spec.dtype, kMatrix, asked);
      same = groups.insert(same, {spec.dtype, &row_of(format), 0});
    }
    same->numel += static_cast<uint64_t>(numel_of(spec.shape));
  }
  std::stable_sort(groups.begin(), groups.end(),
                   [](const auto& a, const auto& b) { return a.numel > b.numel; });
  return groups;
}

std::string optimizer_text(const Run& run) {
  if (!run.optimizer) return "none";
  std::string text = fmt::format("adamw:{}", row_of(*run.optimizer).name);
  const std::vector<ParametersOfDType> parameters = parameters_by_dtype(run.recipe, *run.optimizer);
  if (parameters.empty()) return text + ", no trained parameter";
  const ParametersOfDType& most = parameters.front();
  return text + fmt::format(" over {} parameters, {}: {:.6g} bytes per parameter{}",
                            torch_name(most.dtype), state_text(most.dtype, *most.row),
                            bytes_per_parameter(most.dtype, *most.row, run.on_device),
                            run.on_device ? " on the host" : "");
}

std::optional<StateChange> state_change(const Run& run, const Run& other,
                                        std::optional<StateFormat> format) {
  const bool is_cast = &other != &run;
  const std::set<std::string_view> rounded =
      is_cast ? rounded_dtypes(run, other) : std::set<std::string_view>{};
  if (!run.optimizer) {
    if (!is_cast) return StateChange{};
    return change_of_weights(rounded);
  }
  const auto before = parameters_by_dtype(run.recipe, *run.optimizer);
  const auto after = parameters_by_dtype(other.recipe, format.value_or(*run.optimizer));
  const double bytes = mean_bytes(after, run.on_device);
  if (!is_cast && !format) return StateChange{};
  if (bytes >= mean_bytes(before, run.on_device)) return std::nullopt;
  const Precision from(before);
  const Precision to(after);
  Note note;
  note.add(fmt::format("{:.6g} bytes per parameter", bytes));
  if (to.loss_of_moments > from.loss_of_moments) {
    note.lose(to.loss_of_moments, to.moments);
  }
  if (to.master_bits < from.master_bits) {
    note.lose(1, fmt::format("{}-bit master", to.master_bits));
  }
  if (!rounded.empty()) {
    note.lose(1, fmt::format("{} as stored is rounded to bf16", fmt::join(rounded, ", ")));
  }
  const bool same_moments = to.loss_of_moments <= from.loss_of_moments;
  if (to.master_bits >= from.master_bits) {
    note.add(
        fmt::format("same {}-bit master{}", to.master_bits, same_moments ? " and moments" : ""));
  }
  if (is_cast) note.add("forward as with bf16 mixed precision");
  if (to.grad_bits < from.grad_bits) {
    note.add(is_cast ? "gradients arrive as bf16" : "gradients are kept as bf16");
  }
  return std::move(note).finish();
}

}  // namespace modicum
