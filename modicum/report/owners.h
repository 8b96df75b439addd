// Readable names of the owners of memory, for the page and for texts. Internal to `report`.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace modicum {

struct OwnerWords {
  std::string_view owner;  // its key in JSON documents
  std::string_view words;
};
// In the order in which the page stacks them.
std::span<const OwnerWords> owners_in_words() noexcept;
// "parameters" for "shards". For an owner that is not in the table, its key with spaces.
std::string owner_words(std::string_view owner);

}  // namespace modicum
