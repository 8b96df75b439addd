// The public header of `training`: ranks that load and train.
//
// The parts of a rank: its load (RankLoad), its optimizer (RankOptimizer) with synthetic gradients
// (MadeGradients), and its steps in lock step with the other ranks (LockStep). The commands of
// the program run these in rank processes: load_in_ranks, rehearse_in_ranks, save_in_ranks,
// resume_in_ranks, step_in_ranks, convert_in_rank.
#pragma once

#include "modicum/training/checkpoint_save.h"  // IWYU pragma: export
#include "modicum/training/convert.h"          // IWYU pragma: export
#include "modicum/training/gradients.h"        // IWYU pragma: export
#include "modicum/training/job.h"              // IWYU pragma: export
#include "modicum/training/load_ranks.h"       // IWYU pragma: export
#include "modicum/training/lock_step.h"        // IWYU pragma: export
#include "modicum/training/optimizer.h"        // IWYU pragma: export
#include "modicum/training/rank_load.h"        // IWYU pragma: export
#include "modicum/training/rank_processes.h"   // IWYU pragma: export
#include "modicum/training/save_parts.h"       // IWYU pragma: export
#include "modicum/training/save_ranks.h"       // IWYU pragma: export
#include "modicum/training/state_files.h"      // IWYU pragma: export
#include "modicum/training/state_load.h"       // IWYU pragma: export
#include "modicum/training/step.h"             // IWYU pragma: export
