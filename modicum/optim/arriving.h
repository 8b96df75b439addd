// The record of which elements of a shard's gradient have arrived. Internal to `optim`.
#pragma once

#include <cstdint>
#include <map>

namespace modicum {

// A set of local indices as disjoint, non-adjacent intervals: usually a handful, since gradients
// arrive in few long pieces.
class ArrivedRanges {
 public:
  // Adds [begin, end). Returns false and adds nothing if it overlaps the set.
  bool add(int64_t begin, int64_t end);
  int64_t count() const noexcept { return count_; }

 private:
  std::map<int64_t, int64_t> end_of_;  // an interval's begin -> its end
  int64_t count_ = 0;
};

// The arrival of a shard's gradient in one step.
struct GradientArrival {
  ArrivedRanges arrived;
  bool left_out = false;
};

}  // namespace modicum
