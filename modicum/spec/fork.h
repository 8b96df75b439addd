// What forked children find where a mapping of ours lies.
#pragma once

#include <cstdint>
#include <string_view>

namespace modicum {

enum class Fork : uint8_t {
  excluded,   // nothing: the range stays reserved and can't be accessed
  shared,     // the same pages: children see every later write, and theirs are seen
  inherited,  // the pages as they were at the fork; either side copies what it writes
};

Fork fork_named(std::string_view name);  // USAGE with the choices and the nearest name

}  // namespace modicum
