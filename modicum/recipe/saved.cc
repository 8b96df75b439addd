// The tensors that a save writes: restored stored tensors, unchanged targets, and copies.
#include <algorithm>
#include <set>
#include <string_view>

#include "modicum/recipe/recipe.h"

namespace modicum {
namespace {

constexpr uint32_t kNone = UINT32_MAX;
// The point of the fingerprints: x in powers.h. A constant is safe, since no recipe is made
// to collide with it.
constexpr uint64_t kPoint = 0x0b4d'9a3c'71e5'2f87;

// The elements that targets take from a stored tensor. Each of its elements is taken exactly once
// if count and fingerprint equal the whole tensor's (see Powers).
struct TakenElements {
  uint64_t count = 0;
  uint64_t fingerprint = 0;
  std::optional<DType> dtype;  // of the saved elements; empty if no target takes any
};

class Form {
 public:
  Form(const Recipe& recipe, const Manifest& manifest, const SavedOptions& options)
      : recipe_(recipe),
        manifest_(manifest),
        options_(options),
        taken_(manifest.tensors.size()),
        kept_(manifest.tensors.size(), true) {
    form_.as_target.resize(recipe.targets.size());
  }

  SavedForm run() {
    take_all();
    spread();
    for (uint32_t t = 0; t < recipe_.targets.size(); ++t) {
      if (form_.as_target[t]) add_target(t);
    }
    for (uint32_t s = 0; s < taken_.size(); ++s) add_stored(s);
    std::stable_sort(form_.tensors.begin(), form_.tensors.end(), [](const auto& a, const auto& b) {
      return a.stored.value_or(kNone) < b.stored.value_or(kNone);
    });
    refuse_equal_names();
    return std::move(form_);
  }

 private:
  struct Use {
    uint32_t target;
    uint32_t stored;
  };

  // False for an alias that is not stored, and for a target that the model computes.
  bool is_saved(uint32_t t) const {
    if (recipe_.is_alias(t) && !recipe_.is_compared(t)) return false;
    return !is_computed(t);
  }
  bool is_computed(uint32_t t) const {
    const bool is_made = recipe_.nodes[recipe_.targets[t].root].is_made;
    return is_made && t < options_.is_computed.size() && options_.is_computed[t];
  }
  DType saved_dtype(uint32_t t) const {
    const DType loaded = recipe_.targets[t].spec.dtype;
    return is_castable(loaded) ? options_.dtype.value_or(loaded) : loaded;
  }

  void take_all() {
    for (uint32_t t = 0; t < recipe_.targets.size(); ++t) {
      if (is_saved(t)) take(t);
    }
    for (uint32_t s = 0; s < taken_.size(); ++s) kept_[s] = kept_[s] && is_whole(s);
  }

  void take(uint32_t t) {
    const uint32_t root = recipe_.read_node(t);
    const DType dtype = saved_dtype(t);
    for (const uint32_t s : stored_under(recipe_, root)) {
      uses_.push_back({t, s});
      TakenElements& taken = taken_[s];
      if (taken.dtype && *taken.dtype != dtype) kept_[s] = false;
      taken.dtype = dtype;
      const std::optional<BlockScale>& scale = manifest_.tensors[s].scale;
      const bool is_spent = is_dequantised(recipe_, recipe_.targets[t]);
      if (scale) (is_spent ? spent_ : needed_).insert(scale->tensor);
    }
    const Node& node = recipe_.nodes[root];
    if (node.op == Op::stored) {  // most targets
      const Runs all{.length = numel_of(node.shape)};
      return add(taken_[node.from], all);
    }
    if (stored_under(recipe_, root).empty()) {  // also without elements, of which none is read
      form_.as_target[t] = true;
      return;
    }
    pull_back(recipe_, root, whole_box(node.shape), [&](const Node& leaf, const Box& part) {
      if (leaf.op != Op::stored) {
        form_.as_target[t] = true;
      } else {
        for_each_runs(part, [&](const Runs& runs) { add(taken_[leaf.from], runs); });
      }
    });
  }

