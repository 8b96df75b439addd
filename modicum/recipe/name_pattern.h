// Names by a regular expression: what users of every front choose tensors with.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "modicum/base/base.h"

namespace re2 {
class RE2;
}

namespace modicum {

// RE2's syntax over UTF-8: no look-around and no back-references, and in return a search takes time
// in proportion to the name, whatever the expression. Any thread may use one.
class NamePattern {
 public:
  // USAGE, with `flag`, the expression and RE2's reason, where it is none. `flag` is what the user
  // gave it to: "--keep-fp32".
  NamePattern(std::string_view flag, std::string_view expression);
  NamePattern(NamePattern&&) noexcept;
  NamePattern& operator=(NamePattern&&) noexcept;
  ~NamePattern();

  // Whether it matches somewhere in `name`; `^` and `$` bind it to the ends.
  bool finds(std::string_view name) const;

 private:
  std::unique_ptr<const re2::RE2> expression_;
};

}  // namespace modicum
