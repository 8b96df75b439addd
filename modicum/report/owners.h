// The owners of memory in words: one table for the page and for every text. Internal to `report`.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace modicum {

struct OwnerWords {
  std::string_view owner;  // its key in documents
  std::string_view words;
};
// In the order in which the page stacks them.
std::span<const OwnerWords> owners_in_words() noexcept;
// "parameters" for "shards". Of an owner that is not in the table: its key, with spaces.
std::string owner_words(std::string_view owner);

}  // namespace modicum
