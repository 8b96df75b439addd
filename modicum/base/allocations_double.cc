#include "modicum/base/allocations_double.h"

#include <cstdlib>
#include <new>

namespace modicum {

std::atomic<size_t> largest_allocation{0};

}  // namespace modicum

void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  if (bytes > modicum::largest_allocation) modicum::largest_allocation = bytes;
  return std::malloc(bytes > 0 ? bytes : 1);
}
void* operator new(size_t bytes) {
  if (void* const allocation = operator new(bytes, std::nothrow)) return allocation;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
