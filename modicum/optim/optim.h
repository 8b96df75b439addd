// The door of `optim`: AdamW over the shards of a rank, its state in a declared format, every byte
// of it taken when it is made.
//
// One step of a rank: gradients arrive (in any order, in pieces), `norm` says what this rank's part
// of the global norm is, the caller adds up one double and one flag over the ranks, and then
// either `step` (unscale, clip, update and cast in one pass over memory) or `skip`.
#pragma once

#include "modicum/optim/adamw.h"   // IWYU pragma: export
#include "modicum/optim/norm.h"    // IWYU pragma: export
#include "modicum/optim/shards.h"  // IWYU pragma: export
