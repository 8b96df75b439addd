#include "modicum/spec/fork.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

#include "modicum/base/base.h"

namespace modicum {

Fork fork_named(std::string_view name) {
  static const std::vector<std::string> names = {"excluded", "shared", "inherited"};
  const auto at = std::find(names.begin(), names.end(), name);
  if (at != names.end()) return static_cast<Fork>(at - names.begin());
  fail(Category::usage,
       fmt::format("unknown fork '{}'{}", printable(name), nearest_hint(name, names)),
       {.expected = "excluded, shared or inherited", .got = printable(name)});
}

}  // namespace modicum
