#include "modicum/memory/retained_heap.h"

#include <dlfcn.h>
#include <cstddef>

namespace modicum {
namespace {

// struct mallinfo2 of glibc 2.33, which the headers of an older glibc lack.
struct HeapInfo {
  size_t arena, ordblks, smblks, hblks, hblkhd, usmblks, fsmblks, uordblks, fordblks, keepcost;
};
using AskHeap = HeapInfo (*)();

}  // namespace

uint64_t retained_heap_bytes() noexcept {
  static const auto ask = reinterpret_cast<AskHeap>(dlsym(RTLD_DEFAULT, "mallinfo2"));
  return ask == nullptr ? 0 : ask().fordblks;
}

}  // namespace modicum
