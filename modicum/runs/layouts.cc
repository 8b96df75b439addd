#include "modicum/runs/runs.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <utility>

namespace modicum {
namespace {

// "2x4" for eight ranks; `most` sizes at most, 2 at least.
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
    product *= std::min(size, kMaxRanks + 1);
    at = after == end ? end : after + 1;
  }
  if (sizes.size() < 2) {
    const std::string_view also = most > 2 ? " or AxBxC" : "";
    fail(Category::usage,
         fmt::format("{} '{}' is not AxB{}, as in 2x4", flag, printable(text), also));
  }
  if (product != ranks) {
    fail(Category::usage, fmt::format("{}: a mesh of {} is not {} ranks", flag, text, ranks));
  }
  return sizes;
}

// Names that a flag's regular expression finds; none where the flag is not given.
class Names {
 public:
  Names(std::string_view flag, const std::string& expression)
      : flag_(flag), expression_(printable(expression)) {
    if (!expression.empty()) pattern_.emplace(flag, expression);
  }
  bool given() const noexcept { return pattern_.has_value(); }
  bool have(const std::string& name) const { return pattern_ && pattern_->finds(name); }
  // USAGE where the flag is given and finds none of them.
  void require_match(Targets targets) const {
    const auto is_found = [&](const TensorSpec* of) { return of != nullptr && have(of->fqn); };
    if (!given() || std::any_of(targets.begin(), targets.end(), is_found)) return;
    fail(Category::usage, fmt::format("{} '{}' matches no tensor", flag_, expression_),
         {.expected = "a regular expression that a tensor's name matches", .got = expression_});
  }

 private:
  std::string_view flag_;
  std::string expression_;
  std::optional<NamePattern> pattern_;
};

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

// Flags that say something about some layouts only.
void refuse_strangers(const RunFlags& flags) {
  const bool is_meshed = flags.layout == "hsdp" || flags.layout == "tp-fsdp";
  const bool is_flat = flags.layout == "zero1" || flags.layout == "zero2";
  const auto only_for = [&](bool given, bool allowed, std::string_view flag, std::string_view of) {
    if (given && !allowed) {
      fail(Category::usage, fmt::format("{} is for --layout {}", flag, of));
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
    fail(Category::usage, "--experts is for --expert-mesh", {.got = printable(flags.experts)});
  }
  only_for(flags.round_robin, is_flat, "--round-robin", "zero1 or zero2");
}

// As it stands here, since a Layout borrows its name.
std::string_view known_layout(const std::string& layout) {
  static constexpr std::array<std::string_view, 7> kNames = {"none",  "fsdp2", "hsdp", "tp-fsdp",
                                                             "zero1", "zero2", "zero3"};
  const auto found = std::find(kNames.begin(), kNames.end(), layout);
  if (found != kNames.end()) return *found;
  fail(Category::usage, fmt::format("unknown layout '{}'{}", printable(layout),
                                    nearest_hint(layout, {kNames.begin(), kNames.end()})));
}

}  // namespace

struct AskedLayout::Kind {
  Names names;
  uint8_t kind;
};

AskedLayout::AskedLayout(const RunFlags& flags)
    : ranks_(flags.ranks), is_round_robin_(flags.round_robin) {
  refuse_strangers(flags);
  const std::string_view name = known_layout(flags.layout);
  if (name.starts_with("zero")) {
    zero_ = name;
    return;
  }
  meshed_ = meshed_layout(flags);
  const auto add = [this](Names names, auto kind) {
    if (names.given()) kinds_.push_back({std::move(names), static_cast<uint8_t>(kind)});
  };
  if (!flags.expert_mesh.empty()) {
    const auto sizes = mesh_of("--expert-mesh", flags.expert_mesh, 2, flags.ranks);
    add({"--expert-mesh with --experts", flags.experts},
        add_expert_kind(meshed_, sizes[0], sizes[1], flags.shard_dim));
  }
  add({"--tp-rowwise", flags.tp_rowwise}, TpKind::rows);
  add({"--tp-packed", flags.tp_packed}, TpKind::packed);
  add({"--tp-replicate", flags.tp_replicate}, TpKind::replicated);
}

AskedLayout::~AskedLayout() = default;

Layout AskedLayout::of(Targets targets) const {
  if (zero_ == "zero3") return zero3_layout(ranks_, targets);
  if (!zero_.empty()) return flat_layout(zero_, ranks_, targets, is_round_robin_);
  Layout layout = meshed_;
  if (kinds_.empty() || targets.empty()) return layout;
  for (const Kind& kind : kinds_) kind.names.require_match(targets);
  for (const TensorSpec* target : targets) {
    const auto has_it = [&](const Kind& kind) { return kind.names.have(target->fqn); };
    const auto kind =
        target == nullptr ? kinds_.end() : std::find_if(kinds_.begin(), kinds_.end(), has_it);
    layout.kind_of.push_back(kind == kinds_.end() ? 0 : kind->kind);
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
