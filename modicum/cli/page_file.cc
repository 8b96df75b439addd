#include "modicum/cli/page_file.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "modicum/cli/output.h"

namespace modicum {
namespace {

Replacement place_of(const std::string& path) {
  const std::string name = base_name(path);
  const size_t end = path.find_last_of('/');
  const std::string directory = end == std::string::npos ? "." : path.substr(0, end + 1);
  return {directory, name, fmt::format(".{}.{}.part", name, getpid())};
}

}  // namespace

PageFile::PageFile(FileSystem& files, const std::string& path)
    : files_(files), place_(place_of(path)) {
  // Renaming a file to it would replace a device or a link.
  if (files_.is_directory(path)) {
    fail(Category::io, "--report names a directory", {.file = place_.name});
  }
  if (files_.exists(path)) {
    files_.open_to_write(path)->close();
    if (!files_.link_target(path).empty()) {
      fail(Category::io, "--report names a symbolic link", {.file = place_.name});
    }
  }
  const std::string temporary = join_path(place_.directory, place_.temporary);
  files_.create(temporary)->close();
  files_.remove(temporary);
}

void PageFile::write(const std::string& page) { replace_durably(files_, place_, page); }

void watch_instead(std::string_view verb, const Args& args, const std::string& report) {
  PosixFileSystem files;
  static_cast<void>(PageFile(files, report));
  constexpr std::string_view kFlag = "--report";
  const std::string program = files.link_target("/proc/self/exe");
  Args words = {"modicum", "watch", "--quiet", std::string(kFlag), report, "--", program};
  words.emplace_back(verb);
  for (size_t i = 0; i < args.size(); ++i) {
    if (args[i] == kFlag) {
      ++i;  // and its value
    } else if (!args[i].starts_with(std::string(kFlag) + "=")) {
      words.push_back(args[i]);
    }
  }
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  restore_signal_actions();
  execv(program.c_str(), pointers.data());
  fail(Category::io,
       fmt::format("can't start the program again: {}", std::generic_category().message(errno)));
}

}  // namespace modicum
