// Reads a running program from outside: how its children were started, the memory that forked
// children share with it, the heaps of malloc. `root` is a prefix of every path.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace modicum {

enum class StartMethod : uint8_t {
  fork,        // shares the parent's pages
  spawn,       // multiprocessing's "spawn": a new interpreter
  forkserver,  // multiprocessing's "forkserver": a fork of an almost empty process
  helper,      // multiprocessing's fork server or resource tracker
  exec         // any other program
};
std::string_view start_method_name(StartMethod method) noexcept;

// A descendant of the program.
struct ChildProcess {
  int pid = 0;
  int parent = 0;
  StartMethod method = StartMethod::exec;
  // Private bytes that it shares with the first process of its chain of forks, the one that ran
  // exec: the next write by either copies a page. 0 for other methods than fork and forkserver.
  uint64_t shared_bytes = 0;
};

// Heaps of glibc's malloc. Their resident bytes are in use or retained: free(3) returns a block to
// its heap, and only the free end of a heap goes back to the kernel.
struct MallocHeaps {
  // The heap that brk(2) grows ("[heap]").
  uint64_t main_resident_bytes = 0;
  // Arenas of other threads consist of heaps, each of 64 MiB of addresses.
  uint64_t arena_heaps = 0;
  uint64_t arena_resident_bytes = 0;
};

struct Program {
  int pid = 0;
  std::string name;
  std::vector<ChildProcess> children;  // all descendants, ascending by pid
  // Sums of RangeMemory::shared_bytes and copied_bytes over all processes of the tree that have
  // forked: pages that a write would copy, and pages that were copied already.
  uint64_t exposed_bytes = 0;
  uint64_t copied_bytes = 0;
  MallocHeaps heaps;
  std::optional<uint64_t> arena_max;  // MALLOC_ARENA_MAX, or glibc.malloc.arena_max of its tunables
  std::string allocator;              // "jemalloc", "tcmalloc", "mimalloc"; empty: glibc's
  bool uses_cuda = false;             // maps libcuda
  // PYTORCH_ALLOC_CONF, or its older name PYTORCH_CUDA_ALLOC_CONF.
  std::string torch_allocator_options;
  uint64_t swapped_bytes = 0;
  uint64_t locked_bytes = 0;  // by mlock, and pages pinned for devices that the kernel accounts
  uint64_t mappings = 0;
  uint64_t open_files = 0;
};

// Throws IO with the pid if there is no such process, it has ended, or its /proc can't be read
// (another user's process). Takes about 0.1 s per GiB of the processes that have forked.
Program read_program(int pid, const std::string& root = "");

}  // namespace modicum
