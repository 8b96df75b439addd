#include "modicum/memory/self_report.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "modicum/base/base.h"
#include "modicum/memory/retained_heap.h"

namespace modicum {
namespace {

// Must change with the layout of the table.
constexpr uint64_t kMagic = 0x3330'5243'4944'4f4d;  // "MODICR03"

// For fields that the reader validates one by one, in any order.
constexpr auto kRelaxed = std::memory_order_relaxed;

int64_t now_ns() noexcept { return SteadyClock().now_ns(); }

// Takes over the slot of a phase that has ended, or an unused one; nullptr if there is none.
SelfReport::Phase* free_phase(SelfReport& report, uint64_t number) noexcept {
  for (size_t i = 0; i < SelfReport::kMaxPhases; ++i) {
    SelfReport::Phase& phase = report.phases[(number + i) % SelfReport::kMaxPhases];
    int64_t ended = phase.end_ns.load();
    if (ended != 0 && phase.end_ns.compare_exchange_strong(ended, 0)) return &phase;
  }
  return nullptr;
}

// The length of `name`, or of its longest begin of at most `most` bytes that does not end within a
// character of UTF-8.
size_t length_within(std::string_view name, size_t most) noexcept {
  if (name.size() <= most) return name.size();
  constexpr size_t kLongestCharacter = 4;
  for (size_t length = most; length + kLongestCharacter > most; --length) {
    const bool is_inside = (static_cast<unsigned char>(name[length]) & 0xc0U) == 0x80;
    if (!is_inside) return length;
  }
  return most;  // not UTF-8
}

}  // namespace

void ReportedName::set(std::string_view name) noexcept {
  std::array<char, sizeof words_> text{};
  std::memcpy(text.data(), name.data(), length_within(name, text.size() - 1));
  for (size_t i = 0; i < kWords; ++i) {
    uint64_t word = 0;
    std::memcpy(&word, text.data() + i * sizeof word, sizeof word);
    words_[i].store(word, kRelaxed);
  }
}

std::string ReportedName::text() const {
  std::array<char, sizeof words_> text{};
  for (size_t i = 0; i < kWords; ++i) {
    const uint64_t word = words_[i].load(kRelaxed);
    std::memcpy(text.data() + i * sizeof word, &word, sizeof word);
  }
  return {text.data(), strnlen(text.data(), text.size())};
}

SelfReports& SelfReports::make_in(std::span<std::byte> memory) {
  MODICUM_ASSERT(memory.size() >= sizeof(SelfReports));
  auto& reports = *reinterpret_cast<SelfReports*>(memory.data());
  reports.magic.store(kMagic);
  return reports;
}

SelfReports* SelfReports::find_in(std::span<std::byte> memory) noexcept {
  if (memory.size() < sizeof(SelfReports)) return nullptr;
  auto* const found = reinterpret_cast<SelfReports*>(memory.data());
  return found->magic.load() == kMagic ? found : nullptr;
}

SelfReport* SelfReports::claim(int pid, uint64_t baseline_bytes) noexcept {
  // An entry with this pid belongs to an ended process, or to this process before an exec.
  auto entry = std::find_if(pids.begin(), pids.end(), [pid](const std::atomic<int32_t>& owner) {
    return owner.load() == pid;
  });
  for (auto slot = pids.begin(); entry == pids.end() && slot != pids.end(); ++slot) {
    int32_t none = 0;
    if (slot->compare_exchange_strong(none, pid)) entry = slot;
  }
  if (entry == pids.end()) return nullptr;
  SelfReport& report = reports[static_cast<size_t>(entry - pids.begin())];
  report.begin_ns.store(0);
  report.rank.store(-1, kRelaxed);
  report.promised_phases.store(0, kRelaxed);
  report.baseline_bytes.store(baseline_bytes, kRelaxed);
  report.retained_heap_bytes.store(0, kRelaxed);
  report.budget_bytes.store(0, kRelaxed);
  for (auto& bytes : report.held_bytes) bytes.store(0, kRelaxed);
  report.phases_begun.store(0, kRelaxed);
  for (SelfReport::Phase& phase : report.phases) {
    phase.number.store(0, kRelaxed);
    phase.end_ns.store(-1, kRelaxed);
  }
  report.begin_ns.store(now_ns());
  return &report;
}

bool Reporter::is_on() const noexcept { return report_ != nullptr && pid_ == getpid(); }

void Reporter::add(Purpose purpose, uint64_t bytes) const noexcept {
  if (is_on()) report_->held_bytes[static_cast<size_t>(purpose)].fetch_add(bytes, kRelaxed);
}

void Reporter::remove(Purpose purpose, uint64_t bytes) const noexcept {
  if (is_on()) report_->held_bytes[static_cast<size_t>(purpose)].fetch_sub(bytes, kRelaxed);
}

void Reporter::set_budget(uint64_t bytes) const noexcept {
  if (is_on()) report_->budget_bytes.store(bytes, kRelaxed);
}

void Reporter::report_heap() const noexcept {
  if (is_on()) report_->retained_heap_bytes.store(retained_heap_bytes(), kRelaxed);
}

void Reporter::promise(const Promise& promise, int rank) const noexcept {
  if (!is_on()) return;
  report_->rank.store(rank, kRelaxed);
  report_->promised_phases.store(0);
  const size_t count = std::min(promise.phases.size(), SelfReport::kMaxPromised);
  for (size_t i = 0; i < count; ++i) {
    const Phase& phase = promise.phases[i];
    SelfReport::PromisedPhase& to = report_->promised[i];
    to.phase.set(phase.name);
    const Footprint& of_rank = phase.of_rank[static_cast<size_t>(rank)];
    for (size_t p = 0; p < kPurposes; ++p) to.bytes[p].store(of_rank.bytes[p], kRelaxed);
  }
  report_->promised_phases.store(static_cast<uint32_t>(count));
}

ReportedPhase::ReportedPhase(const Reporter& reporter, std::string_view name) noexcept
    : reporter_(reporter) {
  if (!reporter_.is_on()) return;
  const uint64_t number = reporter_.report_->phases_begun.fetch_add(1) + 1;
  phase_ = free_phase(*reporter_.report_, number);
  if (phase_ == nullptr) return;  // kMaxPhases phases have not ended
  phase_->number.store(0);
  phase_->name.set(name);
  phase_->begin_ns.store(now_ns(), kRelaxed);
  phase_->number.store(number);
  reporter_.report_heap();
}

void ReportedPhase::end() noexcept {
  if (phase_ != nullptr && reporter_.is_on()) {
    reporter_.report_heap();
    phase_->end_ns.store(now_ns());
  }
  phase_ = nullptr;
}

}  // namespace modicum
