#include "modicum/spec/fork.h"

#include "modicum/spec/named.h"

namespace modicum {

Fork fork_named(std::string_view name) {
  return static_cast<Fork>(index_named("fork", name, {"excluded", "shared", "inherited"}));
}

}  // namespace modicum
