// The file that --trace or --report names. Internal to `cli`.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "modicum/checkpoint/checkpoint.h"
#include "modicum/io/io.h"

namespace modicum {

// A result that is written at the end of a run. `write` replaces an existing file atomically. It
// writes directly to a pipe, a device or a descriptor.
class ResultFile {
 public:
  // Called before the run. Throws IO if the file can't be written. Error messages name `flag`.
  ResultFile(FileSystem& files, std::string_view flag, const std::string& path);
  void write(const std::string& text);

 private:
  FileSystem& files_;
  std::optional<OutputStream> stream_;  // for a pipe, a device or a descriptor
  const Replacement place_;             // for a file
};

}  // namespace modicum
