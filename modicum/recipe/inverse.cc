// The inverse of a recipe, from targets back to stored tensors.
//
// Walks from every target down to the stored tensors and inverts each op on the way. This collects,
// for each stored tensor, the parts of it that targets hold (views.h); put_together joins them.
//
//   recipe     qkv = cat(dim 0: q [4, 2], k [2, 2])
//   inverse    q = slice(dim 0: qkv [0, 4)),  k = slice(dim 0: qkv [4, 6))
//
// A part is a product of index sets over a view, so that a cut between heads remains one part of a
// view [heads, head_dim, ...], not one part per head.
#include <algorithm>
#include <numeric>
#include <span>
#include <utility>

#include "modicum/recipe/recipe.h"
#include "modicum/recipe/views.h"

namespace modicum {
namespace {

using views::Part;
using views::Set;
using views::ViewDim;

size_t at(int64_t i) { return static_cast<size_t>(i); }

// --- the walk ---

class Inversion {
 public:
  Inversion(const Recipe& recipe, const Manifest& stored, const Manifest& targets)
      : recipe_(recipe),
        stored_(stored),
        builder_(targets),
        parts_(stored.tensors.size()),
        walked_(recipe.targets.size()) {}

  Recipe run() {
    for (uint32_t t = 0; t < recipe_.targets.size(); ++t) {
      if (recipe_.is_alias(t) && !recipe_.is_compared(t)) continue;
      // A compared alias's stored values are restored from the target that it names.
      const uint32_t holder = recipe_.is_alias(t) ? recipe_.nodes[recipe_.targets[t].root].from : t;
      const std::vector<int64_t>& shape = recipe_.targets[holder].spec.shape;
      dtype_ = recipe_.targets[holder].spec.dtype;
      if (is_dequantised(recipe_, recipe_.targets[holder])) {
        fail(Category::unsupported, "dequantised FP8 codes can't be saved as codes",
             {.tensor = recipe_.targets[holder].spec.fqn});
      }
      walked_[holder] = true;
      naming_tensor(recipe_.targets[t].spec.fqn, [&] {
        give(recipe_.read_node(t), views::whole_part(builder_.stored(holder), shape));
      });
    }
    for (uint32_t s = 0; s < parts_.size(); ++s) {
      if (std::binary_search(recipe_.unused.begin(), recipe_.unused.end(), s)) continue;
      const TensorSpec& spec = stored_.tensors[s].spec;
      naming_tensor(spec.fqn,
                    [&] { builder_.target(spec.fqn, put_together(s), spec.dtype, spec.role); });
    }
    for (uint32_t t = 0; t < recipe_.targets.size(); ++t) {
      if (!walked_[t]) builder_.unused(recipe_.targets[t].spec.fqn);
    }
    const Recipe made = builder_.finish();  // may have nodes that no target uses
    std::vector<uint32_t> all(made.targets.size());
    std::iota(all.begin(), all.end(), 0U);
    return part_of(made, all, recipe_.targets.size());
  }

 private:
  struct Given {
    Part part;
    DType dtype;
  };

  // Adds a node with the elements of `made` (of shape `shape`) at indices `where` along `dim`.
  uint32_t select(uint32_t made, const std::vector<int64_t>& shape, size_t dim, const Set& where) {
    const auto d = static_cast<int>(dim);
    if (views::is_whole(where, shape[dim])) return made;
    if (where.size() == 1) return builder_.slice(d, where[0].lo, where[0].hi, made);
    return builder_.gather(d, views::listed(where), made);
  }
  uint32_t reshaped(uint32_t made, const std::vector<int64_t>& from,
                    const std::vector<int64_t>& to) {
    return from == to ? made : builder_.reshape(to, made);
  }

  // Converts the part to one or several parts over a view of sizes `shape`.
  std::vector<Part> viewed(const Part& part, const std::vector<int64_t>& shape) {
    if (part.sizes() == shape) return {part};
    if (part.is_whole()) {
      return {views::whole_part(reshaped(part.made, part.shape(), shape), shape)};
    }
    // Flattens each group of dims to one dim, then combines each product of one group with each
    // product of the other groups.
    Part flat;
    std::vector<std::vector<views::Product>> products;
    views::for_each_group(part.sizes(), shape, [&](const views::Group& g) {
      const auto of_view = std::span(part.view).subspan(g.from_begin, g.from_end - g.from_begin);
      const auto of_shape = std::span(shape).subspan(g.to_begin, g.to_end - g.to_begin);
      Set set = views::flattened(of_view);
      products.push_back(views::as_products(set, of_shape));
      flat.view.push_back({views::product_of(of_shape), std::move(set)});
    });
    flat.made = reshaped(part.made, part.shape(), flat.shape());
    return chosen(flat, products, shape);
  }

