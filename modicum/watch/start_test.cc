#include "modicum/watch/start.h"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <string>

namespace modicum {
namespace {

std::string refusal(const std::string& word, const std::string& entry) {
  const WatchTask task{.command = {word}};
  try {
    start_command({.task = task, .entry = entry, .reports = ""}, [] {});
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), Category::io);
    return error.what_happened();
  }
  return "";
}

// A cgroup that another program has removed, and one that takes no more processes.
TEST(StartCommand, AMemoryCgroupThatCannotBeEnteredIsNamed) {
  EXPECT_EQ(refusal("true", "/no/such/group/cgroup.procs"),
            "cannot start 'true': it cannot enter its memory cgroup: write "
            "/no/such/group/cgroup.procs: No such file or directory");
  EXPECT_EQ(refusal("true", "/dev/full"),
            "cannot start 'true': it cannot enter its memory cgroup: write /dev/full: "
            "No space left on device");
}

TEST(StartCommand, ACommandThatDoesNotExistIsNamed) {
  EXPECT_EQ(refusal("no-such-command", ""),
            "cannot start 'no-such-command': No such file or directory");
  EXPECT_EQ(refusal("no-such-command", "/dev/null"),
            "cannot start 'no-such-command': No such file or directory");
}

TEST(StartCommand, TheCommandRuns) {
  const WatchTask task{.command = {"sh", "-c", "exit 7"}};
  const int pid = start_command({.task = task, .entry = "", .reports = ""}, [] {});
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_EQ(WEXITSTATUS(status), 7);
}

}  // namespace
}  // namespace modicum
