// Memory ranges that forked children do not inherit.
//
// MADV_DONTFORK alone leaves a hole in the child, which any later mapping may fill: code that still
// holds the address would read foreign bytes. A fork handler in the child therefore reserves every
// excluded range without access before fork() returns:
//
//   parent    |  heap  |  weights (excluded)  |  libs  |
//   child     |  heap  |  PROT_NONE           |  libs  |    access is a SIGSEGV, never foreign
//   bytes
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

  // To be called before the range is unmapped: removes it from the table, without a system call.
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

// Whether `address` lies in a range that is only reserved in this process, because a parent had
// excluded it at the fork.
bool is_excluded_here(const void* address) noexcept;
// Whether there is any such range.
bool has_exclusions_here() noexcept;

}  // namespace modicum
