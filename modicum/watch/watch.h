// The public header of `watch`: runs a command and measures its whole process tree from outside.
#pragma once

#include "modicum/watch/command.h"  // IWYU pragma: export
#include "modicum/watch/record.h"   // IWYU pragma: export
