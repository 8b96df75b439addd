#include "modicum/training/save_grace.h"

#include <algorithm>
#include <atomic>

namespace modicum {
namespace {

// Time to write and sync the record, COMMIT and the directories.
constexpr int64_t kCommitNs = 1 * kNsPerSecond;
// Safety factor, since the speed of a disk varies.
constexpr double kMargin = 1.25;

}  // namespace

// What a rank stores in begin(). Shared memory is zero at first.
struct SaveGrace::Begin {
  std::atomic<uint64_t> progress;  // of the rank on the board at that time
  std::atomic<int64_t> at_ns;
  std::atomic<uint32_t> has_begun;
};

SaveGrace::SaveGrace(int64_t grace_ns, uint64_t bytes, const SharedBoard& board, Clock& clock)
    : grace_ns_(grace_ns),
      bytes_(bytes),
      board_(board),
      clock_(clock),
      begins_(Mapping::shared(static_cast<uint64_t>(board.ranks()) * sizeof(Begin))) {}

SaveGrace::Begin& SaveGrace::begin_of(int rank) const noexcept {
  return reinterpret_cast<Begin*>(begins_.bytes().data())[rank];
}

void SaveGrace::begin(int rank) const noexcept {
  Begin& begin = begin_of(rank);
  begin.progress.store(board_.progress(rank));
  begin.at_ns.store(clock_.now_ns());
  begin.has_begun.store(1);
}

std::optional<int64_t> SaveGrace::rest_ns() const {
  uint64_t written = 0;
  int64_t began_ns = INT64_MAX;
  for (int rank = 0; rank < board_.ranks(); ++rank) {
    const Begin& begin = begin_of(rank);
    if (begin.has_begun.load() == 0) return std::nullopt;
    written += board_.progress(rank) - begin.progress.load();
    began_ns = std::min(began_ns, begin.at_ns.load());
  }
  if (written == 0) return std::nullopt;
  const auto left = static_cast<double>(bytes_ - std::min(bytes_, written));
  const auto passed_ns = static_cast<double>(clock_.now_ns() - began_ns);
  const double rest_ns = kMargin * left * passed_ns / static_cast<double>(written);
  // 1e18 ns (30 years) keeps the sum within int64_t.
  return static_cast<int64_t>(std::min(rest_ns, 1e18)) + kCommitNs;
}

int64_t SaveGrace::granted_ns() {
  if (!granted_ns_) {
    const auto rest = rest_ns();
    granted_ns_ = rest && *rest <= grace_ns_ ? grace_ns_ : 0;
    granted_at_ns_ = clock_.now_ns();
  }
  return *granted_ns_;
}

bool SaveGrace::is_over() {
  const int64_t granted = granted_ns();
  return clock_.now_ns() - granted_at_ns_ >= granted;
}

}  // namespace modicum
