// The one place where an errno becomes an Error.
#pragma once

#include <string_view>

#include "modicum/base/base.h"

namespace modicum {

// No space and no quota are NOSPACE, all else is IO: "cannot open: ENOENT (No such file ...)".
// Callers that know better (EEXIST as CONFLICT) look at the errno before they call this.
[[noreturn]] void fail_errno(int error, std::string_view what_failed, Facts facts = {});

}  // namespace modicum
