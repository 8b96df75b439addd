// Ranges that forked children don't get.
//
// The kernel leaves a mapping marked MADV_DONTFORK out of a child, which leaves a hole there: any
// later mapping of the child may fill it, and who still has the address reads that one's bytes. A
// handler that runs in the child before fork() returns reserves every such range at once, without
// access, so that nothing else is ever found there.
//
// fork() is the process's, and so is the table of ranges: this is the one place of global state. It
// takes no lock, because a lock that another thread held at the fork would stay locked in the
// child.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

namespace modicum {

struct ExcludedRange;

// Keeps a mapped range out of processes that are forked while it lives. Move-only. Any thread.
class Exclusion {
 public:
  Exclusion() = default;
  // Whole pages. NOMEM where the kernel refuses, as it does for a driver's memory.
  explicit Exclusion(std::span<std::byte> range);

  // Before the range is unmapped: forgets it. What the kernel was told stays.
  void end() noexcept { row_.reset(); }
  // Before the range goes to another use: children inherit it again. In a child that has only the
  // reservation, zero pages take its place.
  void undo() noexcept;

 private:
  struct Free {
    void operator()(ExcludedRange* row) const noexcept;
  };
  std::unique_ptr<ExcludedRange, Free> row_;
};

// Whether `address` lies in a range that this process has only as a reservation, because it was
// forked while the range was excluded.
bool is_excluded_here(const void* address) noexcept;
// Whether there is any such range.
bool has_exclusions_here() noexcept;

}  // namespace modicum
