#include "modicum/io/shared_pages.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include "modicum/base/base.h"
#include "modicum/io/temp_dir_double.h"

namespace modicum {
namespace {

// Catches: `open` accepts an ordinary file of the right size; mapped memory can be truncated; a
// mark of one process counts for all.

constexpr uint64_t kBytes = 4 * kPageBytes;

TEST(SharedPages, AreTheSameInAllProcesses) {
  const SharedPages pages = SharedPages::make(kBytes);
  ASSERT_EQ(pages.bytes().size(), kBytes);
  const pid_t child = fork();
  if (child == 0) {
    const auto opened = SharedPages::open(pages.path(), kBytes);
    if (!opened) _exit(1);
    opened->bytes()[77] = std::byte{5};
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(pages.bytes()[77], std::byte{5});
  EXPECT_FALSE(SharedPages::open(pages.path(), 2 * kBytes).has_value()) << "of another size";
}

// Waits until a byte can be read from the pipe `fd`.
void await(int fd) {
  char byte = 0;
  ASSERT_EQ(read(fd, &byte, 1), 1);
}

TEST(SharedPages, AreMarkedUntilAnotherProgramIsStarted) {
  const SharedPages pages = SharedPages::make(kBytes);
  int from_child[2], go_on[2];  // pipes from the child and to the child
  ASSERT_EQ(pipe(from_child), 0);
  ASSERT_EQ(pipe(go_on), 0);
  const pid_t child = fork();
  if (child == 0) {
    const auto opened = SharedPages::open(pages.path(), kBytes);
    if (!opened || !opened->mark()) _exit(1);
    if (fork() == 0) _exit(0);  // closes inherited descriptors, which must not release the mark
    wait(nullptr);
    static_cast<void>(!write(from_child[1], "m", 1));
    char byte = 0;
    static_cast<void>(!read(go_on[0], &byte, 1));
    dup2(from_child[1], STDOUT_FILENO);
    dup2(go_on[0], STDIN_FILENO);
    execlp("sh", "sh", "-c", "printf x; read line", nullptr);
    _exit(1);
  }
  await(from_child[0]);
  EXPECT_TRUE(pages.is_marked_by(child));
  EXPECT_FALSE(pages.is_marked_by(child + 1));
  ASSERT_EQ(write(go_on[1], "g", 1), 1);
  await(from_child[0]);
  EXPECT_FALSE(pages.is_marked_by(child)) << "the child runs another program";
  ASSERT_EQ(write(go_on[1], "\n", 1), 1);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  for (const int fd : {from_child[0], from_child[1], go_on[0], go_on[1]}) close(fd);
}

TEST(SharedPages, CannotBeTruncated) {
  const SharedPages pages = SharedPages::make(kBytes);
  EXPECT_NE(::truncate(pages.path().c_str(), kPageBytes), 0);
}

TEST(SharedPages, OtherFilesAreNotOpened) {
  const TempDir temp;
  const std::string path = temp / "not-shared";
  std::ofstream(path) << std::string(kBytes, 'x');
  EXPECT_FALSE(SharedPages::open(path, kBytes).has_value());
  ::unlink(path.c_str());
  EXPECT_FALSE(SharedPages::open(path, kBytes).has_value()) << "no such file";
  EXPECT_FALSE(SharedPages::open("", kBytes).has_value());
  EXPECT_FALSE(SharedPages::open("/dev/zero", kBytes).has_value());
  EXPECT_FALSE(SharedPages::open("/tmp", kBytes).has_value());
}

TEST(SharedPages, AFifoIsNotWaitedFor) {
  const TempDir temp;
  const std::string path = temp / "fifo";
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  EXPECT_FALSE(SharedPages::open(path, kBytes).has_value());
}

}  // namespace
}  // namespace modicum
