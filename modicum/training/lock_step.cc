#include "modicum/training/lock_step.h"

#include <sched.h>

#include <algorithm>

namespace modicum {

NormPage::NormPage(int ranks)
    : ranks_(ranks),
      mapping_(Mapping::shared(sizeof(std::atomic<uint64_t>) +
                               2 * static_cast<uint64_t>(ranks) * sizeof(Lane))) {}

std::atomic<uint64_t>& NormPage::arrived() const noexcept {
  return *reinterpret_cast<std::atomic<uint64_t>*>(mapping_.bytes().data());
}

NormPage::Lane& NormPage::lane(int64_t step, int rank) const noexcept {
  auto* const lanes =
      reinterpret_cast<Lane*>(mapping_.bytes().data() + sizeof(std::atomic<uint64_t>));
  return lanes[(step % 2) * ranks_ + rank];
}

GradNorm NormPage::norm(int64_t step) const noexcept {
  GradNorm sum;
  for (int rank = 0; rank < ranks_; ++rank) sum += lane(step, rank).norm;
  return sum;
}

double NormPage::slowest_s(int64_t step) const noexcept {
  double slowest = 0;
  for (int rank = 0; rank < ranks_; ++rank) {
    slowest = std::max(slowest, lane(step, rank).last_step_s);
  }
  return slowest;
}

void NormPage::line_up(const Board& board) const {
  // Each round takes one ticket per rank; wait until this round has taken all of its tickets.
  const auto ranks = static_cast<uint64_t>(ranks_);
  const uint64_t ticket = arrived().fetch_add(1);
  const uint64_t all = (ticket / ranks + 1) * ranks;
  for (int spins = 1; arrived().load() < all; ++spins) {
    if (spins % 1024 == 0) board.check();
    sched_yield();
  }
}

LockStep::LockStep(RankOptimizer& optimizer, const StepContext& at, const LockStepOptions& options)
    : optimizer_(optimizer), at_(at), options_(options) {
  if (options.loss_scale) taken_.loss_scale.scale = *options.loss_scale;
}

void LockStep::step(int64_t number) {
  const ReportedPhase phase(at_.reporter, "step");
  const bool scales = options_.loss_scale.has_value();
  const float scale = scales ? taken_.loss_scale.scale : 1.0F;
  const GradNorm norm = optimizer_.deliver(number, scale, [this] { at_.board->beat(at_.rank, 0); });
  at_.page->lane(number, at_.rank) = {norm, last_step_s_};
  at_.board->barrier(at_.rank);
  at_.page->line_up(*at_.board);
  taken_.norm = at_.page->norm(number);
  note_time(number);
  taken_.unscale = scales ? taken_.loss_scale.unscale() : 1.0F;
  last_step_s_ = 0;
  if (taken_.norm.finite) {
    step_timed();
  } else {
    optimizer_.skip();
    ++taken_.skipped;
  }
  if (scales) taken_.loss_scale.update(taken_.norm.finite);
  at_.board->beat(at_.rank, options_.bytes_of_step);
}

void LockStep::step_timed() {
  // With a ring the low-precision copies are made, as for a device, but not sent anywhere.
  const Outlet outlet{.ring = options_.ring, .send = [](const ReadyChunk&) {}};
  StepOptions options{.unscale = taken_.unscale};
  if (options_.max_norm) {
    options.clip = clip_factor(taken_.norm.norm(taken_.unscale), *options_.max_norm);
  }
  if (!options_.ring.empty()) options.outlet = &outlet;
  const int64_t begin = at_.clock->now_ns();
  optimizer_.step(options);
  last_step_s_ = static_cast<double>(at_.clock->now_ns() - begin) / kNsPerSecond;
}

// The lanes of a step hold the durations of the step before it.
void LockStep::note_time(int64_t step) {
  const double slowest_s = at_.page->slowest_s(step);
  if (slowest_s > 0) seconds_[static_cast<size_t>(timed_++) % seconds_.size()] = slowest_s;
}

StepsTaken LockStep::finish(int64_t last) {
  at_.page->lane(last + 1, at_.rank) = {taken_.norm, last_step_s_};
  at_.board->barrier(at_.rank);
  note_time(last + 1);
  const auto end = seconds_.begin() + std::min<int64_t>(timed_, seconds_.size());
  const auto middle = seconds_.begin() + (end - seconds_.begin()) / 2;
  if (end == seconds_.begin()) return taken_;
  std::nth_element(seconds_.begin(), middle, end);
  taken_.step_s = *middle;
  return taken_;
}

}  // namespace modicum
