#include "modicum/watch/sampler.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <utility>

namespace modicum {
namespace {

constexpr double kEarlyDuty = 0.01;  // instead of half of the duty, while much is allowed
// The rank is read in a process's first samples: an exec soon after the fork may change it.
constexpr int kRankReads = 3;
constexpr int64_t kRecentNs = 5 * kNsPerSecond;
constexpr size_t kMaxRecent = 256;
// The Pss of a new process that is this small is read with its first status: that takes at most
// about 2 ms.
constexpr uint64_t kSmallBytes = 32 * kMiB;

}  // namespace

TreeSampler::TreeSampler(Clock& clock, SamplerOptions options)
    : clock_(clock),
      options_(std::move(options)),
      begin_ns_(clock.now_ns()),
      then_ns_(begin_ns_),
      allowance_(options_.duty),
      steady_since_ns_(begin_ns_),
      peak_rss_bytes_(options_.forked_rss_bytes) {
  if (options_.reports != nullptr) {
    reported_.emplace(*options_.reports, begin_ns_, options_.is_same_program);
  }
}

double TreeSampler::seconds(int64_t now) const noexcept {
  return static_cast<double>(now - begin_ns_) / kNsPerSecond;
}

void TreeSampler::sample() {
  const int64_t cpu_before = options_.cpu_ns();
  const int64_t now = clock_.now_ns();
  allowance_.refill(now - then_ns_);
  then_ns_ = now;
  discover();
  read_statuses();
  read_reports(now);
  const int64_t cost = options_.cpu_ns() - cpu_before;
  switch (what_to_read(now)) {
    case Reading::status: break;
    case Reading::pss: read_exact(cpu_before); break;
    case Reading::copies: read_copies(cpu_before); break;
  }
  read_kinds(now, cpu_before);
  record_sample(now);
  allowance_.spend(options_.cpu_ns() - cpu_before);
  const double share = allowance_.leaves(kAmpleNs) ? kEarlyDuty : options_.duty / 2;
  pause_ns_ = std::max(kShortestPauseNs, static_cast<int64_t>(static_cast<double>(cost) / share));
  // Memory may rise so steeply that only a few samples are left before the limit: the pause is
  // shorter while the allowance lasts.
  if (is_near_limit() && allowance_.leaves(kAmpleNs / 10)) {
    pause_ns_ = std::min(pause_ns_, kPauseNearLimitNs);
  }
}

// Above half of the limit a kill may follow, which the last readings explain.
bool TreeSampler::is_near_limit() const noexcept {
  return options_.limit_bytes != 0 && !recent_.empty() &&
         std::max(last().held_bytes, last().charged_bytes) > options_.limit_bytes / 2;
}

void TreeSampler::discover() {
  const uint64_t last = last_pid(options_.root);
  // The kernel assigns a pid before /proc shows the process, so more than one walk is needed.
  walks_ = last == last_pid_ ? walks_ + 1 : 0;
  if (last != 0 && walks_ > 2) return;
  last_pid_ = last;
  std::vector<int> ahead = {options_.root_pid};
  while (!ahead.empty()) {
    const int parent = ahead.back();
    ahead.pop_back();
    for (const int child : children_of(parent, options_.root)) {
      ahead.push_back(child);
      const auto is_it = [child](const TrackedProcess& tracked) { return tracked.pid == child; };
      if (std::none_of(tracked_.begin(), tracked_.end(), is_it)) add(child);
    }
  }
}

void TreeSampler::add(int pid) {
  TrackedProcess tracked{.pid = pid};
  auto status = read_status_of(tracked);
  if (!status || !status->is_alive) return;
  take_status(tracked, std::move(*status));
  tracked.estimate.anon_then = tracked.status.rss_anon;
  ++left_out_;
  if (processes_.size() < kMaxProcesses) give_record(tracked, seconds(then_ns_));
  tracked.is_unread = !tracked.may_be_in_parents && tracked.rss_bytes() > kSmallBytes;
  if (!tracked.may_be_in_parents && !tracked.is_unread) read_pss_of(tracked, tracked.estimate);
  tracked_.push_back(std::move(tracked));
}

void TreeSampler::give_record(TrackedProcess& tracked, double at_s) {
  --left_out_;
  tracked.process = processes_.size();
  processes_.push_back({.pid = tracked.pid,
                        .parent = tracked.status.parent,
                        .name = tracked.status.name,
                        .begin_s = at_s,
                        .end_s = at_s});
}

void TreeSampler::read_rank(TrackedProcess& tracked) {
  if (!tracked.process || tracked.rank_reads >= kRankReads) return;
  ++tracked.rank_reads;
  give_rank(tracked);
}

void TreeSampler::give_rank(const TrackedProcess& tracked) {
  const auto rank = rank_of(tracked.pid, options_.root);
  if (!rank) return;  // a process that is ending keeps the rank that it had
  WatchedProcess& process = processes_[*tracked.process];
  process.rank = rank->rank;
  process.rank_variable = rank->variable;
}

// The status of a process, without the memory of its parent if it is still in that. Whether it is
// must be asked first, since it may leave it at any time.
std::optional<ProcessStatus> TreeSampler::read_status_of(TrackedProcess& tracked) {
  tracked.may_be_in_parents =
      tracked.may_be_in_parents && is_in_parents_memory(tracked.pid, options_.root);
  auto status = read_status(tracked.pid, options_.root);
  if (!status || !tracked.may_be_in_parents) return status;
  return ProcessStatus{
      .parent = status->parent, .name = status->name, .is_alive = status->is_alive};
}

void TreeSampler::read_statuses() {
  for (TrackedProcess& tracked : tracked_) {
    auto status = read_status_of(tracked);
    if (!status) status.emplace(ProcessStatus{.is_alive = false});
    if (!status->is_alive) {
      tracked.status.is_alive = false;
      continue;
    }
    if (status->name != tracked.status.name)
      tracked.rank_reads = 0;  // it has started another program
    take_status(tracked, std::move(*status));
    tracked.estimate.note_freed(tracked.status.rss_anon);
    if (tracked.next) tracked.next->note_freed(tracked.status.rss_anon);
    read_rank(tracked);
  }
  ended_.clear();
  const auto end =
      std::stable_partition(tracked_.begin(), tracked_.end(),
                            [](const TrackedProcess& tracked) { return tracked.status.is_alive; });
  std::move(end, tracked_.end(), std::back_inserter(ended_));
  tracked_.erase(end, tracked_.end());
}

// Memory came and went since the last reading if VmHWM has grown above both readings.
void TreeSampler::take_status(TrackedProcess& tracked, ProcessStatus status) {
  const uint64_t before = tracked.mapped_bytes();
  // A lower VmHWM is that of a new program, after an exec.
  const bool has_grown = status.peak_rss != tracked.status.peak_rss;
  tracked.status = std::move(status);
  const uint64_t peak = tracked.status.peak_rss;
  peak_rss_bytes_ = std::max(peak_rss_bytes_, peak);
  const uint64_t seen = std::max(before, tracked.mapped_bytes());
  if (has_grown && peak > seen) unseen_bytes_ += peak - seen;
}

// `peak_rss_bytes` is the highest peak among the process and its children that have ended, and does
// not say whose. As an upper bound each of its children is assumed to have reached it; without
// children, the process itself.
void TreeSampler::note_end(int pid, uint64_t peak_rss_bytes) noexcept {
  if (peak_rss_bytes <= peak_rss_bytes_) return;
  peak_rss_bytes_ = peak_rss_bytes;
  uint64_t own_bytes = peak_rss_bytes;
  uint64_t of_children = 0;
  for (const TrackedProcess& tracked : tracked_) {
    const uint64_t more = peak_rss_bytes - tracked.status.peak_rss;
    if (tracked.pid == pid) own_bytes = more;
    if (tracked.status.parent == pid) of_children += more;
  }
  unseen_bytes_ += of_children > 0 ? of_children : own_bytes;
}

void TreeSampler::read_reports(int64_t now) {
  if (!reported_) return;
  std::vector<int> pids = alive();
  std::sort(pids.begin(), pids.end());
  reported_->read(now, pids, [this](int pid) {  // it may have begun since the tree was walked
    return is_descendant(pid, options_.root_pid, options_.root);
  });
}

uint64_t TreeSampler::rss_sum() const noexcept {
  uint64_t sum = 0;
  for (const TrackedProcess& tracked : tracked_) sum += tracked.rss_bytes();
  return sum;
}

// What the processes map beyond the estimate. The tree holds no more in addition.
uint64_t TreeSampler::beyond_estimate() const noexcept {
  uint64_t estimate = 0;
  for (const TrackedProcess& tracked : tracked_) estimate += tracked.held_bytes();
  const uint64_t sum = rss_sum();
  return sum - std::min(sum, estimate);
}

// What copies of pages shared since a fork add to the tree, and is not in the estimate. At most
// each page fault since Pss was last read was one. A process copies each of its pages once. Of a
// large process whose Pss was never read any page may be a copy, or may never have been shared.
uint64_t TreeSampler::unread_copies() const noexcept {
  uint64_t copies = 0;
  for (const TrackedProcess& tracked : tracked_) {
    if (tracked.is_unread) {
      copies += tracked.status.rss_anon;
    } else if (faults_since_ >= kFaultsOfCopying) {
      copies += std::min(tracked.faults_since * kPageBytes, tracked.status.rss_anon);
    }
  }
  return std::min(copies, beyond_estimate());
}

// Of the memory that is charged to a cgroup of the processes, what the estimate lacks.
uint64_t TreeSampler::charged_copies(const MemoryCharges& charges) const noexcept {
  uint64_t estimate = 0;
  for (const TrackedProcess& tracked : tracked_) estimate += tracked.anon_bytes();
  return std::min(beyond_estimate(), charges.anon_bytes - std::min(charges.anon_bytes, estimate));
}

// Adds the copies that the estimate lacks: to what the tree holds, if its own cgroup counts them.
void TreeSampler::add_copies(WatchSample& sample,
                             const std::optional<MemoryCharges>& of_cage) const {
  if (tracked_.empty() || (tracked_.size() == 1 && !tracked_.front().is_unread)) {
    return;  // nothing is shared
  }
  if (of_cage) {
    sample.by_group_bytes = charged_copies(*of_cage);
    sample.held_bytes += sample.by_group_bytes;
    sample.others.kib[kUnattributed] += static_cast<uint32_t>(sample.by_group_bytes / kKiB);
    return;
  }
  sample.unread_copies_bytes = unread_copies();
  if (sample.unread_copies_bytes == 0 || !options_.group) return;
  if (const auto charges = memory_charges(*options_.group)) {
    sample.unread_copies_bytes = std::min(sample.unread_copies_bytes, charged_copies(*charges));
  }
}

// The memory of a process by owner, if it holds `held_bytes` now.
OwnedMemory TreeSampler::divided(TrackedProcess& tracked, uint64_t held_bytes) {
  const auto reported = reported_ ? reported_->memory_of(tracked.pid) : std::nullopt;
  return tracked.division(
      held_bytes, {.copied_bytes = tracked.copied_bytes,
                   .shared_bytes = std::min(tracked.estimate.pss_shmem, tracked.status.rss_shmem),
                   .reported = reported ? &*reported : nullptr,
                   .kinds = tracked.kinds ? &*tracked.kinds : nullptr});
}

void TreeSampler::record_share(TrackedProcess& tracked, WatchSample& sample) {
  const uint64_t held_bytes = tracked.held_bytes();
  if (held_bytes > 0) tracked.rss_when_held = tracked.rss_bytes();
  sample.held_bytes += held_bytes;
  sample.page_cache_bytes += tracked.status.rss_file;
  const bool is_large = processes_.size() < 8 * kMaxProcesses && held_bytes > peak_bytes_ / 64;
  if (!tracked.process && is_large) give_record(tracked, sample.at_s);
  const OwnedMemory owned = divided(tracked, held_bytes);
  if (!tracked.process) {
    sample.others += owned;
    return;
  }
  WatchedProcess& process = processes_[*tracked.process];
  process.name = tracked.status.name;
  process.parent = tracked.status.parent;
  process.end_s = sample.at_s;
  process.peak_bytes = std::max(process.peak_bytes, held_bytes);
  process.peak_rss_bytes = std::max(process.peak_rss_bytes, tracked.status.peak_rss);
  const auto reported = reported_ ? reported_->memory_of(tracked.pid) : std::nullopt;
  if (reported && reported->rank) process.rank = reported->rank;
  if (held_bytes > 0)
    sample.shares.push_back({static_cast<uint32_t>(*tracked.process), held_bytes, owned});
}

void TreeSampler::record_sample(int64_t now) {
  WatchSample sample{.at_s = seconds(now)};
  for (TrackedProcess& tracked : tracked_) record_share(tracked, sample);
  std::sort(sample.shares.begin(), sample.shares.end(),
            [](const auto& a, const auto& b) { return a.bytes > b.bytes; });
  while (sample.shares.size() > kMaxShares) {
    sample.others += sample.shares.back().owned;
    sample.shares.pop_back();
  }
  const auto charges = options_.cage ? memory_charges(*options_.cage) : std::nullopt;
  if (options_.cage) sample.charged_bytes = charged_to(*options_.cage);
  if (charges) sample.page_cache_bytes = charges->page_cache_bytes;
  add_copies(sample, charges);
  const uint64_t before = recent_.empty() ? 0 : recent_.back().held_bytes;
  const uint64_t between = std::max(before, sample.held_bytes) + std::exchange(unseen_bytes_, 0);
  const uint64_t with_copies = sample.held_bytes + sample.unread_copies_bytes;
  if (std::max(between, with_copies) > peak_at_most_) {
    peak_at_most_ = std::max(between, with_copies);
    at_most_by_copies_ = with_copies > between;
  }
  note_peak(sample);
  keep(std::move(sample));
}

// Returns whether the tree holds more in `sample` than in all earlier ones.
bool TreeSampler::note_peak(const WatchSample& sample) {
  if (sample.held_bytes <= peak_bytes_) return false;
  peak_bytes_ = sample.held_bytes;
  peak_at_s_ = sample.at_s;
  for (WatchedProcess& process : processes_)
    process.held_at_peak_bytes = process.files_at_peak_bytes = 0;
  for (const TrackedProcess& tracked : tracked_) {
    if (!tracked.process) continue;
    processes_[*tracked.process].held_at_peak_bytes = tracked.held_bytes();
    processes_[*tracked.process].files_at_peak_bytes = tracked.status.rss_file;
  }
  return true;
}

void TreeSampler::keep(WatchSample sample) {
  timeline_.add(sample);
  const double begin_s = sample.at_s - static_cast<double>(kRecentNs) / kNsPerSecond;
  recent_.push_back(std::move(sample));
  while (recent_.size() > kMaxRecent || recent_.front().at_s < begin_s) recent_.pop_front();
}

}  // namespace modicum
