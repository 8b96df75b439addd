// The door of `synth`: checkpoints made up of nothing, with the names, shapes and config.json of
// real models and values that anybody can compute again.
#pragma once

#include "modicum/synth/arch.h"   // IWYU pragma: export
#include "modicum/synth/mark.h"   // IWYU pragma: export
#include "modicum/synth/write.h"  // IWYU pragma: export
