#include "modicum/memory/exclusion.h"

#include <fmt/format.h>
#include <pthread.h>
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <memory>
#include <system_error>

#include "modicum/base/base.h"

namespace modicum {

// A row of the table. `begin` is stored last and cleared first, so that a fork at any moment sees a
// complete row or none.
struct ExcludedRange {
  static constexpr uintptr_t kFree = 0;
  static constexpr uintptr_t kClaimed = 1;

  std::atomic<uintptr_t> begin{kFree};
  std::atomic<size_t> size{0};
  // An ancestor excluded the range before the fork: here only its addresses are reserved.
  std::atomic<bool> is_reservation{false};

  bool is_live() const noexcept { return begin.load(std::memory_order_acquire) > kClaimed; }
  void* address() const noexcept {
    return reinterpret_cast<void*>(begin.load(std::memory_order_acquire));
  }
};

namespace {

// Blocks of rows are added and never removed, so that walking them needs no lock.
struct Block {
  std::array<ExcludedRange, 64> rows;
  std::atomic<Block*> next{nullptr};
};

Block first_block;
std::atomic<bool> has_reservations{false};

template <typename Function>
void for_each_live_range(const Function& function) noexcept {
  for (Block* block = &first_block; block != nullptr; block = block->next) {
    for (ExcludedRange& row : block->rows) {
      if (row.is_live()) function(row);
    }
  }
}

// Runs in the child before fork() returns. Must not take a lock.
void reserve_ranges() noexcept {
  const int error = errno;
  for_each_live_range([](ExcludedRange& row) {
    if (row.is_reservation) return;  // made by an earlier fork and inherited
    // If another library's fork handler has mapped memory there already, that mapping stays.
    // The row still records that the excluded bytes are absent.
    static_cast<void>(::mmap(row.address(), row.size, PROT_NONE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1,
                             0));
    row.is_reservation = true;
    has_reservations = true;
  });
  errno = error;
}

// Registered during static initialisation, before any Exclusion can exist.
[[maybe_unused]] const int kResult = ::pthread_atfork(nullptr, nullptr, reserve_ranges);

Block* block_after(Block& block) {
  if (Block* const next = block.next) return next;
  auto created = std::make_unique<Block>();
  Block* expected = nullptr;
  if (!block.next.compare_exchange_strong(expected, created.get())) return expected;
  return created.release();
}

ExcludedRange* claim_row() {
  for (Block* block = &first_block;; block = block_after(*block)) {
    for (ExcludedRange& row : block->rows) {
      uintptr_t expected = ExcludedRange::kFree;
      if (row.begin.compare_exchange_strong(expected, ExcludedRange::kClaimed)) return &row;
    }
  }
}

}  // namespace

// Adds the row before madvise: a child forked in between inherits the pages. In the other order it
// would have neither the pages nor a reservation of their addresses.
Exclusion::Exclusion(std::span<std::byte> range) : row_(claim_row()) {
  row_->size = range.size();
  row_->is_reservation = false;
  row_->begin.store(reinterpret_cast<uintptr_t>(range.data()), std::memory_order_release);
  if (::madvise(range.data(), range.size(), MADV_DONTFORK) == 0) return;
  fail(Category::no_memory, fmt::format("cannot exclude {} bytes from forked children: {}",
                                        range.size(), std::generic_category().message(errno)));
}

void Exclusion::Free::operator()(ExcludedRange* row) const noexcept {
  row->begin.store(ExcludedRange::kFree, std::memory_order_release);
}

void Exclusion::undo() noexcept {
  if (!row_) return;
  void* const begin = row_->address();
  const size_t size = row_->size;
  if (row_->is_reservation) {
    static_cast<void>(::mmap(begin, size, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0));
  } else {
    static_cast<void>(::madvise(begin, size, MADV_DOFORK));
  }
  end();
}

bool is_excluded_here(const void* address) noexcept {
  if (!has_reservations) return false;
  const auto at = reinterpret_cast<uintptr_t>(address);
  bool found = false;
  for_each_live_range([&](const ExcludedRange& row) {
    const uintptr_t begin = row.begin;
    found = found || (row.is_reservation && at >= begin && at - begin < row.size);
  });
  return found;
}

bool has_exclusions_here() noexcept { return has_reservations; }

}  // namespace modicum
