// Which exact readings a sample makes, and the readings.
#include <algorithm>
#include <functional>
#include <utility>

#include "modicum/watch/sampler.h"

namespace modicum {
namespace {

constexpr double kMaxDebtNs = 1000 * kNsPerMs;  // to read new copies, and kinds near the limit
constexpr double kMaxCostPerByteNs = 150.0 * kNsPerMs / kGiB;  // of exact readings and copies
constexpr int64_t kSteadyNs = 100 * kNsPerMs;          // without a change, before an exact reading
constexpr int64_t kFaultsEveryNs = 100 * kNsPerMs;     // the interval of reading page faults
constexpr double kLongCopyingNs = 1.0 * kNsPerSecond;  // after this a reading no longer waits
// The time between two readings when kMaxDebtNs are owed; in proportion, when less is.
constexpr double kLongestCreditNs = 10.0 * kNsPerSecond;
// Kinds are read again after this change, or 1/64 of the process's memory if that is more.
constexpr uint64_t kLeastChange = 4 * kMiB;
constexpr int64_t kKindsEveryNs = 100 * kNsPerMs;  // at most
constexpr int64_t kOldKindsNs = 10 * kNsPerSecond;

// The smallest change of `bytes` that matters: 1/64, at least 1 MiB.
uint64_t step_of(uint64_t bytes) noexcept { return std::max(kMiB, bytes / 64); }
uint64_t distance(uint64_t a, uint64_t b) noexcept { return a > b ? a - b : b - a; }

double most_cost_ns(uint64_t bytes) noexcept {
  return kMaxCostPerByteNs * static_cast<double>(bytes);
}

}  // namespace

// Whether enough pages were copied since Pss was last read, copying has stopped or lasts, and there
// is CPU time for a reading, or the last one on credit was long ago.
bool TreeSampler::has_copied(int64_t now) {
  if (tracked_.size() < 2) {  // nothing is shared
    faults_since_ = 0;
    for (TrackedProcess& tracked : tracked_) tracked.faults = tracked.faults_since = 0;
    return false;
  }
  if (now - faults_at_ns_ < kFaultsEveryNs) return false;
  faults_at_ns_ = now;
  uint64_t more = 0;
  for (TrackedProcess& tracked : tracked_) {
    const uint64_t faults = read_minor_faults(tracked.pid, options_.root);
    if (tracked.faults != 0 && faults > tracked.faults) {
      tracked.faults_since += faults - tracked.faults;
      more += faults - tracked.faults;
    }
    tracked.faults = faults;
  }
  faults_since_ += more;
  const auto age_ns = static_cast<double>(now - exact_at_ns_);
  const bool is_copying = more >= kFaultsOfCopying / 4 && age_ns < kLongCopyingNs;
  const bool is_paid = allowance_.leaves(kAmpleNs, most_cost_ns(rss_before_));
  const bool is_due = age_ns >= kLongestCreditNs * allowance_.debt_ns() / kMaxDebtNs;
  return faults_since_ >= kFaultsOfCopying && (is_paid || (!is_copying && is_due));
}

// Whether another process may be read: not if more CPU time is owed than may be.
bool TreeSampler::may_go_on(int64_t cpu_before) const {
  return allowance_.leaves(-kMaxDebtNs, static_cast<double>(options_.cpu_ns() - cpu_before));
}

TreeSampler::Reading TreeSampler::what_to_read(int64_t now) {
  const uint64_t sum = rss_sum();
  if (distance(sum, rss_before_) > step_of(sum) / 8) steady_since_ns_ = now;
  rss_before_ = sum;
  const bool is_steady = now - steady_since_ns_ >= kSteadyNs;
  const bool has_new_copies = has_copied(now);
  if (is_reading_exact_) return allowance_.leaves(-kMaxDebtNs) ? Reading::pss : Reading::status;
  if (wants_pss(sum, is_steady, has_new_copies)) {
    owed_ = has_new_copies ? Owed::new_copies : Owed::copies;
    if (tracked_.size() < 2) owed_ = Owed::nothing;
    return Reading::pss;
  }
  if (owed_ == Owed::nothing || !is_steady) return Reading::status;
  const double rest_ns = owed_ == Owed::new_copies ? -kMaxDebtNs / 2 : 0;
  return allowance_.leaves(rest_ns) ? Reading::copies : Reading::status;
}

// An exact reading is worth its cost if the tree may hold more than its peak so far, the estimates
// may be too low, and memory has changed since the last one. It also counts huge pages: for them
// alone it is made when memory has grown and is steady, and much is left even at the highest cost.
bool TreeSampler::wants_pss(uint64_t sum, bool is_steady, bool has_new_copies) {
  const uint64_t step = step_of(sum);
  const bool has_grown = sum > rss_at_exact_ + 4 * step;
  if (has_grown && is_steady && sum > rss_of_small_pages_ + 4 * step &&
      allowance_.leaves(kAmpleNs, most_cost_ns(sum))) {
    if (may_have_huge_pages()) return true;
    rss_of_small_pages_ = sum;
  }
  if (tracked_.empty() || !allowance_.leaves(has_new_copies ? -kMaxDebtNs : 0)) return false;
  if (sum <= peak_bytes_ || beyond_estimate() <= step / 2) return false;
  return has_new_copies || has_grown || (is_steady && distance(sum, rss_at_exact_) > step / 2);
}

// Each small page costs a fault, so memory beyond the faults may be in huge pages (or inherited by
// a fork). Reading Pss of small pages makes a process wait that maps memory meanwhile.
bool TreeSampler::may_have_huge_pages() const {
  uint64_t beyond_faults = 0;
  for (const TrackedProcess& tracked : tracked_) {
    const uint64_t pages = tracked.status.rss_anon / kPageBytes;
    const uint64_t faults = read_minor_faults(tracked.pid, options_.root);
    beyond_faults += (pages - std::min(pages, faults)) * kPageBytes;
  }
  return beyond_faults > step_of(rss_sum());
}

void TreeSampler::read_pss_of(TrackedProcess& tracked, Estimate& to) {
  const auto sums = read_mapping_sums(tracked.pid, options_.root);
  if (!sums) {
    const auto status = read_status(tracked.pid, options_.root);
    if (!status || !status->is_alive || status->peak_rss == 0) return;  // it ends, without memory
  }
  // Where Pss can't be read (old kernels, another user), shared pages count in full.
  to.pss_anon = sums ? sums->pss_anon : tracked.status.rss_anon;
  to.pss_shmem = sums ? sums->pss_shmem : tracked.status.rss_shmem;
  if (!sums || !tracked.process) return;
  auto& most = processes_[*tracked.process].huge_page_bytes;
  most = std::max(most.value_or(0), sums->huge_pages);
}

// Begins an exact reading, or goes on with it. The old estimates stay until all processes are
// read: of a parent and its child that share pages, a new one alone would count too little.
void TreeSampler::read_exact(int64_t cpu_before) {
  const bool is_first = !is_reading_exact_;
  if (is_first) {
    for (TrackedProcess& tracked : tracked_) tracked.is_due = true;
  }
  is_reading_exact_ = false;
  bool has_read = false;
  for (TrackedProcess& tracked : tracked_) {
    // After its exec the estimate is its RssAnon.
    if (tracked.may_be_in_parents) tracked.is_due = false;
    if (!tracked.is_due) continue;
    is_reading_exact_ = has_read && !may_go_on(cpu_before);
    if (is_reading_exact_) break;
    has_read = true;
    tracked.is_due = false;
    tracked.next = tracked.estimate;
    read_pss_of(tracked, *tracked.next);
    if (const auto status = read_status(tracked.pid, options_.root); status && status->is_alive) {
      take_status(tracked, *status);
      tracked.estimate.note_freed(tracked.status.rss_anon);
    }
    tracked.next->anon_then = tracked.status.rss_anon;
    tracked.faults_at_next = tracked.faults_since;
    if (tracked.process) give_rank(tracked);
  }
  if (is_first) {
    rss_at_exact_ = rss_sum();
    exact_at_ns_ = then_ns_;
  }
  if (!is_reading_exact_) finish_exact();
}

void TreeSampler::finish_exact() {
  faults_since_ = 0;
  for (TrackedProcess& tracked : tracked_) {
    if (!tracked.next) continue;
    tracked.estimate = *std::exchange(tracked.next, std::nullopt);
    tracked.is_unread = false;
    tracked.faults_since -= std::min(tracked.faults_since, tracked.faults_at_next);
    faults_since_ += tracked.faults_since;
  }
  families_read_.clear();
  fork_copies_.clear();
}

// Begins a reading of copies, or goes on with it.
void TreeSampler::read_copies(int64_t cpu_before) {
  bool has_read = false;
  bool is_complete = true;
  const auto may_read = [&](int family) {
    const auto& read = families_read_;
    if (std::find(read.begin(), read.end(), family) != read.end()) return false;
    if (has_read && !may_go_on(cpu_before)) is_complete = false;
    if (!is_complete) return false;
    has_read = true;
    families_read_.push_back(family);
    return true;
  };
  for (const ForkCopies& copy : read_fork_copies(options_.root_pid, options_.root, may_read)) {
    fork_copies_.push_back(copy);
  }
  if (!is_complete) return;
  owed_ = Owed::nothing;
  families_read_.clear();
  note_copies(std::exchange(fork_copies_, {}));
}

void TreeSampler::note_copies(const std::vector<ForkCopies>& copies) {
  uint64_t sum = 0;
  for (TrackedProcess& tracked : tracked_) tracked.copied_bytes = 0;
  for (const ForkCopies& copy : copies) {
    sum += copy.bytes;
    const auto at =
        std::find_if(tracked_.begin(), tracked_.end(),
                     [&](const TrackedProcess& tracked) { return tracked.pid == copy.pid; });
    if (at != tracked_.end()) at->copied_bytes = copy.bytes;
  }
  if (sum <= most_copies_) return;
  most_copies_ = sum;
  for (WatchedProcess& process : processes_) process.cow_duplicate_bytes = process.forked_from = 0;
  for (const ForkCopies& copy : copies) {
    const auto at =
        std::find_if(tracked_.begin(), tracked_.end(),
                     [&](const TrackedProcess& tracked) { return tracked.pid == copy.pid; });
    if (at == tracked_.end() || !at->process || copy.bytes == 0) continue;
    processes_[*at->process].cow_duplicate_bytes = copy.bytes;
    processes_[*at->process].forked_from = copy.forked_from;
  }
}

// Reads the kinds of those processes that have changed most, while the allowed CPU time lasts; near
// the limit on credit.
void TreeSampler::read_kinds(int64_t now, int64_t cpu_before) {
  std::vector<std::pair<uint64_t, TrackedProcess*>> due;
  for (TrackedProcess& tracked : tracked_) {
    const uint64_t rss = tracked.rss_bytes();
    const uint64_t change = distance(rss, tracked.rss_at_kinds);
    const int64_t age_ns = now - tracked.kinds_at_ns;
    if (tracked.may_be_in_parents || change == 0) continue;
    const bool has_grown = change > std::max(kLeastChange, rss / 64) && age_ns >= kKindsEveryNs;
    const bool is_old = tracked.kinds && age_ns >= kOldKindsNs;
    if (has_grown || is_old) due.emplace_back(change, &tracked);
  }
  std::sort(due.begin(), due.end(), std::greater<>());
  const double rest_ns = is_near_limit() ? -kMaxDebtNs : kAmpleNs / 2;
  for (const auto& [change, tracked] : due) {
    const int64_t cpu_now = options_.cpu_ns();
    const int64_t cost = cpu_now - cpu_before + tracked->kinds_cost_ns;
    if (!allowance_.leaves(rest_ns, static_cast<double>(cost))) return;
    tracked->rss_at_kinds = tracked->rss_bytes();
    tracked->kinds_at_ns = now;
    if (auto kinds = read_memory_kinds(tracked->pid, options_.root)) tracked->kinds = *kinds;
    tracked->kinds_cost_ns = options_.cpu_ns() - cpu_now;
  }
}

}  // namespace modicum