  void add(TakenElements& taken, const Runs& runs) const {
    if (runs.numel() == 0) return;
    const auto length = static_cast<uint64_t>(runs.length);
    const auto count = static_cast<uint64_t>(runs.count);
    taken.count += length * count;
    taken.fingerprint = Powers::add(
        taken.fingerprint,
        powers_.sum(static_cast<uint64_t>(runs.first), {1, length}, {runs.stride, count}));
  }

  bool is_whole(uint32_t s) const {
    const auto numel = static_cast<uint64_t>(numel_of(manifest_.tensors[s].spec.shape));
    const TakenElements& taken = taken_[s];
    if (!taken.dtype || taken.count != numel) return false;
    return numel == 0 || taken.fingerprint == powers_.sum(0, 1, numel);
  }

  // Propagates the choice between connected targets and stored tensors: either all of the stored
  // tensors are restored, or all of the targets are saved unchanged.
  void spread() {
    for (bool changed = true; changed;) {
      changed = false;
      for (const auto& [t, s] : uses_) {
        // Consistent if the target is saved unchanged or the stored tensor is restored, but not
        // both.
        if (form_.as_target[t] != kept_[s]) continue;
        changed = true;
        form_.as_target[t] = true;
        kept_[s] = false;
      }
    }
  }

  void add_target(uint32_t t) {
    TensorSpec spec = recipe_.targets[t].spec;
    spec.dtype = saved_dtype(t);
    names_.insert(recipe_.targets[t].spec.fqn);
    const std::vector<uint32_t> from = stored_under(recipe_, recipe_.read_node(t));
    form_.tensors.push_back(
        {std::move(spec), from.empty() ? std::nullopt : std::optional(from.front()), false});
  }

  void add_stored(uint32_t s) {
    TensorSpec spec = manifest_.tensors[s].spec;
    const bool is_copied = !taken_[s].dtype && is_copy(s);
    if (!kept_[s] && !is_copied) return form_.left_out.push_back(s);
    if (!is_copied) spec.dtype = *taken_[s].dtype;
    form_.tensors.push_back({std::move(spec), s, is_copied});
  }

  // Whether a tensor that no target reads is copied. Scales of dequantised codes are not copied,
  // nor is a tensor whose name an unchanged target has. Scales of other codes are copied even if
  // `copies_unused` is false: nothing could read the codes without them.
  bool is_copy(uint32_t s) const {
    if (names_.contains(manifest_.tensors[s].spec.fqn)) return false;
    if (spent_.contains(s) && !needed_.contains(s)) return false;  // one target may need it still
    return options_.copies_unused || needed_.contains(s) ||
           !std::binary_search(recipe_.unused.begin(), recipe_.unused.end(), s);
  }

  void refuse_equal_names() const {
    std::set<std::string_view> names;
    for (const SavedTensor& tensor : form_.tensors) {
      if (names.insert(tensor.spec.fqn).second) continue;
      fail(Category::mismatch, "two tensors would be saved under one name",
           {.tensor = tensor.spec.fqn});
    }
  }

  const Recipe& recipe_;
  const Manifest& manifest_;
  const SavedOptions& options_;
  const Powers powers_{kPoint};
  std::vector<TakenElements> taken_;  // by stored tensor
  std::vector<bool> kept_;            // by stored tensor: whether it is restored
  std::vector<Use> uses_;
  std::set<uint32_t> spent_;          // scales of codes that are dequantised
  std::set<uint32_t> needed_;         // scales of codes that are not
  std::set<std::string_view> names_;  // of targets that are saved unchanged
  SavedForm form_;
};

// Rebuilds a recipe over the saved tensors. An unchanged target becomes a leaf; the nodes of all
// other targets are copied.
class RecipeRebuilder {
 public:
  RecipeRebuilder(const Recipe& recipe, const Manifest& manifest, const Manifest& saved)
      : recipe_(recipe), manifest_(manifest), saved_(saved), copies_(recipe.nodes.size(), kNone) {
    for (uint32_t s = 0; s < saved.tensors.size(); ++s) {
      by_name_.emplace_back(saved.tensors[s].spec.fqn, s);
    }
    std::sort(by_name_.begin(), by_name_.end());
  }

