// Looks up names that a user chooses from a list.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace modicum {

// Returns the index of `name` in `names`. Throws USAGE "unknown WHAT 'NAME'; nearest is 'X'" if it
// is missing, with all names as the expected ones.
size_t index_named(std::string_view what, std::string_view name,
                   const std::vector<std::string>& names);

// Returns the row of `table` whose member `name` equals `name`; throws as index_named.
template <typename Table>
const auto& row_named(std::string_view what, std::string_view name, const Table& table) {
  std::vector<std::string> names;
  for (const auto& row : table) names.emplace_back(row.name);
  return table[index_named(what, name, names)];
}

}  // namespace modicum
