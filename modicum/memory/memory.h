// The public header of `memory`: every model-sized allocation is charged to a ledger, for a
// purpose, within a limit. There is no Buffer without a Charge:
//
//   charge(Purpose::shards, 5 MiB, threads)
//     book     held[shards] += 5 MiB      over the limit: BUDGET, nothing has been mapped
//     map      mmap, 2 MiB aligned        refused: NOMEM, held[shards] -= 5 MiB
//     commit   write every page once      refused or cancelled: munmap, held[shards] -= 5 MiB
//   ~Buffer    munmap, then held[shards] -= 5 MiB
//
// A ledger with a limit of 8 MiB:                       held    at_peak
//   a = charge(Purpose::shards, 4 MiB)                  4 MiB   4 MiB
//   b = charge(Purpose::staging, 2 MiB)                 6 MiB   6 MiB
//   b is destroyed                                      4 MiB   6 MiB
//   charge(Purpose::grad, 5 MiB): BUDGET, 1 MiB too little   4 MiB   6 MiB
//
// `charge` commits the pages (in parallel, huge pages where the kernel allows them), so that the
// resident set does not depend on timing. `reserve` leaves committing to the first write of a page.
// It is for memory that the caller fills from end to end: the page that the kernel has just zeroed
// is then still in the CPU's cache.
//
// Ownership: a Ledger must outlive its Charges and Buffers. Threads: several threads may use a
// Ledger at once; only one thread at a time may use a Charge, Mapping or Buffer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <utility>

#include "modicum/base/base.h"
#include "modicum/memory/exclusion.h"      // IWYU pragma: export
#include "modicum/memory/retained_heap.h"  // IWYU pragma: export
#include "modicum/memory/self_report.h"    // IWYU pragma: export
#include "modicum/spec/spec.h"

namespace modicum {

class Ledger;

// An entry in the ledger: bytes that count as held until the Charge is destroyed. Move-only. An
// entry for memory that forked children inherit counts its bytes twice, the second time as
// Purpose::fork: if this process writes to a page, the children keep a copy (copy-on-write).
class Charge {
 public:
  Charge() = default;

  uint64_t bytes() const noexcept { return ledger_ ? entry().bytes : 0; }
  Purpose purpose() const noexcept { return entry().purpose; }
  // Moves `bytes` of this entry into a new entry. The ledger's total does not change.
  Charge split(uint64_t bytes);

 private:
  friend class Ledger;
  // A deleter that returns the entry to the ledger and does not delete the ledger.
  struct Entry {
    Purpose purpose;
    uint64_t bytes;
    bool is_copied;  // counts twice: memory that forked children inherit
    void operator()(Ledger* ledger) const noexcept;
  };
  Charge(Ledger* ledger, const Entry& entry) noexcept : ledger_(ledger, entry) {}
  const Entry& entry() const noexcept { return ledger_.get_deleter(); }
  std::unique_ptr<Ledger, Entry> ledger_;
};

// Mapped pages, unmapped on destruction. Move-only.
class Mapping {
 public:
  Mapping() = default;

  // Zero pages shared with processes forked from now on; `bytes` is rounded up to whole pages.
  // Ledger::charge_shared commits them. Throws NOMEM.
  static Mapping shared(uint64_t bytes);
  std::span<std::byte> bytes() const noexcept {
    return {pages_.get(), pages_ ? pages_.get_deleter().size : 0};
  }

 private:
  friend class Ledger;
  struct Unmap {
    size_t size;
    Exclusion exclusion;
    void operator()(std::byte* data) noexcept;
  };
  Mapping(std::byte* data, size_t size) noexcept : pages_(data, Unmap{size, {}}) {}
  // `bytes` is a multiple of the page size. The mapping is aligned to 2 MiB if `bytes` is at least
  // 2 MiB.
  static Mapping aligned(uint64_t bytes, Fork fork);
  std::unique_ptr<std::byte, Unmap> pages_;
};

// Charged, zeroed memory, committed or reserved; aligned to 2 MiB if it is at least 2 MiB.
// Move-only.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept = default;
  Buffer& operator=(Buffer&& other) noexcept;
  std::span<std::byte> bytes() const noexcept { return mapping_.bytes(); }
  bool empty() const noexcept { return mapping_.bytes().empty(); }
  // Splits off the entry of a part that will be released before the rest (see `give_up`).
  Charge split(uint64_t bytes) { return charge_.split(bytes); }
  // Returns the pages that lie entirely in `part` to the kernel; they read as zero afterwards. Not
  // for shared memory, which children may still read.
  void give_up(std::span<std::byte> part) noexcept;