  Recipe run(const SavedForm& form) {
    result_.targets = recipe_.targets;
    for (uint32_t t = 0; t < recipe_.targets.size(); ++t) {
      Target& target = result_.targets[t];
      if (recipe_.is_alias(t)) continue;
      target.root = form.as_target[t] ? leaf(target.spec.fqn) : copy(target.root);
    }
    for (uint32_t t = 0; t < recipe_.targets.size(); ++t) {
      if (recipe_.is_alias(t)) result_.targets[t].root = alias(t, form.as_target[t]);
    }
    for (const SavedTensor& tensor : form.tensors) {
      if (tensor.is_copied) result_.unused.push_back(place_of(tensor.spec.fqn));
    }
    std::sort(result_.unused.begin(), result_.unused.end());
    result_.nodes.shrink_to_fit();
    return std::move(result_);
  }

 private:
  uint32_t push(Node node) {
    result_.nodes.push_back(std::move(node));
    return static_cast<uint32_t>(result_.nodes.size() - 1);
  }

  uint32_t place_of(std::string_view name) const {
    const auto found = std::lower_bound(by_name_.begin(), by_name_.end(), std::pair(name, 0U));
    MODICUM_ASSERT(found != by_name_.end());
    MODICUM_ASSERT(found->first == name);
    return found->second;
  }

  // Adds a node for a saved tensor. It needs no scales, since the targets that were dequantised are
  // saved as values.
  uint32_t leaf(std::string_view name) {
    const uint32_t place = place_of(name);
    const TensorSpec& spec = saved_.tensors[place].spec;
    return push({.op = Op::stored, .dtype = spec.dtype, .from = place, .shape = spec.shape});
  }

  uint32_t copy(uint32_t id) {
    if (copies_[id] != kNone) return copies_[id];
    Node node = recipe_.nodes[id];
    if (node.op == Op::stored) {
      copies_[id] = leaf(manifest_.tensors[node.from].spec.fqn);
      return copies_[id];
    }
    for (uint32_t& input : node.in) input = copy(input);
    if (!node.in.empty()) node.dtype = result_.nodes[node.in[0]].dtype;
    node.is_scaled = false;
    copies_[id] = push(std::move(node));
    return copies_[id];
  }

  uint32_t alias(uint32_t t, bool as_target) {
    Node node = recipe_.nodes[recipe_.targets[t].root];
    if (as_target) {
      node.in = {leaf(recipe_.targets[t].spec.fqn)};
    } else if (recipe_.is_compared(t)) {
      node.in = {copy(node.in[0])};
    }
    node.dtype = result_.nodes[result_.targets[node.from].root].dtype;
    node.is_scaled = false;
    return push(std::move(node));
  }

  const Recipe& recipe_;
  const Manifest& manifest_;
  const Manifest& saved_;
  std::vector<std::pair<std::string_view, uint32_t>> by_name_;  // sorted
  std::vector<uint32_t> copies_;  // by node: its index in result_, or kNone
  Recipe result_;
};

}  // namespace

SavedForm saved_form(const Recipe& recipe, const Manifest& manifest, const SavedOptions& options) {
  return Form(recipe, manifest, options).run();
}

Recipe saved_recipe(const Recipe& recipe, const Manifest& manifest, const SavedForm& form,
                    const Manifest& saved) {
  return RecipeRebuilder(recipe, manifest, saved).run(form);
}

}  // namespace modicum
