// What malloc keeps of freed blocks. Part of the door of `memory`.
#pragma once

#include <cstdint>

namespace modicum {

// Bytes of the free blocks in all arenas of glibc's malloc, which keeps them for later blocks: at
// least those that are resident. 0 where malloc is another one, or glibc is older than 2.33. Walks
// the lists of free blocks under malloc's locks, which takes 10 to 100 us.
uint64_t retained_heap_bytes() noexcept;

}  // namespace modicum
