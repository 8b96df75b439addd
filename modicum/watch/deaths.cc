#include "modicum/watch/deaths.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <utility>

namespace modicum {

Deaths::Deaths(std::optional<MemoryCgroup> group) : group_(std::move(group)), kills_(kills()) {
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < INT32_MAX) {
    highest_fd_ = static_cast<int>(files.rlim_cur) - kFreeDescriptors;
  }
}

Deaths::~Deaths() {
  for (const auto& [pid, fd] : followed_) close(fd);
}

uint64_t Deaths::kills() const { return group_ ? oom_kills_in(*group_) : 0; }

uint64_t Deaths::new_kills() const {
  const uint64_t now = kills();
  return now - std::min(now, kills_);
}

void Deaths::forget_old(int64_t now_ns, bool is_ending) {
  const uint64_t now = kills();
  if (now != kills_then_ || is_ending) since_ns_ = now_ns;
  kills_then_ = now;
  if (now_ns - since_ns_ >= kExplainedNs) kills_ = now;
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
  if (!has_new_kill()) return std::nullopt;
  std::optional<int> killed;
  for (const int pid : dead) {
    const auto status = statuses.find(pid);
    const bool is_known = status != statuses.end();
    if (is_known && !(WIFSIGNALED(status->second) && WTERMSIG(status->second) == SIGKILL)) continue;
    if (!killed || sampler.last_held(pid) > sampler.last_held(*killed)) killed = pid;
  }
  if (killed) forget();
  return killed;
}

}  // namespace modicum
