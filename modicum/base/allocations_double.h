// For tests of memory limits: remembers the largest allocation of the program.
#pragma once

#include <atomic>
#include <cstddef>

namespace modicum {

// The largest size that was passed to operator new since the variable was last set to 0. A program
// that refers to it has its global operator new replaced.
extern std::atomic<size_t> largest_allocation;

}  // namespace modicum
