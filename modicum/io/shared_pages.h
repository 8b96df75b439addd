// Zeroed memory that unrelated processes can map by a path. Part of the public header of `io`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace modicum {

// The memory's path is /proc/PID/fd/N of a process that has it, so no file is left behind if that
// process is killed. The memory is sealed against truncation, so no store into it raises SIGBUS.
// The kernel frees it once no process maps it or holds a descriptor of it. Move-only.
class SharedPages {
 public:
  // Throws IO or NOSPACE if the kernel refuses.
  static SharedPages make(uint64_t bytes);
  // Maps memory of this size that SharedPages::make has made, in any process. nullopt if it can't
  // be mapped, and for every file that has another size or is not sealed against truncation. `open`
  // neither writes to such a file nor blocks on it.
  static std::optional<SharedPages> open(const std::string& path, uint64_t bytes) noexcept;
  SharedPages(SharedPages&& other) noexcept;
  SharedPages& operator=(SharedPages&&) = delete;
  ~SharedPages();

  std::span<std::byte> bytes() const noexcept { return memory_; }
  // The path by which other processes `open` the memory, as long as this process has this object.
  std::string path() const;

  // Marks the memory as used by this process, until the process ends, starts another program (exec)
  // or closes any descriptor of the memory. Returns false if the kernel refuses. A forked child
  // does not inherit the mark.
  bool mark() const noexcept;
  // Whether another process, `pid`, has marked the memory. Also false if fcntl fails.
  bool is_marked_by(int pid) const noexcept;

 private:
  SharedPages(int fd, std::span<std::byte> memory) noexcept : fd_(fd), memory_(memory) {}
  int fd_;
  std::span<std::byte> memory_;
};

}  // namespace modicum
