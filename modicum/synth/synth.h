// The public header of `synth`: generated checkpoints with the names, shapes and config.json of
// real models. Every value is a function of the tensor's name and the element's index.
#pragma once

#include "modicum/synth/arch.h"   // IWYU pragma: export
#include "modicum/synth/mark.h"   // IWYU pragma: export
#include "modicum/synth/write.h"  // IWYU pragma: export
