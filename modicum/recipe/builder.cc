// RecipeBuilder: the call of an op checks its inputs, and `finish` checks the whole recipe.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "modicum/recipe/at.h"
#include "modicum/recipe/recipe.h"

namespace modicum {
namespace {

constexpr size_t kMaxDims = Box::kMaxDims;

[[noreturn]] void refuse(std::string what, std::string expected = {}, std::string got = {}) {
  fail(Category::mismatch, std::move(what),
       {.expected = std::move(expected), .got = std::move(got)});
}

// "float8_e4m3fn [2, 3] with scales".
std::string scaled_text(DType dtype, const std::vector<int64_t>& shape, bool is_scaled) {
  return tensor_text(dtype, shape) + (is_scaled ? " with scales" : "");
}

void require_supported_dims(Op op, const std::vector<int64_t>& shape) {
  if (shape.size() <= kMaxDims) return;
  fail(Category::unsupported,
       fmt::format("'{}' of a tensor of more than {} dims", op_name(op), kMaxDims),
       {.got = shape_text(shape)});
}

// The number of elements of a node. Throws MISMATCH if a dim is negative, or if the elements or
// bytes exceed the limits.
int64_t require_countable(const Node& node) {
  const auto numel = checked_numel(node.shape);
  const bool is_negative =
      std::any_of(node.shape.begin(), node.shape.end(), [](int64_t size) { return size < 0; });
  if (is_negative) {
    refuse(fmt::format("'{}' has a negative dim", op_name(node.op)), "dims of 0 or more",
           shape_text(node.shape));
  }
  if (!numel || !checked_bytes(node.dtype, node.shape)) {
    fail(Category::mismatch, fmt::format("'{}' makes a tensor that is too large", op_name(node.op)),
         {.expected = fmt::format("at most {} bytes", kMaxModelBytes),
          .got = tensor_text(node.dtype, node.shape)});
  }
  return *numel;
}

// The numbers [0, count), sorted by name. Sorted copies of the names would take memory in `finish`,
// where the builder holds the most.
template <typename NameOf>
std::vector<uint32_t> sorted_by_name(size_t count, const NameOf& name_of) {
  std::vector<uint32_t> order(count);
  std::iota(order.begin(), order.end(), 0U);
  std::sort(order.begin(), order.end(),
            [&](uint32_t a, uint32_t b) { return name_of(a) < name_of(b); });
  return order;
}

template <typename NameOf>
std::optional<uint32_t> find_name(const std::vector<uint32_t>& order, std::string_view name,
                                  const NameOf& name_of) {
  const auto found =
      std::lower_bound(order.begin(), order.end(), name,
                       [&](uint32_t i, std::string_view wanted) { return name_of(i) < wanted; });
  return found != order.end() && name_of(*found) == name ? std::optional(*found) : std::nullopt;
}

}  // namespace

void require_countable(const Recipe& recipe) {
  uint64_t bytes = 0;
  for (size_t t = 0; t < recipe.targets.size(); ++t) {
    if (recipe.is_alias(t)) continue;
    const TensorSpec& spec = recipe.targets[t].spec;
    bytes += checked_bytes(spec.dtype, spec.shape).value_or(kMaxModelBytes + 1);
    if (bytes <= kMaxModelBytes) continue;
    fail(Category::mismatch, "the recipe's targets are too large",
         {.tensor = spec.fqn,
          .expected = fmt::format("at most {} bytes together", kMaxModelBytes),
          .got = tensor_text(spec.dtype, spec.shape) + " and the targets before it"});
  }
}

RecipeBuilder::RecipeBuilder(const Manifest& manifest, bool unties)
    : manifest_(manifest), unties_(unties), used_(manifest.tensors.size()) {
  // Outgrown vectors would leave holes in the heap, between the blocks of names and shapes.
  recipe_.nodes.reserve(manifest.tensors.size());
  recipe_.targets.reserve(manifest.tensors.size());
}

uint32_t RecipeBuilder::push(Node added) {
  require_countable(added);
  // A stored tensor may have more dims, if it is neither rearranged nor sharded.
  if (added.op != Op::stored && added.shape.size() > kMaxDims) {
    fail(Category::unsupported,
         fmt::format("'{}' makes a tensor of more than {} dims", op_name(added.op), kMaxDims));
  }
  for (const uint32_t id : added.in) MODICUM_ASSERT(id < recipe_.nodes.size());
  if (!added.in.empty()) {
    added.is_scaled = std::all_of(added.in.begin(), added.in.end(),
                                  [&](uint32_t id) { return recipe_.nodes[id].is_scaled; });
    added.is_made = std::all_of(added.in.begin(), added.in.end(),
                                [&](uint32_t id) { return recipe_.nodes[id].is_made; });
  }
  recipe_.nodes.push_back(std::move(added));
  return static_cast<uint32_t>(recipe_.nodes.size() - 1);
}

const Node& RecipeBuilder::node(uint32_t id) const {
  MODICUM_ASSERT(id < recipe_.nodes.size());
  return recipe_.nodes[id];
}

Node RecipeBuilder::along(Op op, int dim, uint32_t in) const {
  const Node& input = node(in);
  require_supported_dims(op, input.shape);
  if (dim < 0 || at(dim) >= input.shape.size()) {
    refuse(fmt::format("'{}' along a dim that its input does not have", op_name(op)),
           fmt::format("a dim in [0, {})", input.shape.size()), fmt::format("{}", dim));
  }
  return {.op = op, .dtype = input.dtype, .dim = dim, .shape = input.shape};
}

std::optional<uint32_t> RecipeBuilder::find_stored(std::string_view name) {
  const std::vector<StoredTensor>& tensors = manifest_.tensors;
  const auto name_of = [&](uint32_t i) -> std::string_view { return tensors[i].spec.fqn; };
  // Sorted on demand, because an identity recipe looks up no names.
  if (by_name_.empty()) by_name_ = sorted_by_name(tensors.size(), name_of);
  return find_name(by_name_, name, name_of);
}

uint32_t RecipeBuilder::require_stored(std::string_view name, std::string_view error) {
  const auto found = find_stored(name);
  if (found) return *found;
  std::vector<std::string> names;
  for (const StoredTensor& s : manifest_.tensors) names.push_back(s.spec.fqn);
  fail(Category::mismatch, fmt::format("{}{}", error, nearest_hint(name, names)),
       {.tensor = std::string(name)});
}

uint32_t RecipeBuilder::stored(std::string_view name) {
  return stored(
      require_stored(name, "the recipe names a tensor that the checkpoint does not hold"));
}

uint32_t RecipeBuilder::stored(uint32_t tensor) {
  const StoredTensor& stored = manifest_.tensors[tensor];
  used_[tensor] = true;
  return push({.op = Op::stored,
               .dtype = stored.spec.dtype,
               .is_scaled = stored.scale.has_value(),
               .from = tensor,
               .shape = stored.spec.shape});
}

uint32_t RecipeBuilder::cat(int dim, std::vector<uint32_t> in) {
  if (in.empty()) refuse("'cat' without inputs");
  Node result = along(Op::cat, dim, in[0]);
  int64_t total = 0;
  for (const uint32_t id : in) {
    std::vector<int64_t> rest = along(Op::cat, dim, id).shape;
    const auto sum = checked_add(total, rest[at(dim)]);
    if (!sum) {
      refuse("'cat' makes a dim that is too large", "at most 2^63-1",
             fmt::format("{} + {}", total, rest[at(dim)]));
    }
    total = *sum;
    rest[at(dim)] = result.shape[at(dim)];
    if (rest != result.shape || node(id).dtype != result.dtype) {
      refuse(fmt::format("'cat' along dim {} of tensors that differ in dtype or another dim", dim),
             tensor_text(result.dtype, result.shape), tensor_text(node(id).dtype, node(id).shape));
    }
  }
  result.shape[at(dim)] = total;
  result.in = std::move(in);
  return push(std::move(result));
}

uint32_t RecipeBuilder::stack(int dim, std::vector<uint32_t> in) {
  if (in.empty()) refuse("'stack' without inputs");
  Node result{.op = Op::stack, .dtype = node(in[0]).dtype, .dim = dim, .shape = node(in[0]).shape};
  for (const uint32_t id : in) {
    if (node(id).shape != result.shape || node(id).dtype != result.dtype) {
      refuse("'stack' of tensors that differ in dtype or shape",
             tensor_text(result.dtype, result.shape), tensor_text(node(id).dtype, node(id).shape));
    }
  }
  if (dim < 0 || static_cast<size_t>(dim) > result.shape.size()) {
    refuse("'stack' along a dim that its output does not have",
           fmt::format("a dim in [0, {}]", result.shape.size()), fmt::format("{}", dim));
  }
  result.shape.insert(result.shape.begin() + dim, static_cast<int64_t>(in.size()));
  result.in = std::move(in);
  return push(std::move(result));
}

uint32_t RecipeBuilder::slice(int dim, int64_t start, int64_t stop, uint32_t in) {
  Node result = along(Op::slice, dim, in);
  result.in = {in};
  result.arg = {start};
  int64_t& size = result.shape[at(dim)];
  if (start < 0 || stop < start || stop > size) {
    refuse(fmt::format("'slice' [{}, {}) of a dim of size {}", start, stop, size));
  }
  size = stop - start;
  return push(std::move(result));
}

uint32_t RecipeBuilder::permute(std::vector<int64_t> dims, uint32_t in) {
  require_supported_dims(Op::permute, node(in).shape);
  std::vector<int64_t> sorted = dims;
  std::sort(sorted.begin(), sorted.end());
  std::vector<int64_t> all(node(in).shape.size());
  std::iota(all.begin(), all.end(), 0);
  if (sorted != all) {
    refuse("'permute' does not name each dim once", shape_text(all) + " in any order",
           shape_text(dims));
  }
  Node result{.op = Op::permute, .dtype = node(in).dtype, .in = {in}, .arg = std::move(dims)};
  for (const int64_t d : result.arg) result.shape.push_back(node(in).shape[at(d)]);
  return push(std::move(result));
}

uint32_t RecipeBuilder::gather(int dim, std::vector<int64_t> index, uint32_t in) {
  Node result = along(Op::gather, dim, in);
  result.in = {in};
  int64_t& size = result.shape[at(dim)];
  for (const int64_t i : index) {
    if (i < 0 || i >= size) {
      refuse(fmt::format("'gather' of index {} from a dim of size {}", i, size));
    }
  }
  size = static_cast<int64_t>(index.size());
  result.arg = std::move(index);
  return push(std::move(result));
}

uint32_t RecipeBuilder::reshape(std::vector<int64_t> shape, uint32_t in) {
  Node result{.op = Op::reshape, .dtype = node(in).dtype, .in = {in}, .shape = std::move(shape)};
  if (require_countable(result) != numel_of(node(in).shape)) {
    refuse("'reshape' changes the number of elements", shape_text(node(in).shape),
           shape_text(result.shape));
  }
  return push(std::move(result));
}

uint32_t RecipeBuilder::init(InitRule rule, double std, std::vector<int64_t> shape, DType dtype) {
  if (!is_castable(dtype)) {
    fail(Category::unsupported, "'init' makes float32, bfloat16 or float16",
         {.got = std::string(torch_name(dtype))});
  }
  if (!std::isfinite(std) || std < 0) {
    refuse("'init' with an invalid std", "a finite number of 0 or more", fmt::format("{}", std));
  }
  return push({.op = Op::init,
               .dtype = dtype,
               .is_made = true,
               .arg = {static_cast<int64_t>(rule), std::bit_cast<int64_t>(std)},
               .shape = std::move(shape)});
}

uint32_t RecipeBuilder::caller(uint32_t ordinal, std::vector<int64_t> shape, DType dtype) {
  return push({.op = Op::caller,
               .dtype = dtype,
               .is_made = true,
               .from = ordinal,
               .shape = std::move(shape)});
}

void RecipeBuilder::target(std::string fqn, uint32_t root, std::optional<DType> dtype, Role role) {
  if (fqn.empty()) refuse("a target has an empty name");
  const Node& root_node = node(root);
  const DType wanted = dtype.value_or(root_node.dtype);
  const bool has_numbers = is_castable(root_node.dtype) || root_node.is_scaled;
  if (wanted != root_node.dtype && !(is_castable(wanted) && has_numbers)) {
    const char* expected = !is_castable(wanted) ? "a cast to float32, bfloat16 or float16"
                           : is_fp8_code(root_node.dtype)
                               ? "a scale for each stored tensor of FP8 codes"
                               : "a cast from float32, bfloat16, float16 or FP8 codes with scales";
    fail(Category::unsupported,
         fmt::format("a cast from {} to {}", torch_name(root_node.dtype), torch_name(wanted)),
         {.tensor = fqn, .expected = expected});
  }
  recipe_.targets.push_back({{std::move(fqn), role, wanted, root_node.shape}, root});
}

void RecipeBuilder::alias(std::string fqn, std::string target_fqn,
                          std::optional<uint32_t> stored_as) {
  if (fqn.empty()) refuse("a target has an empty name");
  aliases_.push_back({std::move(fqn), std::move(target_fqn), stored_as});
}

void RecipeBuilder::unused(std::string_view name) {
  recipe_.unused.push_back(require_stored(
      name, "the recipe lists as unused a tensor that the checkpoint does not hold"));
}

void RecipeBuilder::resolve_aliases() {
  if (aliases_.empty()) return;
  recipe_.targets.reserve(recipe_.targets.size() + aliases_.size());  // growth would double it
  const auto name_of = [this](uint32_t t) -> std::string_view {
    return recipe_.targets[t].spec.fqn;
  };
  const std::vector<uint32_t> sorted = sorted_by_name(recipe_.targets.size(), name_of);
  for (Alias& alias : aliases_) {
    const auto found = find_name(sorted, alias.target_fqn, name_of);
    if (!found) {
      fail(Category::mismatch,
           fmt::format("an alias of '{}', which is itself an alias or not a target",
                       printable(alias.target_fqn)),
           {.tensor = alias.fqn});
    }
    resolve(std::move(alias), *found);
  }
}

void RecipeBuilder::resolve(Alias alias, uint32_t target_index) {
  const Target named = recipe_.targets[target_index];
  const DType dtype = node(named.root).dtype;
  const bool is_scaled = node(named.root).is_scaled;
  TensorSpec spec = named.spec;
  spec.fqn = std::move(alias.fqn);
  Node result{.op = Op::alias, .dtype = dtype, .from = target_index, .shape = spec.shape};
  if (alias.stored_as) {
    const Node& read = node(*alias.stored_as);
    const bool alike = read.dtype == dtype && read.is_scaled == is_scaled;
    if (unties_) {
      // A tensor with another dtype, or with scales where the target has none, is loaded as stored.
      const std::optional<DType> cast = alike ? std::optional(spec.dtype) : std::nullopt;
      return target(std::move(spec.fqn), *alias.stored_as, cast, spec.role);
    }
    if (!alike || read.shape != spec.shape) {
      fail(Category::mismatch,
           fmt::format("a tensor that is tied to '{}' has another shape or dtype, or only one of "
                       "them has scales; --untie, or in Python a model built with "
                       "tie_word_embeddings=False, loads both",
                       printable(alias.target_fqn)),
           {.tensor = spec.fqn,
            .expected = scaled_text(dtype, spec.shape, is_scaled),
            .got = scaled_text(read.dtype, read.shape, read.is_scaled)});
    }
    result.in = {*alias.stored_as};
  }
  const uint32_t root = push(std::move(result));
  recipe_.targets.push_back({std::move(spec), root});
}

void RecipeBuilder::refuse_equal_names() const {
  const auto name_of = [this](uint32_t t) -> std::string_view {
    return recipe_.targets[t].spec.fqn;
  };
  const std::vector<uint32_t> order = sorted_by_name(recipe_.targets.size(), name_of);
  const auto is_equal = [&](uint32_t a, uint32_t b) { return name_of(a) == name_of(b); };
  const auto twice = std::adjacent_find(order.begin(), order.end(), is_equal);
  if (twice == order.end()) return;
  fail(Category::mismatch, "the recipe has a target twice",
       {.tensor = std::string(name_of(*twice))});
}

Recipe RecipeBuilder::finish() {
  resolve_aliases();
  refuse_equal_names();
  std::sort(recipe_.unused.begin(), recipe_.unused.end());
  for (const uint32_t tensor : recipe_.unused) {
    if (used_[tensor]) {
      fail(Category::mismatch, "a stored tensor is both used and listed as unused",
           {.tensor = manifest_.tensors[tensor].spec.fqn});
    }
    used_[tensor] = true;
  }
  for (const Node& leaf : recipe_.nodes) {
    if (leaf.op == Op::stored && leaf.is_scaled) {
      used_[manifest_.tensors[leaf.from].scale->tensor] = true;
    }
  }
  for (size_t i = 0; i < used_.size(); ++i) {
    if (!used_[i]) {
      fail(Category::mismatch, "a stored tensor is neither used nor listed as unused",
           {.tensor = manifest_.tensors[i].spec.fqn});
    }
  }
  require_countable(recipe_);
  recipe_.nodes.shrink_to_fit();
  recipe_.targets.shrink_to_fit();
  return std::move(recipe_);
}

}  // namespace modicum
