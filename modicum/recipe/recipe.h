// The door of `recipe`: how target tensors are put together from stored tensors.
//
// A recipe is a small DAG. Each node is an index map from its own elements to those of its inputs,
// so a shard can be cut in target space and pulled back to the stored elements it needs: convert
// first, shard second, and yet read only the shard. Identity is a recipe; nothing loads without
// one. docs/recipes.md shows each op. Values; any thread may read one.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "modicum/base/base.h"
#include "modicum/spec/spec.h"

namespace modicum {

enum class Op : uint8_t {
  stored,   // a tensor of the checkpoint
  cat,      // inputs one after the other along `dim`
  stack,    // inputs along a new dim `dim`
  slice,    // [arg[0], arg[0] + shape[dim]) of `dim`
  permute,  // dim k of the output is dim arg[k] of the input
  gather,   // index k along `dim` is index arg[k] of the input
  reshape,  // the same row-major elements under another shape
  init,     // made by a rule: arg[0] is an InitRule, arg[1] the bits of the double `std`
  caller,   // given by the caller of load()
  alias,    // another target under a second name; has no memory of its own
};
std::string_view op_name(Op op) noexcept;

enum class InitRule : uint8_t { zeros, ones, normal };

struct Node {
  Op op = Op::stored;
  DType dtype = DType::f32;
  bool is_scaled = false;  // FP8 codes, and all that are stored below bring a scale along
  int32_t dim = 0;
  uint32_t from = 0;  // stored: index in the manifest; alias: index of the target; caller: ordinal
  std::vector<uint32_t> in;  // earlier nodes
  std::vector<int64_t> arg;
  std::vector<int64_t> shape;

  bool operator==(const Node&) const = default;
};

struct Target {
  TensorSpec spec;    // as it will be loaded: final name and dtype
  uint32_t root = 0;  // its node
};

// Nodes in topological order; every stored tensor is used by a target or listed in `unused`.
struct Recipe {
  std::vector<Node> nodes;
  std::vector<Target> targets;
  std::vector<uint32_t> unused;  // indices in the manifest, sorted

  uint64_t held_bytes() const noexcept;  // host memory of this value; equal for equal values
  bool is_alias(size_t target) const noexcept {
    return nodes[targets[target].root].op == Op::alias;
  }
};

// Builds recipes node by node; each call checks that the shapes meet (MISMATCH) and returns the new
// node. `finish` proves that every stored tensor is used or unused, and no name is made twice. FP8
// codes bring their scale along: it is used where they are, and may be listed as unused.
class RecipeBuilder {
 public:
  explicit RecipeBuilder(const Manifest& manifest);
  uint32_t stored(std::string_view name);  // unknown: MISMATCH with the nearest name
  uint32_t stored(uint32_t tensor);
  uint32_t cat(int dim, std::vector<uint32_t> in);
  uint32_t stack(int dim, std::vector<uint32_t> in);
  uint32_t slice(int dim, int64_t start, int64_t stop, uint32_t in);
  uint32_t permute(std::vector<int64_t> dims, uint32_t in);
  uint32_t gather(int dim, std::vector<int64_t> index, uint32_t in);
  uint32_t reshape(std::vector<int64_t> shape, uint32_t in);
  uint32_t init(InitRule rule, double std, std::vector<int64_t> shape, DType dtype);
  uint32_t caller(uint32_t ordinal, std::vector<int64_t> shape, DType dtype);
  // `dtype` other than the node's own is a cast between fp32, bf16 and fp16, or to one of them from
  // FP8 codes that all have scales, which dequantises; else UNSUPPORTED.
  void target(std::string fqn, uint32_t root, std::optional<DType> dtype = std::nullopt,
              Role role = Role::param);
  void alias(std::string fqn, std::string of);  // `of` may be made later
  void unused(std::string_view name);
  Recipe finish();

 private:
  uint32_t push(Node node);
  const Node& node(uint32_t id) const;
  void check_dim(const Node& of, int dim, std::string_view op) const;
  void resolve_aliases();

  const Manifest& manifest_;
  std::vector<std::pair<std::string_view, uint32_t>> by_name_;  // sorted
  Recipe recipe_;
  std::vector<bool> used_;
  std::vector<std::pair<std::string, std::string>> aliases_;
};

// Every stored tensor as it is, under its own name, in the manifest's order. `ties` are aliases
// {name, of}; one whose name is stored, or whose `of` is not, is left out.
Recipe identity_recipe(const Manifest& manifest,
                       std::span<const std::pair<std::string, std::string>> ties = {});

// The tie that a model with `tie_word_embeddings` has: its head and the embedding it is, as far as
// the stored names tell.
std::vector<std::pair<std::string, std::string>> word_embedding_ties(const Manifest& manifest);

// The text form, `recipe.json` (docs/recipes.md). Errors: MISMATCH where it doesn't add up,
// UNSUPPORTED for an op that is not known; both name the target.
Recipe parse_recipe(std::string_view text, const Manifest& manifest);
std::string recipe_text(const Recipe& recipe, const Manifest& manifest);

// `--dtype` and `--keep-fp32`: targets of a castable dtype, and of FP8 codes that all have scales,
// get `dtype`; those whose name `keep_fp32` (a regular expression, searched) matches get float32. A
// bad expression is USAGE.
void set_dtype(Recipe& recipe, std::optional<DType> dtype, const std::string& keep_fp32);

// The recipe that is meant, whole: of `text` (recipe.json) or, where that is empty, identity with
// the ties that the model's config asks for; then dtypes. Identity leaves out the scales of what is
// dequantised.
struct RecipeOptions {
  std::string text;
  bool tie_word_embeddings = false;
  std::optional<DType> dtype;
  std::string keep_fp32;
};
Recipe make_recipe(const Manifest& manifest, const RecipeOptions& options = {});

// What the elements of a target are made of, to digest a plan's inputs.
void digest_recipe(const Recipe& recipe, Hasher& hasher);

// Pulls a box of node `node`'s elements (over its shape, or over any shape with the same row-major
// order) back to the leaves: calls `leaf` with disjoint boxes over the leaves' own shapes that
// together have the box's elements, each with its place in the destination.
void pull_back(const Recipe& recipe, uint32_t node, const Box& box,
               const std::function<void(const Node& leaf, const Box& part)>& leaf);

// Whether a target is FP8 codes times their scales: its root's elements are codes, its own are not.
bool is_dequantised(const Recipe& recipe, const Target& target) noexcept;

// The stored tensors under node `node`, each once, in manifest order.
std::vector<uint32_t> stored_under(const Recipe& recipe, uint32_t node);

// Where single elements come from: element `element` (row-major) of `node` and the count - 1 that
// follow it are elements first, first + 1, ... of `leaf`; count >= 1. An independent second reading
// of the ops, element by element, for checks and tests; pull_back never calls it.
struct ElementSource {
  const Node* leaf = nullptr;
  int64_t first = 0;
  int64_t count = 0;
};
ElementSource element_source(const Recipe& recipe, uint32_t node, int64_t element);

}  // namespace modicum
