// How forked children see a mapping of Modicum.
#pragma once

#include <cstdint>
#include <string_view>

namespace modicum {

enum class Fork : uint8_t {
  excluded,   // not at all: the range is reserved and can't be accessed
  shared,     // the same pages: writes of either side are visible to the other
  inherited,  // copy-on-write, as memory is inherited by default
};

Fork fork_named(std::string_view name);  // throws USAGE as index_named does

}  // namespace modicum