  // The cartesian product of the lists in `products`. Dim g of `flat` has list g.
  std::vector<Part> chosen(const Part& flat,
                           const std::vector<std::vector<views::Product>>& products,
                           const std::vector<int64_t>& shape) {
    struct Choice {
      uint32_t made;
      std::vector<int64_t> counts;
      std::vector<Set> sets;
    };
    std::vector<Choice> choices = {{flat.made, flat.shape(), {}}};
    for (size_t g = 0; g < products.size(); ++g) {
      std::vector<Choice> next;
      for (const Choice& before : choices) {
        for (const views::Product& product : products[g]) {
          Choice choice = before;
          choice.made = select(before.made, before.counts, g, product.positions);
          choice.counts[g] = views::count_of(product.positions);
          choice.sets.insert(choice.sets.end(), product.sets.begin(), product.sets.end());
          next.push_back(std::move(choice));
        }
      }
      choices = std::move(next);
    }
    std::vector<Part> parts;
    for (Choice& choice : choices) {
      Part part;
      for (size_t d = 0; d < shape.size(); ++d) {
        part.view.push_back({shape[d], std::move(choice.sets[d])});
      }
      part.made = reshaped(choice.made, choice.counts, part.shape());
      parts.push_back(std::move(part));
    }
    return parts;
  }

  // Passes a part of node `id` on to the node's inputs.
  void give(uint32_t id, const Part& part) {
    const Node& node = recipe_.nodes[id];
    if (numel_of(node.shape) == 0) return give_empty(id, part.made);
    switch (node.op) {
      case Op::stored: parts_[node.from].push_back({part, dtype_}); return;
      case Op::init:
      case Op::caller: return;
      case Op::reshape: return give(node.in[0], part);
      default:
        for (const Part& p : viewed(part, node.shape)) give_through(node, p);
    }
  }

  // Uses `made`, which has no elements, for every empty stored tensor under the node.
  void give_empty(uint32_t id, uint32_t made) {
    const Node& node = recipe_.nodes[id];
    if (numel_of(node.shape) != 0) return;
    if (node.op == Op::stored) parts_[node.from].push_back({{made, {}}, dtype_});
    for (const uint32_t input : node.in) give_empty(input, made);
  }

  void give_through(const Node& node, const Part& part) {
    switch (node.op) {
      case Op::cat: return give_cat(node, part);
      case Op::stack: return give_stack(node, part);
      case Op::slice: {
        Part of_input = part;
        ViewDim& dim = of_input.view[at(node.dim)];
        dim = {recipe_.nodes[node.in[0]].shape[at(node.dim)], views::shifted(dim.set, node.arg[0])};
        return give(node.in[0], of_input);
      }
      case Op::permute: return give_permute(node, part);
      case Op::gather: return give_gather(node, part);
      default: MODICUM_ASSERT(false);
    }
  }

  void give_cat(const Node& node, const Part& part) {
    const size_t d = at(node.dim);
    int64_t begin = 0;
    for (const uint32_t input : node.in) {
      const int64_t size = recipe_.nodes[input].shape[d];
      const Set here = views::within(part.view[d].set, begin, begin + size);
      if (size == 0) give_empty(input, builder_.slice(node.dim, 0, 0, part.made));
      if (!here.empty()) {
        Part of_input = part;
        of_input.made =
            select(part.made, part.shape(), d, views::positions(here, part.view[d].set));
        of_input.view[d] = {size, views::shifted(here, -begin)};
        give(input, of_input);
      }
      begin += size;
    }
  }

  void give_stack(const Node& node, const Part& part) {
    const size_t d = at(node.dim);
    int64_t place = 0;
    for (const int64_t index : views::listed(part.view[d].set)) {
      Part of_input = part;
      of_input.view.erase(of_input.view.begin() + node.dim);
      const uint32_t one = select(part.made, part.shape(), d, {{place, place + 1}});
      of_input.made = builder_.reshape(of_input.shape(), one);
      give(node.in[at(index)], of_input);
      ++place;
    }
  }

  void give_permute(const Node& node, const Part& part) {
    Part of_input = part;
    std::vector<int64_t> dims(node.arg.size());
    for (size_t k = 0; k < dims.size(); ++k) {
      dims[at(node.arg[k])] = static_cast<int64_t>(k);
      of_input.view[at(node.arg[k])] = part.view[k];
    }
    of_input.made = builder_.permute(std::move(dims), part.made);
    give(node.in[0], of_input);
  }

  // If an index is gathered several times, the first copy is used.
  void give_gather(const Node& node, const Part& part) {
    const size_t d = at(node.dim);
    std::vector<std::pair<int64_t, int64_t>> found;  // index in the input, place in the part
    for (const int64_t k : views::listed(part.view[d].set)) {
      found.emplace_back(node.arg[at(k)], static_cast<int64_t>(found.size()));
    }
    std::sort(found.begin(), found.end());
    Set set;
    std::vector<int64_t> places;
    for (const auto& [index, place] : found) {
      if (!set.empty() && set.back().hi > index) continue;
      append(set, index, index + 1);
      places.push_back(place);
    }
    Part of_input = part;
    of_input.view[d] = {recipe_.nodes[node.in[0]].shape[d], std::move(set)};
    of_input.made = in_order(part.made, part.shape()[d], node.dim, std::move(places));
    give(node.in[0], of_input);
  }

