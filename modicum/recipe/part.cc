// The part of a recipe for some of its targets.
#include <utility>

#include "modicum/recipe/recipe.h"

namespace modicum {

Recipe part_of(const Recipe& recipe, std::span<const uint32_t> targets, size_t stored_tensors) {
  std::vector<bool> needed(recipe.nodes.size());
  std::vector<uint32_t> place(recipe.targets.size(), UINT32_MAX);  // a target's index in the part
  Recipe part;
  for (const uint32_t t : targets) {
    place[t] = static_cast<uint32_t>(part.targets.size());
    part.targets.push_back(recipe.targets[t]);
    needed[recipe.targets[t].root] = true;
  }
  // Inputs come before the nodes that use them.
  for (size_t id = needed.size(); id-- > 0;) {
    if (!needed[id]) continue;
    for (const uint32_t input : recipe.nodes[id].in) needed[input] = true;
  }
  std::vector<uint32_t> now(recipe.nodes.size());  // a node's index in the part
  std::vector<bool> used(stored_tensors);
  std::vector<bool> listed(stored_tensors);  // named by `recipe`; implied scales are not
  for (const uint32_t s : recipe.unused) listed[s] = true;
  for (size_t id = 0; id < needed.size(); ++id) {
    if (recipe.nodes[id].op == Op::stored) listed[recipe.nodes[id].from] = true;
    if (!needed[id]) continue;
    now[id] = static_cast<uint32_t>(part.nodes.size());
    Node& node = part.nodes.emplace_back(recipe.nodes[id]);
    for (uint32_t& input : node.in) input = now[input];
    if (node.op == Op::stored) used[node.from] = true;
    if (node.op == Op::alias) {
      node.from = place[node.from];
      MODICUM_ASSERT(node.from != UINT32_MAX);
    }
  }
  for (Target& target : part.targets) target.root = now[target.root];
  for (uint32_t s = 0; s < stored_tensors; ++s) {
    if (listed[s] && !used[s]) part.unused.push_back(s);
  }
  return part;
}

}  // namespace modicum
