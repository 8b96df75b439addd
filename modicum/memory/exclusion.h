// Memory ranges that forked children do not inherit.
//
// MADV_DONTFORK alone leaves the addresses free in the child, so that a later mapping may take
// them: code that still holds the address would read foreign bytes. A fork handler in the child
// therefore reserves every excluded range without access before fork() returns:
//
//   parent    |  heap  |  weights (excluded)  |  libs  |
//   child     |  heap  |  PROT_NONE           |  libs  |    access raises SIGSEGV
//
// fork() acts on the process, so the table of ranges is global: the only global state here. It is
// lock-free, because a lock held by another thread at the fork would stay locked in the child.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

namespace modicum {

struct ExcludedRange;

// Excludes a mapped range from children forked while this object lives. Move-only. Any thread.
class Exclusion {
 public:
  Exclusion() = default;
  // `range` consists of whole pages. NOMEM if the kernel refuses, as it does for a driver's memory.
  explicit Exclusion(std::span<std::byte> range);

  // Removes the range from the table, without a system call. Call before it is unmapped.
  void end() noexcept { row_.reset(); }
  // Lets children inherit the range again. In a child, where the range is only reserved, maps zero
  // pages there.
  void undo() noexcept;

 private:
  struct Free {
    void operator()(ExcludedRange* row) const noexcept;
  };
  std::unique_ptr<ExcludedRange, Free> row_;
};

// Whether `address` is in a range that is only reserved in this process, because the parent had
// excluded it before the fork.
bool is_excluded_here(const void* address) noexcept;
// Whether there is any such range.
bool has_exclusions_here() noexcept;

}  // namespace modicum
