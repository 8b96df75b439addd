// Regular expressions over tensor names: the REGEX of every flag and Python argument.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "modicum/base/base.h"

namespace re2 {
class RE2;
}

namespace modicum {

// A regular expression in RE2's syntax over UTF-8. There is no lookahead, lookbehind or
// back-reference, so every search takes time proportional to the length of the name. Any number of
// threads may share one.
class NamePattern {
 public:
  // `flag` is the flag or argument that `expression` comes from, such as "--keep-fp32". Throws
  // USAGE for an invalid expression, with `flag`, the expression and RE2's reason.
  NamePattern(std::string_view flag, std::string_view expression);
  NamePattern(NamePattern&&) noexcept;
  ~NamePattern();

  // Whether the expression matches anywhere in `name`; `^` and `$` anchor it to the ends.
  bool finds(std::string_view name) const;

 private:
  std::unique_ptr<const re2::RE2> expression_;
};

}  // namespace modicum
