#include "modicum/recipe/recipe.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "modicum/recipe/at.h"

namespace modicum {
namespace {

constexpr std::array<std::string_view, 10> kOpNames = {
    "stored", "cat", "stack", "slice", "permute", "gather", "reshape", "init", "caller", "alias"};

// The number of elements per index of dim `dim`: the product of the dims inside it.
int64_t inner_of(const std::vector<int64_t>& shape, int dim) {
  int64_t inner = 1;
  for (size_t d = at(dim) + 1; d < shape.size(); ++d) inner *= shape[d];
  return inner;
}

// A row-major element index, split at one dim of size `size`: the index within the dim, and the
// linear indices over the dims outside (`outer`) and inside it (`inner`).
struct SplitIndex {
  int64_t outer, index, inner, inner_size;
};
SplitIndex around(const std::vector<int64_t>& shape, int dim, int64_t element) {
  const int64_t inner = inner_of(shape, dim);
  const int64_t size = shape[at(dim)];
  return {element / (inner * size), element / inner % size, element % inner, inner};
}

bool is_stored(const Manifest& manifest, std::string_view name) {
  return std::any_of(manifest.tensors.begin(), manifest.tensors.end(),
                     [&](const StoredTensor& s) { return s.spec.fqn == name; });
}

// --- usual names of heads and embeddings ---

constexpr std::string_view kHead = "lm_head.weight";

// Whether `name` ends with the components `last`.
bool is_called(std::string_view name, std::string_view last) {
  return name == last || (name.ends_with(last) && name[name.size() - last.size() - 1] == '.');
}

// The likely name of an embedding that is not stored. It has the prefix of the layers
// ("model.layers.0." -> "model.embed_tokens.weight"). "model.embed_tokens.weight" if there are no
// layers; empty if layers have several prefixes.
std::vector<std::string> usual_embedding(const Manifest& manifest) {
  static constexpr std::array<std::array<std::string_view, 2>, 2> kUsual = {
      {{"layers.0.", "embed_tokens.weight"}, {"h.0.", "wte.weight"}}};
  std::vector<std::string> found;
  for (const StoredTensor& stored : manifest.tensors) {
    const std::string_view name = stored.spec.fqn;
    for (const auto& [layer, embedding] : kUsual) {
      const size_t at = name.find(layer);
      if (at == std::string_view::npos || (at > 0 && name[at - 1] != '.')) continue;
      std::string usual(name.substr(0, at));
      usual += embedding;
      if (std::find(found.begin(), found.end(), usual) == found.end()) found.push_back(usual);
    }
  }
  if (found.empty()) found.emplace_back("model.embed_tokens.weight");
  if (found.size() > 1) found.clear();
  return found;
}

}  // namespace

std::string_view op_name(Op op) noexcept { return kOpNames[static_cast<size_t>(op)]; }

uint64_t Recipe::held_bytes() const noexcept {
  uint64_t bytes = heap_block_bytes(nodes.size() * sizeof(Node)) +
                   heap_block_bytes(targets.size() * sizeof(Target)) +
                   heap_block_bytes(unused.size() * sizeof(uint32_t));
  for (const Node& node : nodes) {
    bytes += heap_block_bytes(node.in.size() * sizeof(uint32_t)) +
             heap_block_bytes(node.arg.size() * sizeof(int64_t)) +
             heap_block_bytes(node.shape.size() * sizeof(int64_t));
  }
  for (const Target& target : targets) bytes += heap_bytes(target.spec);
  return bytes;
}

namespace {

// The dtype of a target by `--dtype` and `--keep-fp32`.
class DTypeRule {
 public:
  DTypeRule(std::optional<DType> dtype, const std::string& keep_fp32)
      : dtype_(dtype), keep_fp32_(printable(keep_fp32)) {
    if (!keep_fp32.empty()) keep_.emplace("--keep-fp32", keep_fp32);
  }

  // The dtype that the rule gives to a target of this dtype. `is_kept`: whether `keeps` is true of
  // one of its names. `is_scaled`: its root has FP8 codes with scales.
  DType dtype_of(bool is_kept, DType dtype, bool is_scaled) const {
    if (!is_castable(dtype) && !is_scaled) return dtype;
    if (is_kept) return DType::f32;
    return dtype_.value_or(dtype);
  }

  bool keeps(const std::string& fqn) const { return keep_ && keep_->finds(fqn); }

  // USAGE if `--keep-fp32` is given and matches no floating-point target.
  void require_match(const Recipe& recipe) const {
    const auto is_kept = [&](const Target& target) {
      const bool is_number = is_castable(target.spec.dtype) || recipe.nodes[target.root].is_scaled;
      return is_number && keeps(target.spec.fqn);
    };
    if (!keep_ || std::any_of(recipe.targets.begin(), recipe.targets.end(), is_kept)) return;
    fail(Category::usage,
         fmt::format("--keep-fp32 '{}' matches no floating-point tensor", keep_fp32_),
         {.expected = "a regular expression that a tensor's name matches", .got = keep_fp32_});
  }

