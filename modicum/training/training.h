// The door of `training`: the life of a rank that loads and trains.
#pragma once

#include "modicum/training/gradients.h"  // IWYU pragma: export
#include "modicum/training/optimizer.h"  // IWYU pragma: export
#include "modicum/training/step.h"       // IWYU pragma: export
