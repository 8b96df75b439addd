// The freed memory that malloc keeps. Part of the public header of `memory`.
#pragma once

#include <cstdint>

namespace modicum {

// Bytes of the free blocks in all arenas of glibc's malloc, which keeps them for later allocations.
// They need not all be resident. Returns 0 with another malloc and with glibc before 2.33. Walks
// the lists of free blocks under malloc's locks, which takes 10 to 100 us.
uint64_t retained_heap_bytes() noexcept;

}  // namespace modicum
