#include "modicum/spec/named.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "modicum/base/base.h"

namespace modicum {

size_t index_named(std::string_view what, std::string_view name,
                   const std::vector<std::string>& names) {
  const auto at = std::find(names.begin(), names.end(), name);
  if (at != names.end()) return static_cast<size_t>(at - names.begin());
  fail(Category::usage,
       fmt::format("unknown {} '{}'{}", what, printable(name), nearest_hint(name, names)),
       {.expected =
            fmt::format("{} or {}", fmt::join(names.begin(), names.end() - 1, ", "), names.back()),
        .got = printable(name)});
}

}  // namespace modicum
