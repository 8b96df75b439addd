// The public header of `optim`: AdamW over the shards of a rank, with a chosen state format.
// adamw.h shows the calls of one iteration.
#pragma once

#include "modicum/optim/adamw.h"   // IWYU pragma: export
#include "modicum/optim/norm.h"    // IWYU pragma: export
#include "modicum/optim/shards.h"  // IWYU pragma: export
