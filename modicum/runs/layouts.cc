#include "modicum/runs/runs.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <utility>

namespace modicum {
namespace {

// Parses "2x4" or "2x2x2": 2 to `most` sizes with product `ranks`.
std::vector<int> mesh_of(std::string_view flag, const std::string& text, size_t most, int ranks) {
  std::vector<int> sizes;
  int64_t product = 1;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (at != end) {
    int size = 0;
    const auto [after, error] = std::from_chars(at, end, size);
    const bool goes_on = after != end && *after == 'x' && after + 1 != end;
    if (error != std::errc() || size < 1 || (after != end && !goes_on) || sizes.size() == most) {
      sizes.clear();
      break;
    }
    sizes.push_back(size);
    product *= std::min(size, kMaxRanks + 1);  // three such sizes can't overflow
    at = after == end ? end : after + 1;
  }
  if (sizes.size() < 2) {
    const std::string_view also = most > 2 ? " or AxBxC" : "";
    fail(Category::usage, fmt::format("{} '{}' is not a mesh", flag, printable(text)),
         {.expected = fmt::format("AxB{}, as in 2x4", also), .got = printable(text)});
  }
  if (product != ranks) {
    fail(Category::usage, fmt::format("the sizes of {} {} don't multiply to --ranks", flag, text),
         {.expected = fmt::format("{}", ranks), .got = fmt::format("{}", product)});
  }
  return sizes;
}

Layout meshed_layout(const RunFlags& flags) {
  if (flags.layout == "none") return whole_layout(flags.ranks);
  if (flags.layout == "fsdp2") return fsdp2_layout(flags.ranks, flags.shard_dim);
  std::vector<int> sizes = mesh_of("--mesh", flags.mesh, 3, flags.ranks);
  if (flags.layout == "hsdp") {
    return hsdp_layout(sizes[0], {sizes.begin() + 1, sizes.end()}, flags.shard_dim);
  }
  const int tp = sizes.back();
  sizes.pop_back();
  return tp_fsdp_layout(sizes, tp, flags.shard_dim);
}

// Refuses flags that don't apply to the layout.
void refuse_inapplicable(const RunFlags& flags) {
  const bool is_meshed = flags.layout == "hsdp" || flags.layout == "tp-fsdp";
  const bool is_flat = flags.layout == "zero1" || flags.layout == "zero2";
  const auto only_for = [&](bool is_given, bool allowed, std::string_view flag,
                            std::string_view layout) {
    if (is_given && !allowed) {
      fail(Category::usage, fmt::format("{} does not apply to this layout", flag),
           {.expected = fmt::format("--layout {}", layout),
            .got = fmt::format("--layout {}", printable(flags.layout))});
    }
  };
  const bool is_tp = flags.layout == "tp-fsdp";
  only_for(!flags.mesh.empty(), is_meshed, "--mesh", "hsdp or tp-fsdp");
  only_for(!flags.tp_rowwise.empty(), is_tp, "--tp-rowwise", "tp-fsdp");
  only_for(!flags.tp_packed.empty(), is_tp, "--tp-packed", "tp-fsdp");
  only_for(!flags.tp_replicate.empty(), is_tp, "--tp-replicate", "tp-fsdp");
  only_for(!flags.expert_mesh.empty(), is_meshed || flags.layout == "fsdp2", "--expert-mesh",
           "fsdp2, hsdp or tp-fsdp");
  only_for(flags.shard_dim != 0, is_meshed || flags.layout == "fsdp2", "--shard-dim",
           "fsdp2, hsdp or tp-fsdp");
  if (flags.experts != kDefaultExperts && flags.expert_mesh.empty()) {
    fail(Category::usage, "--experts needs --expert-mesh", {.got = printable(flags.experts)});
  }
  only_for(flags.round_robin, is_flat, "--round-robin", "zero1 or zero2");
}

// Returns a name with static lifetime, since a Layout borrows its name.
std::string_view known_layout(const std::string& layout) {
  static const std::vector<std::string> names = {"fsdp2", "hsdp",  "tp-fsdp", "zero1",
                                                 "zero2", "zero3", "none"};
  return names[index_named("layout", layout, names)];
}

// A kind of tensors that are sharded differently from the rest, and its pattern of names.
struct Kind {
  NamePattern names;
  uint8_t kind;

  bool has(const TensorSpec* target) const { return target != nullptr && names.finds(target->fqn); }
};

}  // namespace

Layout asked_layout(const RunFlags& flags, Targets targets) {
  const std::string_view name = known_layout(flags.layout);
  refuse_inapplicable(flags);
  if (name == "zero3") return zero3_layout(flags.ranks, targets);
  if (name.starts_with("zero")) return flat_layout(name, flags.ranks, targets, flags.round_robin);
  Layout layout = meshed_layout(flags);
  std::vector<Kind> kinds;  // for each target, the first kind whose pattern matches applies
  const auto add = [&](std::string_view flag, const std::string& expression, auto number) {
    if (expression.empty()) return;
    kinds.push_back({NamePattern(flag, expression), static_cast<uint8_t>(number)});
    const auto is_found = [&](const TensorSpec* target) { return kinds.back().has(target); };
    if (targets.empty() || std::any_of(targets.begin(), targets.end(), is_found)) return;
    fail(Category::usage, fmt::format("{} '{}' matches no tensor", flag, printable(expression)),
         {.expected = "a regular expression that a tensor's name matches",
          .got = printable(expression)});
  };
  if (!flags.expert_mesh.empty()) {
    const auto sizes = mesh_of("--expert-mesh", flags.expert_mesh, 2, flags.ranks);
    add("--expert-mesh with --experts", flags.experts,
        add_expert_kind(layout, sizes[0], sizes[1], flags.shard_dim));
  }
  add("--tp-rowwise", flags.tp_rowwise, TpKind::rows);
  add("--tp-packed", flags.tp_packed, TpKind::packed);
  add("--tp-replicate", flags.tp_replicate, TpKind::replicated);
  if (kinds.empty()) return layout;
  for (const TensorSpec* target : targets) {
    const auto kind = std::find_if(kinds.begin(), kinds.end(),
                                   [&](const Kind& candidate) { return candidate.has(target); });
    layout.kind_of.push_back(kind == kinds.end() ? 0 : kind->kind);
  }
  return layout;
}

std::vector<const TensorSpec*> targets_of(const Recipe& recipe) {
  std::vector<const TensorSpec*> targets;
  for (size_t t = 0; t < recipe.targets.size(); ++t) {
    targets.push_back(recipe.is_alias(t) ? nullptr : &recipe.targets[t].spec);
  }
  return targets;
}

}  // namespace modicum
