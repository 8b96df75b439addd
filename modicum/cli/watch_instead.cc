#include "modicum/cli/watch_instead.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "modicum/cli/output.h"
#include "modicum/cli/result_file.h"
#include "modicum/io/io.h"

namespace modicum {

void watch_instead(std::string_view verb, const Args& args, const std::string& report,
                   FileSystem& files) {
  constexpr std::string_view kFlag = "--report";
  // Checks that the page can be written, unless REPORT is a FIFO, a device or a descriptor: the
  // reader of a FIFO would see its end when the check closes it.
  if (!OutputStream::is_at(report)) static_cast<void>(ResultFile(files, kFlag, report));
  const std::string program = files.link_target("/proc/self/exe");
  Args words = {"modicum", "watch", "--quiet", "--tied", std::string(kFlag), report, "--", program};
  words.emplace_back(verb);
  for (size_t i = 0; i < args.size(); ++i) {
    if (args[i] == kFlag) {
      ++i;  // skips its value, too
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
