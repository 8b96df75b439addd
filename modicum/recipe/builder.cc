// Building recipes: every call checks its shapes, `finish` the whole.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <numeric>

#include "modicum/recipe/recipe.h"

namespace modicum {
namespace {

constexpr size_t kMaxRank = Box::kMaxDims;

[[noreturn]] void mismatch(std::string what, std::string expected = {}, std::string got = {}) {
  fail(Category::mismatch, std::move(what),
       {.expected = std::move(expected), .got = std::move(got)});
}

int64_t checked_numel(const std::vector<int64_t>& shape, std::string_view op) {
  int64_t numel = 1;
  for (const int64_t size : shape) {
    const auto product = size < 0 ? std::nullopt : checked_mul(numel, size);
    if (!product) mismatch(fmt::format("'{}' has an impossible shape", op), "", shape_text(shape));
    numel = *product;
  }
  return numel;
}

std::vector<std::pair<std::string_view, uint32_t>> sorted_names(const Manifest& manifest) {
  std::vector<std::pair<std::string_view, uint32_t>> names;
  names.reserve(manifest.tensors.size());
  for (size_t i = 0; i < manifest.tensors.size(); ++i) {
    names.emplace_back(manifest.tensors[i].spec.fqn, static_cast<uint32_t>(i));
  }
  std::sort(names.begin(), names.end());
  return names;
}

const std::pair<std::string_view, uint32_t>* find_name(
    const std::vector<std::pair<std::string_view, uint32_t>>& names, std::string_view name) {
  const auto found =
      std::lower_bound(names.begin(), names.end(), name,
                       [](const auto& a, std::string_view b) { return a.first < b; });
  return found != names.end() && found->first == name ? &*found : nullptr;
}

}  // namespace

RecipeBuilder::RecipeBuilder(const Manifest& manifest)
    : manifest_(manifest), by_name_(sorted_names(manifest)), used_(manifest.tensors.size()) {}

uint32_t RecipeBuilder::push(Node added) {
  if (added.op != Op::stored && added.shape.size() > kMaxRank) {
    fail(Category::unsupported,
         fmt::format("'{}' makes a tensor of more than {} dims", op_name(added.op), kMaxRank));
  }
  for (const uint32_t id : added.in) MODICUM_ASSERT(id < recipe_.nodes.size());
  if (!added.in.empty()) {
    added.is_scaled = std::all_of(added.in.begin(), added.in.end(),
                                  [&](uint32_t id) { return recipe_.nodes[id].is_scaled; });
  }
  recipe_.nodes.push_back(std::move(added));
  return static_cast<uint32_t>(recipe_.nodes.size() - 1);
}

const Node& RecipeBuilder::node(uint32_t id) const {
  MODICUM_ASSERT(id < recipe_.nodes.size());
  return recipe_.nodes[id];
}

void RecipeBuilder::check_dim(const Node& of, int dim, std::string_view op) const {
  if (dim < 0 || static_cast<size_t>(dim) >= of.shape.size() || of.shape.size() > kMaxRank) {
    mismatch(fmt::format("'{}' along dim {} of a tensor of {} dims", op, dim, of.shape.size()));
  }
}

uint32_t RecipeBuilder::stored(std::string_view name) {
  const auto* found = find_name(by_name_, name);
  if (found == nullptr) {
    std::vector<std::string> names;
    for (const Stored& s : manifest_.tensors) names.push_back(s.spec.fqn);
    const std::string near = nearest_name(name, names);
    fail(Category::mismatch, "the recipe names a tensor that the checkpoint does not hold",
         {.tensor = std::string(name),
          .got = near.empty() ? "" : fmt::format("nearest '{}'", near)});
  }
  return stored(found->second);
}

uint32_t RecipeBuilder::stored(uint32_t tensor) {
  const Stored& stored = manifest_.tensors[tensor];
  used_[tensor] = true;
  return push({.op = Op::stored,
               .dtype = stored.spec.dtype,
               .is_scaled = stored.scale.has_value(),
               .from = tensor,
               .shape = stored.spec.shape});
}

uint32_t RecipeBuilder::cat(int dim, std::vector<uint32_t> in) {
  if (in.empty()) mismatch("'cat' of nothing");
  Node made{.op = Op::cat, .dtype = node(in[0]).dtype, .dim = dim, .shape = node(in[0]).shape};
  check_dim(made, dim, "cat");
  int64_t total = 0;
  for (const uint32_t id : in) {
    std::vector<int64_t> rest = node(id).shape;
    check_dim(node(id), dim, "cat");
    total += rest[static_cast<size_t>(dim)];
    rest[static_cast<size_t>(dim)] = made.shape[static_cast<size_t>(dim)];
    if (rest != made.shape || node(id).dtype != made.dtype) {
      mismatch("'cat' of tensors that do not meet", shape_text(made.shape), shape_text(rest));
    }
  }
  made.shape[static_cast<size_t>(dim)] = total;
  made.in = std::move(in);
  return push(std::move(made));
}

uint32_t RecipeBuilder::stack(int dim, std::vector<uint32_t> in) {
  if (in.empty()) mismatch("'stack' of nothing");
  Node made{.op = Op::stack, .dtype = node(in[0]).dtype, .dim = dim, .shape = node(in[0]).shape};
  for (const uint32_t id : in) {
    if (node(id).shape != made.shape || node(id).dtype != made.dtype) {
      mismatch("'stack' of tensors that differ", shape_text(made.shape),
               shape_text(node(id).shape));
    }
  }
  if (dim < 0 || static_cast<size_t>(dim) > made.shape.size()) {
    mismatch(fmt::format("'stack' along dim {} of tensors of {} dims", dim, made.shape.size()));
  }
  made.shape.insert(made.shape.begin() + dim, static_cast<int64_t>(in.size()));
  made.in = std::move(in);
  return push(std::move(made));
}

uint32_t RecipeBuilder::slice(int dim, int64_t start, int64_t stop, uint32_t in) {
  Node made{.op = Op::slice,
            .dtype = node(in).dtype,
            .dim = dim,
            .in = {in},
            .arg = {start},
            .shape = node(in).shape};
  check_dim(made, dim, "slice");
  int64_t& size = made.shape[static_cast<size_t>(dim)];
  if (start < 0 || stop < start || stop > size) {
    mismatch(fmt::format("'slice' [{}, {}) of a dim of {}", start, stop, size));
  }
  size = stop - start;
  return push(std::move(made));
}

uint32_t RecipeBuilder::permute(std::vector<int64_t> dims, uint32_t in) {
  std::vector<int64_t> sorted = dims;
  std::sort(sorted.begin(), sorted.end());
  std::vector<int64_t> all(node(in).shape.size());
  std::iota(all.begin(), all.end(), 0);
  if (sorted != all || all.size() > kMaxRank) {
    mismatch("'permute' does not name each dim once", shape_text(all), shape_text(dims));
  }
  Node made{.op = Op::permute, .dtype = node(in).dtype, .in = {in}, .arg = std::move(dims)};
  for (const int64_t d : made.arg) made.shape.push_back(node(in).shape[static_cast<size_t>(d)]);
  return push(std::move(made));
}

uint32_t RecipeBuilder::gather(int dim, std::vector<int64_t> index, uint32_t in) {
  Node made{
      .op = Op::gather, .dtype = node(in).dtype, .dim = dim, .in = {in}, .shape = node(in).shape};
  check_dim(made, dim, "gather");
  int64_t& size = made.shape[static_cast<size_t>(dim)];
  for (const int64_t i : index) {
    if (i < 0 || i >= size) mismatch(fmt::format("'gather' of index {} from a dim of {}", i, size));
  }
  size = static_cast<int64_t>(index.size());
  made.arg = std::move(index);
  return push(std::move(made));
}

uint32_t RecipeBuilder::reshape(std::vector<int64_t> shape, uint32_t in) {
  if (checked_numel(shape, "reshape") != numel_of(node(in).shape)) {
    mismatch("'reshape' changes the number of elements", shape_text(node(in).shape),
             shape_text(shape));
  }
  return push({.op = Op::reshape, .dtype = node(in).dtype, .in = {in}, .shape = std::move(shape)});
}

uint32_t RecipeBuilder::init(InitRule rule, double std, std::vector<int64_t> shape, DType dtype) {
  checked_numel(shape, "init");
  if (!is_castable(dtype)) {
    fail(Category::unsupported, "'init' makes float32, bfloat16 or float16",
         {.got = std::string(torch_name(dtype))});
  }
  return push({.op = Op::init,
               .dtype = dtype,
               .arg = {static_cast<int64_t>(rule), std::bit_cast<int64_t>(std)},
               .shape = std::move(shape)});
}

uint32_t RecipeBuilder::caller(uint32_t ordinal, std::vector<int64_t> shape, DType dtype) {
  checked_numel(shape, "caller");
  return push({.op = Op::caller, .dtype = dtype, .from = ordinal, .shape = std::move(shape)});
}

void RecipeBuilder::target(std::string fqn, uint32_t root, std::optional<DType> dtype, Role role) {
  const Node& made = node(root);
  const DType wanted = dtype.value_or(made.dtype);
  const bool has_numbers = is_castable(made.dtype) || made.is_scaled;
  if (wanted != made.dtype && !(is_castable(wanted) && has_numbers)) {
    fail(Category::unsupported,
         is_fp8_code(made.dtype) ? "a cast of FP8 codes that do not all have a scale"
                                 : "a cast that is not between float32, bfloat16 and float16",
         {.tensor = fqn,
          .expected = std::string(torch_name(wanted)),
          .got = std::string(torch_name(made.dtype))});
  }
  recipe_.targets.push_back({{std::move(fqn), role, wanted, made.shape}, root});
}

void RecipeBuilder::alias(std::string fqn, std::string of) {
  aliases_.emplace_back(std::move(fqn), std::move(of));
}

void RecipeBuilder::unused(std::string_view name) {
  const auto* found = find_name(by_name_, name);
  if (found == nullptr) {
    fail(Category::mismatch,
         "the recipe lists a tensor as unused that the checkpoint does not hold",
         {.tensor = std::string(name)});
  }
  recipe_.unused.push_back(found->second);
}

void RecipeBuilder::resolve_aliases() {
  if (aliases_.empty()) return;
  recipe_.targets.reserve(recipe_.targets.size() + aliases_.size());  // `made` views their names
  std::vector<std::pair<std::string_view, uint32_t>> made;
  for (size_t i = 0; i < recipe_.targets.size(); ++i) {
    made.emplace_back(recipe_.targets[i].spec.fqn, static_cast<uint32_t>(i));
  }
  std::sort(made.begin(), made.end());
  for (auto& [fqn, of] : aliases_) {
    const auto* found = find_name(made, of);
    if (found == nullptr) {
      fail(Category::mismatch, "an alias of a target that the recipe does not make",
           {.tensor = fqn, .expected = of});
    }
    TensorSpec spec = recipe_.targets[found->second].spec;
    spec.fqn = fqn;
    const uint32_t root =
        push({.op = Op::alias, .dtype = spec.dtype, .from = found->second, .shape = spec.shape});
    recipe_.targets.push_back({std::move(spec), root});
  }
}

Recipe RecipeBuilder::finish() {
  resolve_aliases();
  std::vector<std::string_view> names;
  names.reserve(recipe_.targets.size());
  for (const Target& target : recipe_.targets) names.push_back(target.spec.fqn);
  std::sort(names.begin(), names.end());
  if (const auto twice = std::adjacent_find(names.begin(), names.end()); twice != names.end()) {
    fail(Category::mismatch, "the recipe makes a target twice", {.tensor = std::string(*twice)});
  }
  std::sort(recipe_.unused.begin(), recipe_.unused.end());
  for (const uint32_t tensor : recipe_.unused) {
    if (used_[tensor]) {
      fail(Category::mismatch, "a stored tensor is both used and listed as unused",
           {.tensor = manifest_.tensors[tensor].spec.fqn});
    }
    used_[tensor] = true;
  }
  for (const Node& made : recipe_.nodes) {
    if (made.op == Op::stored && made.is_scaled) {
      used_[manifest_.tensors[made.from].scale->tensor] = true;
    }
  }
  for (size_t i = 0; i < used_.size(); ++i) {
    if (!used_[i]) {
      fail(Category::mismatch, "a stored tensor is neither used nor listed as unused",
           {.tensor = manifest_.tensors[i].spec.fqn});
    }
  }
  recipe_.nodes.shrink_to_fit();
  recipe_.targets.shrink_to_fit();
  return std::move(recipe_);
}

}  // namespace modicum
