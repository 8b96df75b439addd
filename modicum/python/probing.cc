// What the kernel says of this process and its children.
#include <nanobind/stl/pair.h>

#include <utility>
#include <vector>

#include "modicum/base/base.h"
#include "modicum/probe/probe.h"
#include "modicum/python/bindings.h"

namespace modicum::python {
namespace {

nb::dict process_memory(int pid) {
  const ProcessMemory memory = without_the_lock([&] { return read_process_memory(pid); });
  return dict_of("held_bytes"_a = memory.held(), "peak_bytes"_a = memory.peak_held());
}

nb::tuple as_pair(const RangeMemory& memory) {
  return nb::make_tuple(memory.own_bytes, memory.copied_bytes);
}

nb::dict tree_memory(const std::vector<std::pair<uint64_t, uint64_t>>& ranges, int pid) {
  std::vector<AddressRange> asked;
  for (const auto& [begin, end] : ranges) asked.push_back({begin, end});
  const TreeMemory tree = without_the_lock([&] { return read_tree(pid, asked); });
  nb::list processes;
  for (const TreeMemory::Process& process : tree.processes) {
    processes.append(dict_of("pid"_a = process.pid, "forked"_a = process.is_forked,
                             "anon_bytes"_a = process.memory.pss_anon,
                             "shmem_bytes"_a = process.memory.pss_shmem,
                             "page_table_bytes"_a = process.memory.page_tables));
  }
  nb::list held;
  for (const RangeMemory& range : tree.ranges) held.append(as_pair(range));
  return dict_of("processes"_a = processes, "ranges"_a = held, "rest"_a = as_pair(tree.rest));
}

}  // namespace

void define_probe(nb::module_& module) {
  module.def(
      "process_memory", process_memory, "pid"_a = 0,
      "held_bytes and peak_bytes (since reset_peak) of a process, by the kernel; 0: this one.");
  module.def("reset_peak", reset_peak_rss, "Starts peak_bytes anew; False where the kernel won't.");
  module.def(
      "available_memory",
      [] {
        const auto limits = memory_limits();
        if (limits.empty()) fail(Category::usage, "the kernel does not say what is left");
        return nb::make_tuple(limits.front().available_bytes, limits.front().source);
      },
      "What the cgroup chain and the node leave, in bytes, and who says so.");
  module.def(
      "granted_cpus", [] { return granted_cpus(); },
      "CPUs that affinity and the cgroup chain's quota leave to this process.");
  module.def(
      "descendants", [](int pid) { return descendants(pid); }, "pid"_a = 0,
      "The processes that a process has started, and theirs; 0: this one.");
  module.def("tree_memory", tree_memory, "ranges"_a, "pid"_a = 0,
             R"(What a process and its descendants hold, and whose it is.

Args:
    ranges: (begin, end) addresses of the process, ascending, without overlap.
    pid: the process; 0: this one.

Returns:
    processes: by process, the first being `pid`: pid, forked (from the first one), anon_bytes,
    shmem_bytes (shared pages in equal parts), page_table_bytes. ranges: for each (own bytes, bytes
    that forked descendants hold in their place). rest: the same for the other addresses.

Raises:
    IoError: the kernel doesn't say.)");
}

}  // namespace modicum::python
