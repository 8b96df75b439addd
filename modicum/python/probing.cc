// The memory of this process and its children, as the kernel reports it.
#include <nanobind/stl/pair.h>
#include <unistd.h>

#include <utility>
#include <vector>

#include "modicum/base/base.h"
#include "modicum/probe/probe.h"
#include "modicum/python/bindings.h"

namespace modicum::python {
namespace {

nb::dict process_memory(int pid) {
  const ProcessMemory memory = without_the_lock([&] { return read_process_memory(pid); });
  return dict_of("held_bytes"_a = memory.held_bytes(), "peak_bytes"_a = memory.peak_held());
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
  nb::list range_list;
  for (const RangeMemory& range : tree.ranges) range_list.append(as_pair(range));
  return dict_of("processes"_a = processes, "ranges"_a = range_list, "rest"_a = as_pair(tree.rest));
}

nb::dict memory_kinds() {
  const auto read = without_the_lock([] { return read_memory_kinds(static_cast<int>(getpid())); });
  nb::dict kinds;
  if (!read) return kinds;
  for (size_t at = 0; at < kMemoryKinds; ++at) {
    const std::string_view name = memory_kind_name(static_cast<MemoryKind>(at));
    kinds[nb::str(name.data(), name.size())] = read->bytes[at];
  }
  return kinds;
}

}  // namespace

void define_probe(nb::module_& module) {
  module.def("process_memory", process_memory, "pid"_a = 0,
             "held_bytes and peak_bytes (since reset_peak) of a process. `pid` 0: this process.");
  module.def("reset_peak", reset_peak_rss, "Resets peak_bytes; False if the kernel refuses.");
  module.def(
      "available_memory",
      [] {
        const auto limits = memory_limits();
        if (limits.empty())
          fail(Category::usage, "no memory limit was found in /proc or in a cgroup");
        return nb::make_tuple(limits.front().available_bytes, limits.front().source);
      },
      "(bytes, source): the memory that the node and the cgroups of this process have "
      "left, and which of them has the least left.");
  module.def(
      "granted_cpus", [] { return granted_cpus(); },
      "The number of CPUs that this process may use, by its affinity and the quotas of "
      "its cgroups.");
  module.def(
      "descendants", [](int pid) { return descendants(pid); }, "pid"_a = 0,
      "The pids of all descendants of a process. `pid` 0: this process.");
  module.def("memory_kinds", memory_kinds,
             "The resident bytes of this process by kind; shared pages count in full. Empty where "
             "/proc/self/pagemap can't be read.");
  module.def("tree_memory", tree_memory, "ranges"_a, "pid"_a = 0,
             R"(The memory of a process and its descendants, by ranges of its addresses.

Args:
    ranges: (begin, end) addresses in the process, ascending, disjoint.
    pid: 0: this process.

Returns:
    A dict. `processes`: a dict per process, that of `pid` first, with pid, forked (whether it was
    forked from the first without an exec), anon_bytes, shmem_bytes (shared pages are divided among
    their users) and page_table_bytes. `ranges`: a pair per range: bytes in the process itself, and
    bytes of copy-on-write copies in its forked descendants. `rest`: the same pair for all other
    addresses.

Raises:
    IoError: /proc can't be read.)");
}

}  // namespace modicum::python
