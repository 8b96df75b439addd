// The page on which ranks exchange their parts of the gradient's norm. Part of the door of
// `training`.
#pragma once

#include <atomic>
#include <cstdint>

#include "modicum/memory/memory.h"
#include "modicum/optim/optim.h"
#include "modicum/ranks/ranks.h"

namespace modicum {

// Shared memory: made before the ranks are forked. A rank writes its own lane, and reads the others
// between the line-up after it and the next one.
class NormPage {
 public:
  explicit NormPage(int ranks);

  // A rank's part of the norm and how long its last step took. The two sets of lanes are used in
  // turn, so that one may be written while the other is still read.
  struct Lane {
    GradNorm norm;
    double last_step_s = 0;
  };
  Lane& lane(int64_t step, int rank) const noexcept;
  // Over all ranks, added up in the same order by each, so that all get the same bits.
  GradNorm norm(int64_t step) const noexcept;
  double slowest_s(int64_t step) const noexcept;  // of the last steps
  // Waits for all ranks without sleeping, so that what is timed next begins at the same time. PEER.
  void line_up(const Board& board) const;

 private:
  std::atomic<uint64_t>& arrived() const noexcept;
  const int ranks_;
  Mapping mapping_;
};

}  // namespace modicum