 private:
  friend class Ledger;
  Buffer(Charge charge, Mapping mapping) noexcept
      : charge_(std::move(charge)), mapping_(std::move(mapping)) {}
  Charge charge_;
  Mapping mapping_;  // destroyed first, so that no page outlives its entry
};

// The cancellation callback of a long call. Every thread of the call invokes it before each 16 MiB
// of pages. An exception that it throws ends the call.
using Poll = FunctionRef<void()>;
inline constexpr auto kNoPoll = [] {};  // never cancels

class Ledger {
 public:
  static constexpr uint64_t kNoLimit = UINT64_MAX;
  // `reporter` reports the entries to a watching process.
  explicit Ledger(uint64_t limit_bytes = kNoLimit, const Reporter& reporter = {})
      : limit_bytes_(limit_bytes), reporter_(reporter) {}
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  // Maps `bytes`, rounded up to whole pages, and commits them on `threads` threads. Zero bytes give
  // an empty Buffer. On failure `footprint` is unchanged and nothing stays mapped. Throws BUDGET
  // over the limit (`expected` is the limit, `got` the total that would be held, `owners` the
  // memory held now), NOMEM if the kernel refuses (`got` is the request, `owners` as for BUDGET),
  // and any exception of `poll`. `fork` decides what forked children see: no memory (excluded), the
  // same memory (shared; it stays in the kernel until the last process unmaps it) or a copy
  // (inherited; counts twice).
  Buffer charge(Purpose purpose, uint64_t bytes, int threads = 1, Poll poll = kNoPoll,
                Fork fork = Fork::excluded);
  // Like `charge`, but commits no page: for callers that write every page before they rely on the
  // pages being resident.
  Buffer reserve(Purpose purpose, uint64_t bytes, Fork fork = Fork::excluded);
  // Commits and charges a page-aligned part of a shared mapping that has not been written yet. The
  // pages live as long as the Mapping. Throws BUDGET or NOMEM.
  Charge charge_shared(Purpose purpose, std::span<std::byte> part);
  // Throws BUDGET, naming `what`, if `needed` and the memory held now together exceed the limit.
  // Called before allocations that consist of several charges.
  void require_room(const Footprint& needed, std::string_view what) const;
  // Books memory that the caller owns; maps nothing. Throws BUDGET.
  Charge adopt(Purpose purpose, uint64_t bytes);

  Footprint footprint() const { return locked(footprint_); }
  // The value of `footprint()` when its total was highest.
  Footprint at_peak() const { return locked(at_peak_); }
  uint64_t peak_bytes() const { return at_peak().total(); }
  // Starts a new measurement of `peak_since_mark`, the highest total since the last mark.
  void mark();
  uint64_t peak_since_mark() const { return locked(since_mark_); }
  uint64_t limit_bytes() const { return locked(limit_bytes_); }
  // Sets the limit of later charges. Memory already held stays, even if it exceeds `bytes`.
  void set_limit(uint64_t bytes);
  // The reporter, also used for phases (ReportedPhase) of the process.
  const Reporter& reporter() const noexcept { return reporter_; }

 private:
  friend class Charge;
  Charge book(Purpose purpose, uint64_t bytes, bool is_copied = false);
  Buffer map(Purpose purpose, uint64_t bytes, Fork fork);
  template <typename T>
  T locked(const T& member) const {
    const std::lock_guard lock(mutex_);
    return member;
  }

  uint64_t limit_bytes_;
  const Reporter reporter_;
  mutable std::mutex mutex_;
  Footprint footprint_;
  Footprint at_peak_;
  uint64_t since_mark_ = 0;
};

}  // namespace modicum
