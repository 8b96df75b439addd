// The door of `ranks`: local ranks, their supervisor, and what passes between them.
#pragma once

#include "modicum/ranks/board.h"         // IWYU pragma: export
#include "modicum/ranks/exchange.h"      // IWYU pragma: export
#include "modicum/ranks/stop_signals.h"  // IWYU pragma: export
#include "modicum/ranks/supervisor.h"    // IWYU pragma: export
