// What of a shard's gradient has arrived in this pass. Internal to `optim`.
#pragma once

#include <cstdint>
#include <map>

namespace modicum {

// A set of local indices as intervals that don't touch: gradients come in few long pieces, so that
// there are seldom more than a handful.
class Arrived {
 public:
  // Adds [begin, end); false, and nothing is added, where some of it is there already.
  bool add(int64_t begin, int64_t end);
  int64_t count() const noexcept { return count_; }

 private:
  std::map<int64_t, int64_t> end_of_;  // by begin
  int64_t count_ = 0;
};

// A shard's gradient in one step.
struct Arriving {
  int passes = 0;   // that are complete
  Arrived arrived;  // in the pass that isn't
  bool left_out = false;
};

}  // namespace modicum
