// Output that can only be appended to: a pipe, a terminal, an open descriptor. Part of the public
// header of `io`.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "modicum/io/descriptor.h"

namespace modicum {

class OutputStream {
 public:
  // Whether the path names a descriptor of this process (/dev/stdout, /dev/stderr, /dev/fd/N or
  // /proc/self/fd/N), a FIFO or a character device. Symbolic links are followed.
  static bool is_at(const std::string& path);
  // nullopt unless is_at(path). Throws IO if the path can't be opened or a descriptor is not open
  // for writing. Never waits: a FIFO without a reader throws IO (ENXIO).
  static std::optional<OutputStream> open(const std::string& path);

  // Writes all of `text`; waits while the pipe is full. Throws NOSPACE or IO.
  void write(std::string_view text);

 private:
  OutputStream(Descriptor descriptor, std::string name)
      : descriptor_(std::move(descriptor)), name_(std::move(name)) {}

  Descriptor descriptor_;
  std::string name_;  // base name, for errors
};

}  // namespace modicum
