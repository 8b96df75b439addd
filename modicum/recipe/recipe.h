// The public header of `recipe`: the assembly of target tensors from stored tensors.
//
// A recipe is a small DAG. Each node is an index map from its elements to elements of its inputs. A
// shard of a target can therefore be pulled back to the stored elements that it needs: recipes
// describe unsharded targets, and still only the shard is read. Every load has a recipe, by default
// the identity. docs/reference/recipes.md shows each op. Recipes are values; any number of threads
// may read one.
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
  cat,      // the inputs concatenated along `dim`
  stack,    // the inputs, of equal shapes, stacked along a new dim `dim`
  slice,    // [arg[0], arg[0] + shape[dim]) of `dim`
  permute,  // dim k of the output is dim arg[k] of the input
  gather,   // index k along `dim` is index arg[k] of the input
  reshape,  // the input's elements, in the same row-major order, under another shape
  init,     // computed by a rule: arg[0] is an InitRule, arg[1] the bits of the double `std`
  caller,   // produced by the caller of load()
  alias,    // a second name of another target, without memory. With an input, the alias is stored
            // too: its values are read and compared with the target's
};
std::string_view op_name(Op op) noexcept;

enum class InitRule : uint8_t { zeros, ones, normal };

struct Node {
  Op op = Op::stored;
  DType dtype = DType::f32;
  bool is_scaled = false;  // FP8 codes, and every stored tensor under this node has a scale
  bool is_made = false;    // no element comes from the checkpoint: init and caller, and ops on them
  int32_t dim = 0;
  // stored: index in the manifest; alias: index of the target; caller: the `ordinal` that
  // RecipeBuilder::caller was given.
  uint32_t from = 0;
  std::vector<uint32_t> in;  // inputs, which are earlier nodes
  std::vector<int64_t> arg;
  std::vector<int64_t> shape;

  bool operator==(const Node&) const = default;
};

struct Target {
  TensorSpec spec;    // name, dtype and shape after loading
  uint32_t root = 0;  // the node that computes it
};

// Every stored tensor is used by a node, is the scale of codes that are used, or is listed in
// `unused`.
struct Recipe {
  std::vector<Node> nodes;  // in topological order
  std::vector<Target> targets;
  std::vector<uint32_t> unused;  // indices in the manifest, sorted

  uint64_t held_bytes() const noexcept;  // host memory of this value; equal for equal values
  bool is_alias(size_t target) const noexcept {
    return nodes[targets[target].root].op == Op::alias;
  }
  // Whether a target is an alias that is stored too: its values are read like a target's, compared
  // and discarded.
  bool is_compared(size_t target) const noexcept {
    return is_alias(target) && !nodes[targets[target].root].in.empty();
  }
  // The node whose elements are read for a target: its root, or the input of a compared alias. Must
  // not be called for other aliases, for which nothing is read.
  uint32_t read_node(size_t target) const noexcept {
    return is_compared(target) ? nodes[targets[target].root].in[0] : targets[target].root;
  }
};

