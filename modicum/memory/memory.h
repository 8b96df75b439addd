// The door of `memory`: every model-sized byte is taken here, in somebody's name, for a purpose,
// within a limit.
//
// `Ledger::charge` is what maps memory: there is no Buffer without a Charge. Memory is committed
// when it is charged (every page written once, huge pages where the kernel allows them, in
// parallel) and, unless the caller asks otherwise, left out of forked children (Fork::excluded), so
// that nothing which depends on timing can change how much is held. What will be filled from end to
// end may be reserved instead: its pages come as they are filled, while the zeros that the kernel
// has written there are still in the CPU's cache. A Ledger must outlive its Charges and Buffers.
// Thread rules: a Ledger may be used from several threads; a Buffer is moved by one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <utility>

#include "modicum/base/base.h"
#include "modicum/memory/exclusion.h"  // IWYU pragma: export
#include "modicum/spec/spec.h"

namespace modicum {

class Ledger;

// An entry in the ledger; returned when it dies. Move-only. One of inherited memory counts the same
// bytes once more, as Purpose::fork: what children keep of it while this process writes anew.
class Charge {
 public:
  Charge() = default;

  uint64_t bytes() const noexcept { return ledger_ ? entry().bytes : 0; }
  Purpose purpose() const noexcept { return entry().purpose; }
  // A part of it as an entry of its own; nothing is booked anew.
  Charge split(uint64_t bytes);

 private:
  friend class Ledger;
  // As a deleter it returns the entry to the ledger, which it does not own.
  struct Entry {
    Purpose purpose;
    uint64_t bytes;
    bool is_copied;
    void operator()(Ledger* ledger) const noexcept;
  };
  Charge(Ledger* ledger, const Entry& entry) noexcept : ledger_(ledger, entry) {}
  const Entry& entry() const noexcept { return ledger_.get_deleter(); }
  std::unique_ptr<Ledger, Entry> ledger_;
};

// Pages of our own, unmapped when it dies. Move-only. Shared ones are for processes forked later.
class Mapping {
 public:
  Mapping() = default;

  // Whole pages, zero, not committed yet, seen by processes that are forked from now on. NOMEM.
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
  // Of whole pages; on a huge page's boundary where it is that large.
  static Mapping aligned(uint64_t bytes, Fork fork);
  std::unique_ptr<std::byte, Unmap> pages_;
};

// Charged, zeroed memory, committed or reserved, 2 MiB aligned where it is that large. Move-only.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept = default;
  Buffer& operator=(Buffer&& other) noexcept;
  std::span<std::byte> bytes() const noexcept { return mapping_.bytes(); }
  bool empty() const noexcept { return mapping_.bytes().empty(); }
  // The entry of a part that will be given up before the rest.
  Charge split(uint64_t bytes) { return charge_.split(bytes); }
  // Gives the pages that lie wholly in `part` back to the kernel. They read as zero from then on.
  // Not of shared memory, which children may still read.
  void give_up(std::span<std::byte> part) noexcept;

 private:
  friend class Ledger;
  Buffer(Charge charge, Mapping mapping) noexcept
      : charge_(std::move(charge)), mapping_(std::move(mapping)) {}
  Charge charge_;
  Mapping mapping_;  // dies first, so that no page outlives its entry
};

// The cancellation callback of a long call: every thread of the call polls it, before each 16 MiB
// of pages. An exception that it throws aborts the call.
using Poll = FunctionRef<void()>;
inline constexpr auto kNoPoll = [] {};  // never cancels

class Ledger {
 public:
  static constexpr uint64_t kNoLimit = UINT64_MAX;
  explicit Ledger(uint64_t limit_bytes = kNoLimit) : limit_bytes_(limit_bytes) {}
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  // Maps and commits `bytes` (rounded up to whole pages, which is what is charged) on `threads`
  // threads. Over the limit: BUDGET (expected is the limit, got what would be held, owners what
  // is), and nothing is mapped. The kernel refuses (NOMEM) or `poll` throws: the ledger
  // is as before. Zero bytes give an empty Buffer. `fork` says what forked children find there.
  // Inherited memory counts twice, see Charge; shared memory stays in the kernel until the last of
  // the processes that have it unmaps it.
  Buffer charge(Purpose purpose, uint64_t bytes, int threads = 1, Poll poll = kNoPoll,
                Fork fork = Fork::excluded);
  // Maps and books as `charge` does, with the same errors, and commits nothing: for who writes to
  // every page before anybody looks at what is held.
  Buffer reserve(Purpose purpose, uint64_t bytes, Fork fork = Fork::excluded);
  // Commits a part of a shared mapping, whole pages nobody has written to yet, and charges it. The
  // pages live as long as the Mapping does.
  Charge charge_shared(Purpose purpose, std::span<std::byte> part);
  // BUDGET, as `charge` would say it of `what`, where so much has no room beside what is held. For
  // memory that is taken in parts: all of it or nothing.
  void require_room(const Footprint& needed, std::string_view what) const;
  // Books memory that the caller owns; maps nothing.
  Charge adopt(Purpose purpose, uint64_t bytes);

  Footprint held() const { return locked(held_); }
  Footprint at_peak() const {
    return locked(at_peak_);
  }  // what was held when the total was highest
  uint64_t peak_bytes() const { return at_peak().total(); }
  // The most that was held since the last mark, or ever.
  void mark();
  uint64_t peak_since_mark() const { return locked(since_mark_); }
  uint64_t limit_bytes() const { return locked(limit_bytes_); }
  // From now on; what is held already may be more, and stays.
  void set_limit(uint64_t bytes);

 private:
  friend class Charge;
  Charge book(Purpose purpose, uint64_t bytes, bool is_copied = false);
  template <typename T>
  T locked(const T& member) const {
    const std::lock_guard lock(mutex_);
    return member;
  }

  uint64_t limit_bytes_;
  mutable std::mutex mutex_;
  Footprint held_;
  Footprint at_peak_;
  uint64_t since_mark_ = 0;
};

}  // namespace modicum
