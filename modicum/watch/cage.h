// The memory cgroup that gives a watched command its limit. Internal to `watch`.
#pragma once

#include <string>

#include "modicum/io/io.h"
#include "modicum/probe/probe.h"

namespace modicum {

// Makes a cgroup with a limit as a child of this process's cgroup. A v2 cgroup that has processes
// can't have children with a limit. The new cgroup is then made next to this process's cgroup, but
// only if this process's cgroup has no limit, since the command would escape that limit. If the
// kernel accounts for swap, the command can't exceed the limit by swapping. The destructor moves
// remaining processes to this process's cgroup and removes the new one.
class MemoryCage {
 public:
  // Throws IO with the reason if the cgroup can't be made. `root`: as in probe/probe.h.
  MemoryCage(FileSystem& files, uint64_t limit_bytes, std::string root = "");
  ~MemoryCage();
  MemoryCage(const MemoryCage&) = delete;
  MemoryCage& operator=(const MemoryCage&) = delete;

  const MemoryCgroup& group() const noexcept { return group_; }
  // The last part of the cgroup's path, with the slash.
  std::string name() const { return group_.directory.substr(group_.directory.rfind('/')); }
  // The file to which a process writes a pid to move it into the cgroup.
  std::string entry() const { return group_.directory + "/cgroup.procs"; }

 private:
  void make_below(const MemoryCgroup& parent, const std::string& name);
  void write_limit(uint64_t limit_bytes);

  FileSystem& files_;
  const std::string root_;
  MemoryCgroup origin_, group_;
};

}  // namespace modicum
