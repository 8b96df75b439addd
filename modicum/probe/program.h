// Examines a running program from outside: how its children were started, the memory that forked
// children share with it, the heaps of malloc. `root` is a prefix of every path that is read.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "modicum/probe/kinds.h"

namespace modicum {

enum class StartMethod : uint8_t {
  fork,        // os.fork(), or multiprocessing's "fork": shares the parent's pages
  spawn,       // multiprocessing's "spawn": a new interpreter
  forkserver,  // multiprocessing's "forkserver": a fork of an almost empty process
  helper,      // multiprocessing's own processes: the fork server or the resource tracker
  exec         // any other program
};
std::string_view start_method_name(StartMethod method) noexcept;

// A descendant of the program.
struct ChildProcess {
  int pid = 0;
  int parent = 0;
  StartMethod method = StartMethod::exec;
  // Private bytes that it shares with the first process of its chain of forks: the process that ran
  // exec, or the examined program if that was itself forked. The next write by either of the two
  // copies a page. 0 unless the method is fork or forkserver.
  uint64_t shared_bytes = 0;
};

struct Program {
  int pid = 0;
  std::string name;
  // The descendants, ascending by pid, without zombies and processes of other users.
  std::vector<ChildProcess> children;
  // RangeMemory::shared_bytes and copied_bytes, each summed over the first process of each chain of
  // forks in the tree: pages that a write would copy, and pages that were copied already.
  uint64_t exposed_bytes = 0;
  uint64_t copied_bytes = 0;
  // Heaps of glibc's malloc are used or retained: free(3) returns a block to its heap, and gives
  // only the free end of a heap back to the kernel. malloc_trim(3) also gives back free pages in
  // the middle.
  MemoryKinds kinds;
  uint64_t arena_heaps = 0;  // the number of heaps of threads
  // MALLOC_ARENA_MAX, or glibc.malloc.arena_max in GLIBC_TUNABLES.
  std::optional<uint64_t> arena_max;
  // "jemalloc", "tcmalloc" or "mimalloc" if that library is mapped, else empty.
  std::string allocator;
  bool uses_cuda = false;  // maps libcuda
  // PYTORCH_ALLOC_CONF, or its older name PYTORCH_CUDA_ALLOC_CONF.
  std::string torch_allocator_options;
  uint64_t swapped_bytes = 0;
  // VmLck + VmPin: pages locked by mlock(2), or pinned for devices as far as the kernel accounts
  // them.
  uint64_t locked_bytes = 0;
  uint64_t mappings = 0;
  uint64_t open_files = 0;
};

// Throws IO with the pid if there is no such process, it has ended, or its /proc can't be read
// (another user's process). Takes about 0.1 s per GiB of the processes that have forked.
Program read_program(int pid, const std::string& root = "");

}  // namespace modicum
