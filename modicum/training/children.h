// Idle forked children, like a data loader's workers between batches. Internal to `training`.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <vector>

#include "modicum/base/base.h"

namespace modicum {

// The private memory of an idle child.
constexpr uint64_t kChildBytes = 256 * kKiB;

class Children {
 public:
  explicit Children(int count);  // NOMEM
  ~Children();
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;

  uint64_t held_bytes() const;

 private:
  std::vector<pid_t> pids_;
};

}  // namespace modicum
