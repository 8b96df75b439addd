// Output that can only be written from begin to end: a pipe, a terminal, an open descriptor. Part
// of the door of `io`.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "modicum/io/descriptor.h"

namespace modicum {

class OutputStream {
 public:
  // Whether the path names a descriptor of this process (/dev/stdout, /dev/stderr, /dev/fd/N or
  // /proc/self/fd/N), or else a FIFO or character device; links are followed.
  static bool is_at(const std::string& path);
  // nullopt for any other path. IO if it can't be written, or is a FIFO without a reader, which is
  // not waited for.
  static std::optional<OutputStream> open(const std::string& path);

  // Waits for the reader. IO, NOSPACE.
  void write(std::string_view text);

 private:
  OutputStream(Descriptor descriptor, std::string name)
      : descriptor_(std::move(descriptor)), name_(std::move(name)) {}

  Descriptor descriptor_;
  std::string name_;  // base name, for errors
};

}  // namespace modicum
