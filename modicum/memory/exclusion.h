// Memory ranges that forked children do not inherit.
//
// MADV_DONTFORK alone leaves the addresses free in the child. A later mapping may take them, and
// code that still holds an address would read foreign bytes. So a fork handler in the child
// reserves every excluded range without access before fork() returns:
//
//   parent    |  heap  |  weights (excluded)  |  libs  |
//   child     |  heap  |  PROT_NONE           |  libs  |    access raises SIGSEGV
//
// fork() acts on the process, so the table of ranges is global. It is lock-free, because a lock
// held by another thread at the fork would stay locked in the child.
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
  // `range` consists of whole pages. Throws NOMEM if the kernel refuses, for example if a part of
  // the range is not mapped.
  explicit Exclusion(std::span<std::byte> range);

  // Removes the range from the table, without a system call. Call this before unmapping the range.
  void end() noexcept { row_.reset(); }
  // Lets children inherit the range again. In a child, where the range is only reserved, this maps
  // zero pages there.
  void undo() noexcept;

 private:
  struct Free {
    void operator()(ExcludedRange* row) const noexcept;
  };
  std::unique_ptr<ExcludedRange, Free> row_;
};

// Whether `address` is in a range that an ancestor excluded before the fork and that is therefore
// only reserved in this process.
bool is_excluded_here(const void* address) noexcept;
// Whether there is, or has been, any such range in this process.
bool has_exclusions_here() noexcept;

}  // namespace modicum
