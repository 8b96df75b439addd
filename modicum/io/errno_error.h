// Turns an errno into an Error.
#pragma once

#include <string>
#include <string_view>

#include "modicum/base/base.h"
#include "modicum/io/file.h"

namespace modicum {

// Throws NOSPACE for ENOSPC and EDQUOT, and IO for every other errno, with a message such as
// "cannot open: ENOENT (No such file or directory)". Callers that need another category, such as
// CONFLICT for EEXIST, check errno first.
[[noreturn]] void fail_errno(int error, std::string_view what_failed, Facts facts = {});

// Such as "ENOENT (No such file or directory)".
std::string errno_text(int error);

// The facts of an error about this path.
inline Facts about(const std::string& path) { return {.file = base_name(path)}; }

}  // namespace modicum
