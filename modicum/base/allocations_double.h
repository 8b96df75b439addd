// For tests of limits of memory: remembers the largest allocation of the program.
#pragma once

#include <atomic>
#include <cstddef>

namespace modicum {

// The bytes of the largest call of operator new since the variable was last set to 0. A test
// program that names it gets an operator new of its own.
extern std::atomic<size_t> largest_allocation;

}  // namespace modicum