// Builds a recipe node by node. The call of an op checks the shapes of its inputs (MISMATCH) and
// returns the index of the new node. `finish` checks that every stored tensor is either used or
// listed as unused and that no two targets have the same name, and calls require_countable. The
// scale of used FP8 codes counts as used, but may also be listed as unused. With `unties`, an alias
// with `stored_as` becomes an independent target.
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
  // A `dtype` other than the node's own means a cast between fp32, bf16 and fp16, or the
  // dequantisation of FP8 codes, which must all have scales, to one of these three. UNSUPPORTED for
  // any other conversion.
  void target(std::string fqn, uint32_t root, std::optional<DType> dtype = std::nullopt,
              Role role = Role::param);
  // The target `target_fqn` may be added later. Node `stored_as` must have the shape of
  // `target_fqn`, the dtype of the root of `target_fqn`, and scales if and only if that root has
  // scales; the load compares its values with the values of `target_fqn`. With `unties`, none of
  // these conditions applies.
  void alias(std::string fqn, std::string target_fqn,
             std::optional<uint32_t> stored_as = std::nullopt);
  void unused(std::string_view name);  // unknown: MISMATCH with the nearest name
  Recipe finish();
  const Node& node(uint32_t id) const;  // `id` was returned by this builder

 private:
  struct Alias {
    std::string fqn, target_fqn;
    std::optional<uint32_t> stored_as;
  };
  std::optional<uint32_t> find_stored(std::string_view name);
  // The index of a stored tensor. Unknown: MISMATCH with the sentence `error` and the nearest name.
  uint32_t require_stored(std::string_view name, std::string_view error);
  uint32_t push(Node node);
  // A node without inputs that has the dtype and shape of `in`. MISMATCH if `in` has no dim `dim`,
  // UNSUPPORTED if it has more than 8 dims.
  Node along(Op op, int dim, uint32_t in) const;
  void resolve_aliases();
  void resolve(Alias alias, uint32_t target_index);
  void refuse_equal_names() const;

  const Manifest& manifest_;
  const bool unties_;
  std::vector<uint32_t> by_name_;  // the manifest's tensors, sorted by name; empty until needed
  Recipe recipe_;
  std::vector<bool> used_;
  std::vector<Alias> aliases_;
};

// Two names of one tensor, of which the manifest has one or both. `name` becomes an alias of
// `target`.
struct NamedTie {
  std::string name, target;

  bool operator==(const NamedTie&) const = default;
};

// Every stored tensor unchanged, under its own name, in the manifest's order. Each tie is an alias;
// if its name is stored too, it is compared. A tie whose `target` is not stored is ignored. Without
// the stored tensors that `left_out` marks; empty: with all.
Recipe identity_recipe(const Manifest& manifest, std::span<const NamedTie> ties = {},
                       const std::vector<bool>& left_out = {});

// The tie of a model with `tie_word_embeddings`, derived from the stored names. With `untie` there
// is no tie if both embedding and head are stored.
//
//   stored                  tie
//   embedding               lm_head.weight is an alias of the embedding
//   embedding and head      the head is an alias of the embedding; its stored values are compared
//   head                    the embedding is an alias of the head; none if the names of the layers
//                           have several prefixes, so that the embedding's name is unknown
//   several of either       none: the names don't determine the pair
//   neither                 none
std::vector<NamedTie> word_embedding_ties(const Manifest& manifest, bool untie = false);

// Parses and writes recipe.json (docs/reference/recipes.md). The ordinals of the `caller` ops are
// their numbers in the order of the text, from 0. `unties` is passed to RecipeBuilder. Throws
// MISMATCH for an invalid recipe, UNSUPPORTED for an unknown op or rule, and the errors of
// RecipeBuilder. An error in an op names the target.
Recipe parse_recipe(std::string_view text, const Manifest& manifest, bool unties = false);
std::string recipe_text(const Recipe& recipe, const Manifest& manifest);

// `--dtype` and `--keep-fp32`: sets the dtype of castable targets and of FP8 codes that all have
// scales. Of these, the targets whose name contains a match of the regular expression `keep_fp32`
// get float32, and all others get `dtype` (nullopt: they keep their dtype). USAGE if the expression
// is invalid or matches none of these targets; MISMATCH if the targets become too large
// (require_countable).
void set_dtype(Recipe& recipe, std::optional<DType> dtype, const std::string& keep_fp32);

// make_recipe returns the recipe of a load. It is parsed from `text` (recipe.json), or else the
// identity without the scales of dequantised tensors; `tie_word_embeddings` adds the tie of the
// word embeddings to the identity. Then set_dtype is applied.
struct RecipeOptions {
  std::optional<std::string> text;
  bool tie_word_embeddings = false;
  bool untie = false;  // a tensor that is stored under both of its names becomes two targets
  std::optional<DType> dtype;
  std::string keep_fp32;
};
Recipe make_recipe(const Manifest& manifest, const RecipeOptions& options = {});

