// Turns an errno into an Error: the only place that does.
#pragma once

#include <string_view>

#include "modicum/base/base.h"

namespace modicum {

// ENOSPC and EDQUOT are NOSPACE, all others IO: "cannot open: ENOENT (No such file ...)". Callers
// that need another category, such as CONFLICT for EEXIST, check errno first.
[[noreturn]] void fail_errno(int error, std::string_view what_failed, Facts facts = {});

}  // namespace modicum
