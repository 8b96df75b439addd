// Public header of `ranks`: local rank processes, their supervisor, and the interfaces between
// ranks.
#pragma once

#include "modicum/ranks/board.h"         // IWYU pragma: export
#include "modicum/ranks/exchange.h"      // IWYU pragma: export
#include "modicum/ranks/gather.h"        // IWYU pragma: export
#include "modicum/ranks/own_report.h"    // IWYU pragma: export
#include "modicum/ranks/stop_signals.h"  // IWYU pragma: export
#include "modicum/ranks/supervisor.h"    // IWYU pragma: export
