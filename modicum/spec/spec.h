// The public header of `spec`: values that describe model state and its cost. No input or output.
#pragma once

#include "modicum/spec/box.h"           // IWYU pragma: export
#include "modicum/spec/digest.h"        // IWYU pragma: export
#include "modicum/spec/dtype.h"         // IWYU pragma: export
#include "modicum/spec/footprint.h"     // IWYU pragma: export
#include "modicum/spec/fork.h"          // IWYU pragma: export
#include "modicum/spec/named.h"         // IWYU pragma: export
#include "modicum/spec/powers.h"        // IWYU pragma: export
#include "modicum/spec/scale_grid.h"    // IWYU pragma: export
#include "modicum/spec/state_format.h"  // IWYU pragma: export
#include "modicum/spec/tensor.h"        // IWYU pragma: export