// The tensors that a save writes.
//
// A stored tensor is restored, under its name and in its shape, if the targets hold each of its
// elements exactly once, all in one dtype. Otherwise (it was sliced, or an element is repeated) the
// targets that take its elements are written unchanged: under the targets' names and shapes. So are
// targets with values that were not stored (`init`, `caller`), and every target that shares a
// stored tensor with an unchanged target.
//
//   recipe                                           saved
//   q, k = halves of the stored qkv                  qkv
//   t = the first 10 rows of the stored embed        t
//   gate_up = cat(stored gate, stored up)            gate, up
//   head = cat(stored head, 2 rows of zeros)         head, with the 2 rows
//
// Values have the dtype in which they are loaded, or SavedOptions::dtype. Dequantised codes lose
// their scales. A tensor that no target reads is copied from the source, or left out; scales of
// codes that are saved as codes are always copied.
struct SavedTensor {
  TensorSpec spec;
  // The stored tensor that is restored or copied. For an unchanged target: the first stored tensor
  // from which it takes elements; empty if there is none.
  std::optional<uint32_t> stored;
  bool is_copied = false;
};
struct SavedForm {
  std::vector<SavedTensor> tensors;  // sorted by `stored`; those without it are last
  std::vector<bool> as_target;       // by target: whether it is written unchanged
  std::vector<uint32_t> left_out;    // stored tensors that are neither restored nor copied
};
struct SavedOptions {
  bool copies_unused = true;   // false: copies only the scales that saved codes need
  std::optional<DType> dtype;  // of floats that can be cast; default: as loaded
  // By target: whether the model computes it, so that it is not saved. Has an effect only for
  // targets without stored elements. Empty: no target is computed.
  std::vector<bool> is_computed;
};
// MISMATCH if two saved tensors would have the same name.
SavedForm saved_form(const Recipe& recipe, const Manifest& manifest,
                     const SavedOptions& options = {});
// The recipe that assembles the same targets, in the same order and dtypes, from the saved tensors.
// `saved` is a manifest of the form's tensors, in any order; `manifest` is the one of `recipe`.
Recipe saved_recipe(const Recipe& recipe, const Manifest& manifest, const SavedForm& form,
                    const Manifest& saved);

// The recipe of some of the targets, in the given order, with only the nodes that they need. The
// other stored tensors that `recipe` names are listed as unused. An alias may only be included
// together with its target.
Recipe part_of(const Recipe& recipe, std::span<const uint32_t> targets, size_t stored_tensors);

// Adds all nodes and targets to the digest of a plan's inputs.
void digest_recipe(const Recipe& recipe, Hasher& hasher);

// Maps a box of elements of node `node` to the leaves that they come from. `box` is over the node's
// shape, or any shape with the same row-major order. Calls `leaf` with boxes that together have one
// source for each element of `box`; a gather may take one leaf element several times. A leaf's box
// is over the leaf's shape, or any shape with the same row-major order; its `at` and `step` are
// places in the destination. `Leaves::stored` skips init and caller leaves, which may have very
// many boxes.
enum class Leaves : uint8_t { all, stored };
void pull_back(const Recipe& recipe, uint32_t node, const Box& box,
               FunctionRef<void(const Node& leaf, const Box& part)> leaf,
               Leaves leaves = Leaves::all);

// Throws MISMATCH if the targets together exceed kMaxModelBytes. RecipeBuilder and set_dtype call
// this.
void require_countable(const Recipe& recipe);

// Whether a target has FP8 codes times their scales as values: the root's dtype is FP8, the
// target's is fp32, bf16 or fp16.
bool is_dequantised(const Recipe& recipe, const Target& target) noexcept;

// Whether node `node`, or one under it, has this op.
bool has_op(const Recipe& recipe, uint32_t node, Op op);
// The stored tensors under node `node`, each once, in manifest order.
std::vector<uint32_t> stored_under(const Recipe& recipe, uint32_t node);

// The source of single elements: elements [element, element + count) of `node`, row-major, are
// elements [first, first + count) of `leaf`; count >= 1. element_source is a second implementation
// of the ops, independent of pull_back, for checks and tests.
struct ElementSource {
  const Node* leaf = nullptr;
  int64_t first = 0;
  int64_t count = 0;
};
ElementSource element_source(const Recipe& recipe, uint32_t node, int64_t element);

}  // namespace modicum
