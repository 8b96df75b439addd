// The door of `recipe`: how target tensors are put together from stored tensors.
//
// A recipe is a small DAG. Each node is an index map from its own elements to those of its inputs,
// so a shard can be cut in target space and pulled back to the stored elements it needs: convert
// first, shard second, and yet read only the shard. Identity is a recipe; nothing loads without
// one. docs/reference/recipes.md shows each op. Values; any thread may read one.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "modicum/base/base.h"
#include "modicum/recipe/name_pattern.h"  // IWYU pragma: export
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
  alias,    // another target under a second name; has no memory of its own. An input is a tie's
            // evidence: its values must be that target's, and are compared while they are read
};
std::string_view op_name(Op op) noexcept;

enum class InitRule : uint8_t { zeros, ones, normal };

struct Node {
  Op op = Op::stored;
  DType dtype = DType::f32;
  bool is_scaled = false;  // FP8 codes, and all that are stored below bring a scale along
  bool is_made = false;    // no element comes from the checkpoint: init and caller, and ops on them
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
  // An alias whose name is stored too: it is read like a target, compared and never kept.
  bool is_compared(size_t target) const noexcept {
    return is_alias(target) && !nodes[targets[target].root].in.empty();
  }
  // The node whose elements are read for a target: its root, or what a compared alias has beside
  // the target it names. Other aliases have none.
  uint32_t read_node(size_t target) const noexcept {
    return is_compared(target) ? nodes[targets[target].root].in[0] : targets[target].root;
  }
};

// Builds recipes node by node; each call checks that the shapes meet (MISMATCH) and returns the new
// node. `finish` proves that every stored tensor is used or unused, and no name is made twice. FP8
// codes bring their scale along: it is used where they are, and may be listed as unused. With
// `unties`, an alias that comes with a node becomes a target of its own.
class RecipeBuilder {
 public:
  explicit RecipeBuilder(const Manifest& manifest, bool unties = false);
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
  // `of` may be made later. With `stored_as`, the values of that node must be those of `of`: same
  // shape, same dtype as the root of `of`.
  void alias(std::string fqn, std::string of, std::optional<uint32_t> stored_as = std::nullopt);
  void unused(std::string_view name);
  Recipe finish();
  const Node& node(uint32_t id) const;  // one that this builder has made

 private:
  struct Alias {
    std::string fqn, of;
    std::optional<uint32_t> stored_as;
  };
  uint32_t push(Node node);
  // A node of the dtype and shape of `in`, which must have a dim `dim`; without inputs.
  Node along(Op op, int dim, uint32_t in) const;
  void resolve_aliases();
  void resolve(Alias alias, uint32_t of);

  const Manifest& manifest_;
  const bool unties_;
  std::vector<std::pair<std::string_view, uint32_t>> by_name_;  // sorted
  Recipe recipe_;
  std::vector<bool> used_;
  std::vector<Alias> aliases_;
};

// Two names of one tensor. Which of them is stored, or whether both are, is seen in the manifest.
struct NamedTie {
  std::string name, of;

  bool operator==(const NamedTie&) const = default;
};

// Every stored tensor as it is, under its own name, in the manifest's order. Each tie is an alias;
// one whose name is stored too is compared. One whose `of` is not stored is left out.
Recipe identity_recipe(const Manifest& manifest, std::span<const NamedTie> ties = {});

// The tie that a model with `tie_word_embeddings` has, as far as the stored names tell: its head is
// the embedding, or, where only the head is stored, the embedding is the head. With `untie`, none
// where both are stored.
std::vector<NamedTie> word_embedding_ties(const Manifest& manifest, bool untie = false);

// The text form, `recipe.json` (docs/reference/recipes.md). A `caller` takes the next ordinal.
// Errors: MISMATCH where it doesn't add up, UNSUPPORTED for an op that is not known; both name the
// target.
// `unties` as in RecipeBuilder.
Recipe parse_recipe(std::string_view text, const Manifest& manifest, bool unties = false);
std::string recipe_text(const Recipe& recipe, const Manifest& manifest);

// `--dtype` and `--keep-fp32`: targets of a castable dtype, and of FP8 codes that all have scales,
// get `dtype`; those whose name `keep_fp32` (a regular expression, searched) matches get float32. A
// bad expression is USAGE.
void set_dtype(Recipe& recipe, std::optional<DType> dtype, const std::string& keep_fp32);

// The recipe that is meant, whole: of `text` (recipe.json) or, where there is none, identity with
// the ties that the model's config asks for; then dtypes. Identity leaves out the scales of what is
// dequantised.
struct RecipeOptions {
  std::optional<std::string> text;
  bool tie_word_embeddings = false;
  bool untie = false;  // what is stored under both of its names is loaded as two targets
  std::optional<DType> dtype;
  std::string keep_fp32;
};
Recipe make_recipe(const Manifest& manifest, const RecipeOptions& options = {});

// The targets as a manifest: tensor i is target i, without files and extents. Who has the targets
// somewhere fills these in, in this order.
Manifest target_manifest(const Recipe& recipe);

// The way back: the recipe that makes the stored tensors of `manifest` out of the targets of
// `recipe`. Its leaves refer to a manifest of the targets in their order (`target_manifest`), its
// targets are the tensors that `recipe` uses, in the manifest's order, with their stored names and
// dtypes; a cast is the cast back. What a gather repeats is taken from its first copy, aliases and
// what no stored tensor is made of are unused. UNSUPPORTED, naming it, where targets don't hold all
// elements of a stored tensor, hold its parts in several dtypes, or hold FP8 codes as numbers.
Recipe inverse_recipe(const Recipe& recipe, const Manifest& manifest);

// The targets whose cast may lose bits: all casts but those to fp32.
std::vector<uint32_t> lossy_targets(const Recipe& recipe);

// What the elements of a target are made of, to digest a plan's inputs.
void digest_recipe(const Recipe& recipe, Hasher& hasher);

// Pulls a box of node `node`'s elements (over its shape, or over any shape with the same row-major
// order) back to the leaves: calls `leaf` with disjoint boxes over the leaves' own shapes that
// together have the box's elements, each with its place in the destination. `Leaves::stored`: those
// that are made, which may be many times larger, are not walked.
enum class Leaves : uint8_t { all, stored };
void pull_back(const Recipe& recipe, uint32_t node, const Box& box,
               FunctionRef<void(const Node& leaf, const Box& part)> leaf,
               Leaves leaves = Leaves::all);

// MISMATCH where the targets, in their dtypes, come to more than kMaxModelBytes. RecipeBuilder and
// set_dtype ask.
void require_countable(const Recipe& recipe);

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
