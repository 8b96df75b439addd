// OOM kills as the kernel logs them. Internal to `watch`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace modicum {

struct OomKill {
  int pid = 0;  // in the kernel's own pid namespace
  std::string name;
  uint64_t held_bytes = 0;  // anonymous and shared memory when it was chosen
  // The cgroup whose limit was reached, as the kernel sees it. Empty: the limit of the machine, or
  // the message before, which is rate-limited, was left out.
  std::string group;
};

// The kill in a message of the kernel's log; nullopt if it reports another thing:
//
//   Memory cgroup out of memory: Killed process 5331 (python3) total-vm:630968kB,
//   anon-rss:196352kB, file-rss:6676kB, shmem-rss:0kB, UID:0 ...
std::optional<OomKill> oom_kill_in(std::string_view message);
// The cgroup in the message before it; nullopt in any other message:
//
//   oom-kill:constraint=CONSTRAINT_MEMCG,...,oom_memcg=/a/b,task_memcg=/a/b/c,task=python3,...
std::optional<std::string> oom_group_in(std::string_view message);

// Reads /dev/kmsg from the time of construction on. It needs a privilege, or a kernel with
// dmesg_restrict=0.
class OomLog {
 public:
  OomLog();
  ~OomLog();
  OomLog(const OomLog&) = delete;
  OomLog& operator=(const OomLog&) = delete;

  bool is_readable() const noexcept { return fd_ >= 0; }
  // The kills that have been logged since the last call, on the whole machine.
  std::vector<OomKill> next();

 private:
  int fd_ = -1;
  std::string group_;  // of the last message that named one
};

}  // namespace modicum
