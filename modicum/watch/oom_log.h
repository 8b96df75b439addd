// OOM kills as the kernel logs them. Internal to `watch`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace modicum {

struct OomKill {
  int pid = 0;  // in the initial pid namespace
  std::string name;
  uint64_t held_bytes = 0;  // anonymous and shared memory at the kill
  // The path of the cgroup whose limit was reached, in the initial cgroup namespace. Empty if the
  // machine had no memory left, or if the kernel's rate limit dropped the message that names the
  // cgroup.
  std::string group;
};

// Parses a message of the kernel's log that reports a kill; nullopt for any other message:
//
//   Memory cgroup out of memory: Killed process 5331 (python3) total-vm:630968kB,
//   anon-rss:196352kB, file-rss:6676kB, shmem-rss:0kB, UID:0 ...
std::optional<OomKill> oom_kill_in(std::string_view message);
// Parses the message before a kill, which names the cgroup; nullopt for any other message, and for
// a kill because the whole machine had no memory left:
//
//   oom-kill:constraint=CONSTRAINT_MEMCG,...,oom_memcg=/a/b,task_memcg=/a/b/c,task=python3,...
std::optional<std::string> oom_group_in(std::string_view message);

// Reads the messages that /dev/kmsg receives after construction. Needs CAP_SYSLOG, or a kernel with
// dmesg_restrict=0. In another pid namespace, as in a container, it reads nothing: the pids of the
// log would be those of other processes.
class OomLog {
 public:
  explicit OomLog(const std::string& root = "");  // as in probe/probe.h
  ~OomLog();
  OomLog(const OomLog&) = delete;
  OomLog& operator=(const OomLog&) = delete;

  bool is_readable() const noexcept { return fd_ >= 0; }
  // The kills that were logged since the last call, of any process of the machine.
  std::vector<OomKill> next();

 private:
  int fd_ = -1;
  std::string group_;  // the cgroup of a kill whose message has not been read yet
};

}  // namespace modicum
