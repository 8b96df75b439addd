// The file of --trace or --report. Internal to `cli`.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "modicum/checkpoint/checkpoint.h"
#include "modicum/io/io.h"

namespace modicum {

// A result that is written at the end of a run. An older file of that name is replaced then, as a
// whole, and not before. Into what can't be replaced, a pipe or a device, the result is written.
class ResultFile {
 public:
  // Before the run: IO if it could not be written. `flag` named the path.
  ResultFile(FileSystem& files, std::string_view flag, const std::string& path);
  void write(const std::string& text);

 private:
  FileSystem& files_;
  std::optional<OutputStream> stream_;
  const Replacement place_;  // without a stream
};

}  // namespace modicum
