// Zeroed memory that processes without a common ancestor can map, by a path. Part of the door of
// `io`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace modicum {

// The path is /proc/PID/fd/N of the maker: the memory has no name in a file system that a killed
// maker would leave behind. It is sealed, so that it can't be truncated and no store into it fails.
// It lives until the last process unmaps it. Move-only.
class SharedPages {
 public:
  // IO if the kernel refuses.
  static SharedPages make(uint64_t bytes);
  // Memory of this size that another process of this user has made. nullopt for any other path or
  // file, which is neither written nor waited for.
  static std::optional<SharedPages> open(const std::string& path, uint64_t bytes) noexcept;
  SharedPages(SharedPages&& other) noexcept;
  SharedPages& operator=(SharedPages&&) = delete;
  ~SharedPages();

  std::span<std::byte> bytes() const noexcept { return memory_; }
  std::string path() const;  // to be opened while this object lives; of the maker only

  // Marks the memory as used by this process, until it ends, starts another program (exec) or
  // closes the memory's descriptor. False if the kernel refuses. Forked children are not marked.
  bool mark() const noexcept;
  // Whether another process has marked it. False as well if that can't be known.
  bool is_marked_by(int pid) const noexcept;

 private:
  SharedPages(int fd, std::span<std::byte> memory) noexcept : fd_(fd), memory_(memory) {}
  int fd_;
  std::span<std::byte> memory_;
};

}  // namespace modicum
