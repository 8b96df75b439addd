// The file of --report, and a command that watches itself for it. Internal to `cli`.
#pragma once

#include <string>
#include <string_view>

#include "modicum/cli/verbs.h"
#include "modicum/io/io.h"

namespace modicum {

// A page that is written at the end of a run. An older file of that name is replaced then, and not
// before.
class PageFile {
 public:
  // Before the run: IO if the file could not be written.
  PageFile(FileSystem& files, const std::string& path);
  void write(const std::string& page);

 private:
  FileSystem& files_;
  const Replacement place_;
};

constexpr std::string_view kReportHelp =
    "run under `modicum watch`, and write memory over time by owner as an HTML file";
// Becomes `modicum watch --report REPORT -- modicum VERB ARGS`, ARGS without --report: one way only
// to record a run. IO if the program can't be started again.
[[noreturn]] void watch_instead(std::string_view verb, const Args& args, const std::string& report);

}  // namespace modicum
