// Queries of the samples, killed processes, and the record.
#include <algorithm>
#include <utility>

#include "modicum/watch/sampler.h"

namespace modicum {

void TreeSampler::add_unseen(int pid, const std::string& name, uint64_t held_bytes) {
  const int64_t now = clock_.now_ns();
  read_reports(now);
  const auto reported = reported_ ? reported_->memory_of(pid) : std::nullopt;
  processes_.push_back({.pid = pid,
                        .name = name,
                        .rank = reported ? reported->rank : std::nullopt,
                        .begin_s = seconds(now),
                        .end_s = seconds(now),
                        .peak_bytes = held_bytes,
                        .peak_rss_bytes = held_bytes});
}

const TreeSampler::TrackedProcess* TreeSampler::tracked_of(int pid) const {
  for (const std::vector<TrackedProcess>* const list : {&tracked_, &ended_}) {
    for (const TrackedProcess& tracked : *list) {
      if (tracked.pid == pid) return &tracked;
    }
  }
  return nullptr;
}

uint64_t TreeSampler::add_kill(int pid, std::optional<uint64_t> rss_bytes) {
  const TrackedProcess* const tracked = tracked_of(pid);
  TrackedProcess killed = tracked == nullptr ? TrackedProcess{.pid = pid} : *tracked;
  const WatchSample* const with = last_with(pid);
  uint64_t held_bytes = last_held(pid);
  if (rss_bytes && tracked != nullptr) {
    const uint64_t gained = *rss_bytes - std::min(*rss_bytes, killed.rss_when_held);
    held_bytes = with == nullptr ? *rss_bytes : held_bytes + gained;
  }
  WatchSample sample = last();
  sample.at_s = seconds(clock_.now_ns());
  uint64_t others = held_by_others(pid);
  if (with != nullptr && with->by_group_bytes > sample.by_group_bytes) {
    const uint64_t more =
        with->by_group_bytes - std::exchange(sample.by_group_bytes, with->by_group_bytes);
    others += more;
    sample.others.kib[kUnattributed] += static_cast<uint32_t>(more / kKiB);
  }
  // The cgroup held no more than its limit.
  const uint64_t most = options_.limit_bytes == 0 ? UINT64_MAX : options_.limit_bytes;
  held_bytes = std::min(held_bytes, most - std::min(most, others));
  sample.held_bytes = others + held_bytes;
  if (with != nullptr) {
    sample.unread_copies_bytes =
        std::min(with->unread_copies_bytes, most - std::min(most, sample.held_bytes));
  }
  const size_t process = index_of(pid).value();
  std::erase_if(sample.shares, [&](const WatchSample::Share& share) {
    return processes_[share.process].pid == pid;
  });
  sample.shares.push_back(
      {static_cast<uint32_t>(process), held_bytes, divided(killed, held_bytes)});
  std::sort(sample.shares.begin(), sample.shares.end(),
            [](const auto& a, const auto& b) { return a.bytes > b.bytes; });
  // Those that end before the next sample held their shares until now.
  for (const WatchSample::Share& share : sample.shares) {
    double& end_s = processes_[share.process].end_s;
    end_s = std::max(end_s, sample.at_s);
  }
  processes_[process].peak_bytes = std::max(processes_[process].peak_bytes, held_bytes);
  if (note_peak(sample)) {
    processes_[process].held_at_peak_bytes = held_bytes;
    processes_[process].files_at_peak_bytes = killed.status.rss_file;
  }
  keep(std::move(sample));
  return held_bytes;
}

std::vector<int> TreeSampler::alive() const {
  std::vector<int> pids;
  for (const TrackedProcess& tracked : tracked_) pids.push_back(tracked.pid);
  return pids;
}

bool TreeSampler::is_ending() const noexcept {
  return std::any_of(tracked_.begin(), tracked_.end(), [](const TrackedProcess& tracked) {
    return !tracked.may_be_in_parents && tracked.status.peak_rss == 0;
  });
}

std::optional<size_t> TreeSampler::index_of(int pid) const {
  for (size_t at = processes_.size(); at > 0; --at) {
    if (processes_[at - 1].pid == pid) return at - 1;
  }
  return std::nullopt;
}

const WatchedProcess* TreeSampler::find(int pid) const {
  const auto at = index_of(pid);
  return at ? &processes_[*at] : nullptr;
}

const WatchSample::Share* TreeSampler::share_in(const WatchSample& sample, int pid) const {
  const auto at = std::find_if(
      sample.shares.begin(), sample.shares.end(),
      [&](const WatchSample::Share& share) { return processes_[share.process].pid == pid; });
  return at == sample.shares.end() ? nullptr : &*at;
}

const WatchSample* TreeSampler::last_with(int pid) const {
  const auto at = std::find_if(recent_.rbegin(), recent_.rend(), [&](const WatchSample& sample) {
    return share_in(sample, pid) != nullptr;
  });
  return at == recent_.rend() ? nullptr : &*at;
}

const WatchSample::Share* TreeSampler::last_share(int pid) const {
  const WatchSample* const sample = last_with(pid);
  return sample == nullptr ? nullptr : share_in(*sample, pid);
}

uint64_t TreeSampler::held_by_others(int pid) const {
  const WatchSample::Share* const share = share_in(last(), pid);
  return last().held_bytes - (share == nullptr ? 0 : share->bytes);
}

uint64_t TreeSampler::last_held(int pid) const {
  if (const WatchSample::Share* const share = last_share(pid)) return share->bytes;
  const WatchedProcess* const process = find(pid);
  return process == nullptr ? 0 : process->peak_rss_bytes;
}

TreeSampler::Growth TreeSampler::growth(int64_t within_ns, int pid) const {
  Growth most;
  if (recent_.empty()) return most;
  const WatchSample* const with = last_with(pid);
  const WatchSample& end = with == nullptr ? recent_.back() : *with;
  const double begin_s = end.at_s - static_cast<double>(within_ns) / kNsPerSecond;
  auto from = std::find_if(recent_.begin(), recent_.end(),
                           [&](const WatchSample& sample) { return sample.at_s >= begin_s; });
  if (&*from == &end && from != recent_.begin()) --from;  // the pause before was longer
  for (const WatchSample::Share& share : end.shares) {
    const auto before = std::find_if(
        from->shares.begin(), from->shares.end(),
        [&](const WatchSample::Share& other) { return other.process == share.process; });
    const auto was = before == from->shares.end() ? WatchSample::Share() : *before;
    if (share.bytes <= was.bytes || share.bytes - was.bytes <= most.bytes) continue;
    most = {.pid = processes_[share.process].pid,
            .bytes = share.bytes - was.bytes,
            .seconds = end.at_s - from->at_s,
            .owner = share.owned.grown_since(was.owned)};
  }
  return most;
}

WatchedPhase TreeSampler::phase_of(int pid) {
  read_reports(clock_.now_ns());
  return reported_ ? reported_->phase_of(pid) : WatchedPhase();
}

void TreeSampler::finish(WatchRecord& record) {
  record.peak_bytes = peak_bytes_;
  record.peak_at_s = peak_at_s_;
  record.peak_at_most_bytes = peak_at_most_;
  record.is_at_most_by_copies = at_most_by_copies_;
  if (options_.limit_bytes != 0) {
    record.peak_at_most_bytes =
        std::max(peak_bytes_, std::min(peak_at_most_, options_.limit_bytes));
  }
  record.cow_duplicate_bytes = most_copies_;
  if (reported_) {
    record.phases = reported_->phases(clock_.now_ns());
    record.budget_bytes = reported_->budget_bytes();
  }
  for (WatchedPhase& phase : record.phases) {
    const WatchedProcess* const process = find(phase.pid);
    if (!phase.rank && process != nullptr) phase.rank = process->rank;
  }
  record.processes = std::move(processes_);
  record.processes_left_out = left_out_;
  record.samples = std::move(timeline_.samples());
}

}  // namespace modicum
