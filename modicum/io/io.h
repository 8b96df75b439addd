// The public header of `io`: files and /proc. C++ code accesses model and checkpoint files only
// through this room.
#pragma once

#include "modicum/io/blocked_call.h"   // IWYU pragma: export
#include "modicum/io/file.h"           // IWYU pragma: export
#include "modicum/io/output_stream.h"  // IWYU pragma: export
#include "modicum/io/read_text.h"      // IWYU pragma: export
#include "modicum/io/shared_pages.h"   // IWYU pragma: export
