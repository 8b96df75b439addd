// The door of `base`: how we fail, add sizes without overflow, lend callbacks, measure time, run
// workers.
#pragma once

#include "modicum/base/clock.h"         // IWYU pragma: export
#include "modicum/base/error.h"         // IWYU pragma: export
#include "modicum/base/function_ref.h"  // IWYU pragma: export
#include "modicum/base/sizes.h"         // IWYU pragma: export
#include "modicum/base/workers.h"       // IWYU pragma: export
