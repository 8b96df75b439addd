// The ends of watched processes, in order, and which of them was an OOM kill. Internal to `watch`.
#pragma once

#include <poll.h>

#include <map>
#include <optional>
#include <vector>

#include "modicum/probe/probe.h"
#include "modicum/watch/sampler.h"

namespace modicum {

// The kernel counts an OOM kill in the cgroup before it sends the signal. A pidfd reports the end
// of a process at once, so the first process to end after the count has grown is the one that was
// killed; others, ended by their launcher because of it, come later.
class Deaths {
 public:
  static constexpr size_t kMostFollowed = 512;

  // `groups`: the cgroups whose kills count.
  explicit Deaths(std::vector<MemoryCgroup> groups);
  ~Deaths();
  Deaths(const Deaths&) = delete;
  Deaths& operator=(const Deaths&) = delete;

  // Opens a pidfd for each of the processes that has none, as far as descriptors allow.
  void follow(const std::vector<int>& pids);
  void add_to(std::vector<pollfd>& waited) const;
  // The processes that have ended, by what poll has found in `waited`.
  std::vector<int> ended(const std::vector<pollfd>& waited);

  // Whether the kernel has counted a kill since the last one that killed_of has found.
  bool has_new_kill() const { return kills() != kills_; }
  // The process of `dead` that the OOM killer has ended: none unless the count has grown since the
  // last one. `statuses` are those of wait(2), as far as they are known; among several the sampler
  // knows the largest, which the kernel prefers.
  std::optional<int> killed_of(const std::vector<int>& dead, const std::map<int, int>& statuses,
                               const TreeSampler& sampler);

 private:
  uint64_t kills() const;

  const std::vector<MemoryCgroup> groups_;
  uint64_t kills_;
  std::map<int, int> followed_;  // pid -> pidfd
};

}  // namespace modicum
