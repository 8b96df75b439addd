#include "modicum/watch/deaths.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <utility>

namespace modicum {

Deaths::Deaths(std::vector<MemoryCgroup> groups) : groups_(std::move(groups)), kills_(kills()) {
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < INT32_MAX) {
    highest_fd_ = static_cast<int>(files.rlim_cur) - kFreeDescriptors;
  }
}

Deaths::~Deaths() {
  for (const auto& [pid, fd] : followed_) close(fd);
}

uint64_t Deaths::kills() const {
  uint64_t sum = 0;
  for (const MemoryCgroup& group : groups_) sum += oom_kills_in(group);
  return sum;
}

void Deaths::follow(const std::vector<int>& pids) {
  for (const int pid : pids) {
    if (followed_.size() >= kMaxFollowed) return;
    if (followed_.contains(pid)) continue;
    const int fd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
    if (fd < 0) continue;
    if (fd > highest_fd_) {
      close(fd);
      return;
    }
    followed_[pid] = fd;
  }
}

void Deaths::add_to(std::vector<pollfd>& waited) const {
  for (const auto& [pid, fd] : followed_) waited.push_back({fd, POLLIN, 0});
}

std::vector<int> Deaths::ended(const std::vector<pollfd>& waited) {
  std::vector<int> dead;
  for (auto at = followed_.begin(); at != followed_.end();) {
    const auto [pid, fd] = *at;
    bool has_ended = false;
    for (const pollfd& poll_entry : waited)
      has_ended = has_ended || (poll_entry.fd == fd && poll_entry.revents != 0);
    if (!has_ended) {
      ++at;
      continue;
    }
    dead.push_back(pid);
    close(fd);
    at = followed_.erase(at);
  }
  return dead;
}

std::optional<int> Deaths::killed_of(const std::vector<int>& dead,
                                     const std::map<int, int>& statuses,
                                     const TreeSampler& sampler) {
  const uint64_t now = kills();
  if (now == kills_) return std::nullopt;
  std::optional<int> killed;
  for (const int pid : dead) {
    const auto status = statuses.find(pid);
    const bool is_known = status != statuses.end();
    if (is_known && !(WIFSIGNALED(status->second) && WTERMSIG(status->second) == SIGKILL)) continue;
    if (!killed || sampler.last_held(pid) > sampler.last_held(*killed)) killed = pid;
  }
  if (killed) kills_ = now;
  return killed;
}

}  // namespace modicum
