// The part of a recipe for some of its targets.
#include <utility>

#include "modicum/recipe/recipe.h"

namespace modicum {

Recipe part_of(const Recipe& recipe, std::span<const uint32_t> targets, size_t stored_tensors) {
  std::vector<bool> needed(recipe.nodes.size());
  // The index of a target in the part.
  std::vector<uint32_t> place_of_target(recipe.targets.size(), UINT32_MAX);
  Recipe part;
  for (const uint32_t t : targets) {
    place_of_target[t] = static_cast<uint32_t>(part.targets.size());
    part.targets.push_back(recipe.targets[t]);
    needed[recipe.targets[t].root] = true;
  }
  // Inputs come before the nodes that use them.
  for (size_t id = needed.size(); id-- > 0;) {
    if (!needed[id]) continue;
    for (const uint32_t input : recipe.nodes[id].in) needed[input] = true;
  }
  std::vector<uint32_t> place_of_node(recipe.nodes.size());  // its index in the part
  std::vector<bool> used(stored_tensors);
  // Has a node or is unused. Scales of FP8 codes are neither: they are used with the codes.
  std::vector<bool> named(stored_tensors);
  for (const uint32_t s : recipe.unused) named[s] = true;
  for (size_t id = 0; id < needed.size(); ++id) {
    if (recipe.nodes[id].op == Op::stored) named[recipe.nodes[id].from] = true;
    if (!needed[id]) continue;
    place_of_node[id] = static_cast<uint32_t>(part.nodes.size());
    Node& node = part.nodes.emplace_back(recipe.nodes[id]);
    for (uint32_t& input : node.in) input = place_of_node[input];
    if (node.op == Op::stored) used[node.from] = true;
    if (node.op == Op::alias) {
      node.from = place_of_target[node.from];
      MODICUM_ASSERT(node.from != UINT32_MAX);
    }
  }
  for (Target& target : part.targets) target.root = place_of_node[target.root];
  for (uint32_t s = 0; s < stored_tensors; ++s) {
    if (named[s] && !used[s]) part.unused.push_back(s);
  }
  return part;
}

}  // namespace modicum
