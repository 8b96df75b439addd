// The error of a call, for tests.
#pragma once

#include <optional>

#include "modicum/base/base.h"

namespace modicum {

// The error that `call` throws; empty if it throws none.
inline std::optional<Error> error_of(FunctionRef<void()> call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

}  // namespace modicum
