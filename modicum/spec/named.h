// Names that a user chooses among.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace modicum {

// The index of `name` in `names`. Otherwise USAGE: "unknown WHAT 'NAME'" with the nearest name, and
// all of them as what was expected.
size_t index_named(std::string_view what, std::string_view name,
                   const std::vector<std::string>& names);

// The same for the rows of a table that have a `name`.
template <typename Table>
const auto& row_named(std::string_view what, std::string_view name, const Table& table) {
  std::vector<std::string> names;
  for (const auto& row : table) names.emplace_back(row.name);
  return table[index_named(what, name, names)];
}

}  // namespace modicum