 private:
  const std::optional<DType> dtype_;
  const std::string keep_fp32_;
  std::optional<NamePattern> keep_;
};

// By stored tensor: whether it holds the scales of FP8 codes that are dequantised. Such scales do
// not become targets.
std::vector<bool> spent_scales(const Manifest& manifest, const DTypeRule& rule) {
  std::vector<bool> spent(manifest.tensors.size());
  for (const StoredTensor& codes : manifest.tensors) {
    if (!codes.scale) continue;
    const DType dtype = codes.spec.dtype;
    if (rule.dtype_of(rule.keeps(codes.spec.fqn), dtype, true) != dtype)
      spent[codes.scale->tensor] = true;
  }
  return spent;
}

}  // namespace

Recipe identity_recipe(const Manifest& manifest, std::span<const NamedTie> ties,
                       const std::vector<bool>& left_out) {
  RecipeBuilder builder(manifest);
  std::vector<const NamedTie*> meant;  // the ties whose `target` is stored
  for (const NamedTie& tie : ties) {
    if (is_stored(manifest, tie.target)) meant.push_back(&tie);
  }
  for (size_t i = 0; i < manifest.tensors.size(); ++i) {
    if (!left_out.empty() && left_out[i]) continue;
    const TensorSpec& spec = manifest.tensors[i].spec;
    const uint32_t stored = builder.stored(static_cast<uint32_t>(i));
    const auto tie = std::find_if(meant.begin(), meant.end(),
                                  [&](const NamedTie* t) { return t->name == spec.fqn; });
    if (tie == meant.end()) {
      builder.target(spec.fqn, stored, std::nullopt, spec.role);
    } else {
      builder.alias(spec.fqn, (*tie)->target, stored);
    }
  }
  for (const NamedTie* tie : meant) {
    if (!is_stored(manifest, tie->name)) builder.alias(tie->name, tie->target);
  }
  return builder.finish();
}

std::vector<NamedTie> word_embedding_ties(const Manifest& manifest, bool untie) {
  std::vector<std::string> embeddings;
  std::vector<std::string> heads;
  for (const StoredTensor& stored : manifest.tensors) {
    const std::string& name = stored.spec.fqn;
    if (name == "wte.weight" || name == "transformer.wte.weight" ||
        is_called(name, "embed_tokens.weight")) {
      embeddings.push_back(name);
    }
    if (is_called(name, kHead)) heads.push_back(name);
  }
  // With several embeddings (an encoder's and a decoder's) or heads, the names don't determine
  // which pair is tied.
  if (embeddings.size() > 1 || heads.size() > 1) return {};
  if (embeddings.empty() && !heads.empty()) embeddings = usual_embedding(manifest);
  if (embeddings.empty()) return {};
  const std::string head = heads.empty() ? std::string(kHead) : heads[0];
  const bool is_head_stored = !heads.empty();
  if (is_stored(manifest, embeddings[0])) {
    if (untie && is_head_stored) return {};
    return {{head, embeddings[0]}};
  }
  return {{embeddings[0], head}};
}

void set_dtype(Recipe& recipe, std::optional<DType> dtype, const std::string& keep_fp32) {
  const DTypeRule rule(dtype, keep_fp32);
  rule.require_match(recipe);
  std::vector<bool> kept(recipe.targets.size());
  for (size_t t = 0; t < recipe.targets.size(); ++t) {
    const Node& root = recipe.nodes[recipe.targets[t].root];
    if (rule.keeps(recipe.targets[t].spec.fqn)) kept[root.op == Op::alias ? root.from : t] = true;
  }
  for (size_t t = 0; t < recipe.targets.size(); ++t) {
    TensorSpec& spec = recipe.targets[t].spec;
    const bool is_scaled = recipe.nodes[recipe.targets[t].root].is_scaled;
    spec.dtype = rule.dtype_of(kept[t], spec.dtype, is_scaled);
  }
  // An alias has the dtype of its target.
  for (Target& target : recipe.targets) {
    const Node& root = recipe.nodes[target.root];
    if (root.op == Op::alias) target.spec.dtype = recipe.targets[root.from].spec.dtype;
  }
  require_countable(recipe);  // fp32 is twice as large as bf16
}

Recipe make_recipe(const Manifest& manifest, const RecipeOptions& options) {
  std::vector<NamedTie> ties;
  if (options.tie_word_embeddings) ties = word_embedding_ties(manifest, options.untie);
  const DTypeRule rule(options.dtype, options.keep_fp32);
  Recipe recipe = options.text ? parse_recipe(*options.text, manifest, options.untie)
                               : identity_recipe(manifest, ties, spent_scales(manifest, rule));
  set_dtype(recipe, options.dtype, options.keep_fp32);
  return recipe;
}

bool is_dequantised(const Recipe& recipe, const Target& target) noexcept {
  return is_fp8_code(recipe.nodes[target.root].dtype) && is_castable(target.spec.dtype);
}

void digest_recipe(const Recipe& recipe, Hasher& hasher) {
  std::vector<int64_t> numbers;  // of one node or target: one long add is faster than many short
  for (const Node& node : recipe.nodes) {
    numbers.assign({static_cast<int64_t>(node.op), static_cast<int64_t>(node.dtype), node.dim,
                    node.from, static_cast<int64_t>(node.in.size()),
                    static_cast<int64_t>(node.arg.size())});
    numbers.insert(numbers.end(), node.in.begin(), node.in.end());
    numbers.insert(numbers.end(), node.arg.begin(), node.arg.end());
    numbers.insert(numbers.end(), node.shape.begin(), node.shape.end());
    hasher.add(numbers);
  }
  for (const Target& target : recipe.targets) {
    numbers.assign({static_cast<int64_t>(target.spec.dtype), static_cast<int64_t>(target.spec.role),
                    target.root});
    hasher.add(target.spec.fqn).add(numbers);
  }
}

namespace {

// Calls `fn` with `node` and each node under it.
template <typename Fn>
void for_each_under(const Recipe& recipe, uint32_t node, const Fn& fn) {
  std::vector<uint32_t> open = {node};
  while (!open.empty()) {
    const Node& n = recipe.nodes[open.back()];
    open.pop_back();
    fn(n);
    open.insert(open.end(), n.in.begin(), n.in.end());
  }
}

}  // namespace

bool has_op(const Recipe& recipe, uint32_t node, Op op) {
  bool has = false;
  for_each_under(recipe, node, [&](const Node& n) { has |= n.op == op; });
  return has;
}

std::vector<uint32_t> stored_under(const Recipe& recipe, uint32_t node) {
  std::vector<uint32_t> found;
  for_each_under(recipe, node, [&](const Node& n) {
    if (n.op == Op::stored) found.push_back(n.from);
  });
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

ElementSource element_source(const Recipe& recipe, uint32_t id, int64_t element) {
  const Node& node = recipe.nodes[id];
  const auto through = [&](uint32_t input, int64_t of_input, int64_t limit) {
    ElementSource source = element_source(recipe, input, of_input);
    source.count = std::min(source.count, limit);
    return source;
  };
  const auto in_dim = [&] { return around(node.shape, node.dim, element); };
  const auto input_shape = [&](size_t k) -> const std::vector<int64_t>& {
    return recipe.nodes[node.in[k]].shape;
  };
  switch (node.op) {
    case Op::stored:
    case Op::init:
    case Op::caller: return {&node, element, numel_of(node.shape) - element};
    case Op::alias: return element_source(recipe, recipe.targets[node.from].root, element);
    case Op::reshape: return through(node.in[0], element, numel_of(node.shape) - element);
    case Op::cat: {
      SplitIndex a = in_dim();
      size_t k = 0;
      while (a.index >= input_shape(k)[at(node.dim)]) a.index -= input_shape(k++)[at(node.dim)];
      const int64_t size = input_shape(k)[at(node.dim)];
      return through(node.in[k], (a.outer * size + a.index) * a.inner_size + a.inner,
                     (size - a.index) * a.inner_size - a.inner);
    }
    case Op::stack: {
      const SplitIndex a = in_dim();
      return through(node.in[at(a.index)], a.outer * a.inner_size + a.inner,
                     a.inner_size - a.inner);
    }
    case Op::slice:
    case Op::gather: {
      const SplitIndex a = in_dim();
      const int64_t index = node.op == Op::slice ? a.index + node.arg[0] : node.arg[at(a.index)];
      const int64_t size = input_shape(0)[at(node.dim)];
      return through(node.in[0], (a.outer * size + index) * a.inner_size + a.inner,
                     a.inner_size - a.inner);
    }
    case Op::permute: {
      int64_t rest = element;
      int64_t of_input = 0;
      for (size_t k = node.shape.size(); k-- > 0;) {
        const auto dim = static_cast<int>(node.arg[k]);
        of_input += rest % node.shape[k] * inner_of(input_shape(0), dim);
        rest /= node.shape[k];
      }
      return through(node.in[0], of_input, 1);
    }
  }
  fail(Category::internal, "a recipe node has an unknown op");
}

}  // namespace modicum