  // Adds a node with the elements of `made` at indices `places` along `dim`, in this order. `made`
  // has `size` indices along `dim`.
  uint32_t in_order(uint32_t made, int64_t size, int dim, std::vector<int64_t> places) {
    const auto n = static_cast<int64_t>(places.size());
    bool neighbours = true;
    for (size_t i = 1; i < places.size(); ++i) neighbours &= places[i] == places[i - 1] + 1;
    if (!neighbours) return builder_.gather(dim, std::move(places), made);
    return n == size ? made : builder_.slice(dim, places[0], places[0] + n, made);
  }

  uint32_t put_together(uint32_t tensor);
  uint32_t tiled(std::vector<Part> parts, size_t dim);
  [[noreturn]] static void lost() {
    fail(Category::unsupported,
         "a stored tensor can't be restored: the targets do not hold all of its elements");
  }

  const Recipe& recipe_;
  const Manifest& stored_;
  RecipeBuilder builder_;
  std::vector<std::vector<Given>> parts_;  // by stored tensor
  std::vector<bool> walked_;               // by target: whether builder_.stored was called for it
  DType dtype_ = DType::f32;               // of the current target
};

uint32_t Inversion::put_together(uint32_t tensor) {
  const std::vector<int64_t>& shape = stored_.tensors[tensor].spec.shape;
  const std::vector<Given>& given = parts_[tensor];
  if (given.empty()) lost();
  if (numel_of(shape) == 0) {
    const uint32_t made = given[0].part.made;
    return reshaped(made, builder_.node(made).shape, shape);
  }
  for (const Given& whole : given) {
    if (whole.part.is_whole()) return reshaped(whole.part.made, whole.part.shape(), shape);
  }
  std::vector<Part> parts;
  for (const Given& g : given) {
    if (g.dtype != given[0].dtype) {
      fail(Category::unsupported,
           "a stored tensor can't be restored: its parts are loaded in different dtypes");
    }
    parts.push_back(g.part);
  }
  const std::vector<int64_t> view = views::common_view(parts, numel_of(shape));
  std::vector<Part> over_view;
  for (const Part& part : parts) {
    for (Part& p : viewed(part, view)) over_view.push_back(std::move(p));
  }
  return reshaped(tiled(std::move(over_view), 0), view, shape);
}

// Joins parts that have the same indices along the dims before `dim`. The returned node has all
// indices along `dim` and the dims after it. Two parts of a [6, 4] tensor, joined along dim 0:
//
//   part 0    rows {[0,2) [4,6)}      cat of the atoms     rows 0 1 4 5 | 2 3
//   part 1    rows {[2,4)}            then a gather        rows 0 1 2 3 4 5
uint32_t Inversion::tiled(std::vector<Part> parts, size_t dim) {
  if (dim == parts[0].view.size()) return parts[0].made;
  std::vector<views::Atom> atoms;
  if (!views::find_atoms(parts, dim, atoms)) lost();
  std::vector<uint32_t> made;
  std::vector<int64_t> places(at(parts[0].view[dim].size));
  int64_t place = 0;
  bool sorted = true;
  for (const auto& [set, of] : atoms) {
    std::vector<Part> cut;
    for (const size_t p : of) {
      Part part = parts[p];
      part.made = select(part.made, part.shape(), dim, views::positions(set, part.view[dim].set));
      part.view[dim].set = set;
      cut.push_back(std::move(part));
    }
    made.push_back(tiled(std::move(cut), dim + 1));
    sorted = sorted && set.size() == 1;  // atoms of one interval each are joined in order
    for (const int64_t index : views::listed(set)) places[at(index)] = place++;
  }
  if (made.size() == 1) return made[0];
  const auto d = static_cast<int>(dim);
  const uint32_t joined = builder_.cat(d, std::move(made));
  return sorted ? joined : builder_.gather(d, std::move(places), joined);
}

}  // namespace

Manifest target_manifest(const Recipe& recipe) {
  Manifest manifest;
  manifest.tensors.reserve(recipe.targets.size());
  for (const Target& target : recipe.targets) manifest.tensors.push_back({target.spec, {}});
  return manifest;
}

Recipe inverse_recipe(const Recipe& recipe, const Manifest& manifest) {
  const Manifest targets = target_manifest(recipe);
  return Inversion(recipe, manifest, targets).run();
}

std::vector<uint32_t> lossy_targets(const Recipe& recipe) {
  std::vector<uint32_t> lossy;
  for (uint32_t t = 0; t < recipe.targets.size(); ++t) {
    const Target& target = recipe.targets[t];
    if (recipe.is_alias(t)) continue;
    const DType from = recipe.nodes[target.root].dtype;
    if (from != target.spec.dtype && target.spec.dtype != DType::f32) lossy.push_back(t);
  }
  return lossy;
}

}  // namespace modicum
