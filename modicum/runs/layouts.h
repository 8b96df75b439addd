// From flags to a layout. Internal to `runs`.
#pragma once

#include "modicum/layout/layout.h"
#include "modicum/recipe/recipe.h"
#include "modicum/runs/runs.h"

namespace modicum {

// USAGE for what makes no sense; with no targets it is a check of the flags alone.
Layout layout_of(const RunFlags& flags, Targets targets);
// The targets of a recipe by their numbers, null for aliases.
std::vector<const TensorSpec*> targets_of(const Recipe& recipe);

}  // namespace modicum
