// The door of `training`: the life of a rank that loads and trains.
//
// A load of one rank (RankLoad), its optimizer (RankOptimizer) with made-up gradients
// (MadeGradients), and steps together with the other ranks (LockStep); and what the command line
// does with them in rank processes: load_in_ranks, rehearse_in_ranks, step_in_ranks.
#pragma once

#include "modicum/training/gradients.h"       // IWYU pragma: export
#include "modicum/training/load_ranks.h"      // IWYU pragma: export
#include "modicum/training/lock_step.h"       // IWYU pragma: export
#include "modicum/training/optimizer.h"       // IWYU pragma: export
#include "modicum/training/rank_load.h"       // IWYU pragma: export
#include "modicum/training/rank_processes.h"  // IWYU pragma: export
#include "modicum/training/step.h"            // IWYU pragma: export
