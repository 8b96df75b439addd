// Notices when watched processes end, and which of them the OOM killer has ended. Internal to
// `watch`.
#pragma once

#include <poll.h>

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "modicum/probe/probe.h"
#include "modicum/watch/sampler.h"

namespace modicum {

// The kernel counts an OOM kill in the cgroup before it sends the signal. A pidfd reports the end
// of a process without delay, so the killed process is the first to end after the count has grown.
// Other processes, which a launcher ends because of the kill, end later.
class Deaths {
 public:
  static constexpr size_t kMaxFollowed = 512;  // each takes one file descriptor
  static constexpr int kFreeDescriptors = 32;
  static constexpr int64_t kExplainedNs = 5 * kNsPerSecond;  // from a kill to the end of a process

  // `group`: the cgroup whose kills count, that of the command. Its ancestors count kills of other
  // jobs, too. nullopt: none count.
  explicit Deaths(std::optional<MemoryCgroup> group);
  ~Deaths();
  Deaths(const Deaths&) = delete;
  Deaths& operator=(const Deaths&) = delete;

  // Opens a pidfd for each process that has none, until kMaxFollowed are open or all but
  // kFreeDescriptors of this process's file descriptors are in use: reading /proc needs some.
  void follow(const std::vector<int>& pids);
  // Adds all pidfds to the descriptors that the caller passes to poll(2).
  void add_to(std::vector<pollfd>& waited) const;
  // Returns the processes whose descriptors poll(2) has marked as ready in `waited`, and closes
  // these descriptors.
  std::vector<int> ended(const std::vector<pollfd>& waited);

  // How many kills the kernel has counted since construction, or since killed_of last found one or
  // they were forgotten.
  uint64_t new_kills() const;
  bool has_new_kill() const { return new_kills() > 0; }
  // Forgets the new kills, which were of other processes in the cgroup.
  void forget() { kills_ = kills(); }
  // As forget, if no kill has been counted since this was called kExplainedNs ago. `is_ending`: a
  // watched process may be ending: to free much memory takes longer.
  void forget_old(int64_t now_ns, bool is_ending);
  // The process of `dead` that the OOM killer has ended; nullopt without a new kill. `statuses` has
  // the known statuses of wait(2) by pid: a process that SIGKILL has not ended is ruled out. Of
  // several candidates returns the one that held most memory by `sampler`, since the kernel prefers
  // the largest.
  std::optional<int> killed_of(const std::vector<int>& dead, const std::map<int, int>& statuses,
                               const TreeSampler& sampler);

 private:
  uint64_t kills() const;

  const std::optional<MemoryCgroup> group_;
  uint64_t kills_;
  uint64_t kills_then_ = 0;      // by forget_old
  int64_t since_ns_ = 0;         // when forget_old first saw kills_then_
  int highest_fd_ = INT32_MAX;   // the highest descriptor that a pidfd may have
  std::map<int, int> followed_;  // pid -> pidfd
};

}  // namespace modicum
