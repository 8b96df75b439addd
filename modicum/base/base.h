// The public header of `base`: errors, size arithmetic without overflow, callback references,
// clocks, worker threads, the disposition of SIGCHLD.
#pragma once

#include "modicum/base/child_signal.h"  // IWYU pragma: export
#include "modicum/base/clock.h"         // IWYU pragma: export
#include "modicum/base/error.h"         // IWYU pragma: export
#include "modicum/base/function_ref.h"  // IWYU pragma: export
#include "modicum/base/sizes.h"         // IWYU pragma: export
#include "modicum/base/workers.h"       // IWYU pragma: export
