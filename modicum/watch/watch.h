// The door of `watch`: a command and its whole process tree, measured from outside.
#pragma once

#include "modicum/watch/command.h"  // IWYU pragma: export
#include "modicum/watch/record.h"   // IWYU pragma: export
