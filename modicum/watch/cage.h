// A memory cgroup of its own for the watched command. Internal to `watch`.
#pragma once

#include <string>

#include "modicum/io/io.h"
#include "modicum/probe/probe.h"

namespace modicum {

// A cgroup below this process's own one. In v2 a cgroup with processes can't have children with a
// limit; then it is made next to the own one, if that has no limit that would be lost. Swap is not
// allowed in addition to the limit. The destructor moves processes that are left to the cgroup that
// this process is in, and removes the cgroup.
class MemoryCage {
 public:
  // IO, naming the cgroup and the reason, if it can't be made. `root` as in probe.
  MemoryCage(FileSystem& files, uint64_t limit_bytes, std::string root = "");
  ~MemoryCage();
  MemoryCage(const MemoryCage&) = delete;
  MemoryCage& operator=(const MemoryCage&) = delete;

  const MemoryCgroup& group() const noexcept { return group_; }
  // The last part of its path, with the slash.
  std::string name() const { return group_.directory.substr(group_.directory.rfind('/')); }
  // The file that takes the pids of processes that enter.
  std::string entry() const { return group_.directory + "/cgroup.procs"; }

 private:
  void make_below(const MemoryCgroup& parent, const std::string& name);
  void write_limit(uint64_t limit_bytes);

  FileSystem& files_;
  const std::string root_;
  MemoryCgroup own_, group_;
};

}  // namespace modicum
