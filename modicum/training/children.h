// Idle forked children, as a data loader's workers are between batches. Internal to `training`.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <vector>

#include "modicum/base/base.h"

namespace modicum {

// Upper limit of an idle child's private memory.
constexpr uint64_t kChildBytes = 256 * kKiB;

class Children {
 public:
  explicit Children(int count);  // Throws NOMEM.
  ~Children();
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;

  uint64_t held_bytes() const;  // current memory of all children

 private:
  std::vector<pid_t> pids_;
};

}  // namespace modicum
