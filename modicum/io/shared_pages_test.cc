#include "modicum/io/shared_pages.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include "modicum/base/base.h"

namespace modicum {
namespace {

// House test. It catches these mutations: a file of the user's that is accepted; memory that can be
// truncated under its writers.

constexpr uint64_t kBytes = 4 * kPageBytes;

TEST(SharedPages, AreTheSameInAllProcesses) {
  const SharedPages made = SharedPages::make(kBytes);
  ASSERT_EQ(made.bytes().size(), kBytes);
  const pid_t child = fork();
  if (child == 0) {
    const auto opened = SharedPages::open(made.path(), kBytes);
    if (!opened) _exit(1);
    opened->bytes()[77] = std::byte{5};
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(made.bytes()[77], std::byte{5});
  EXPECT_FALSE(SharedPages::open(made.path(), 2 * kBytes).has_value()) << "of another size";
}

TEST(SharedPages, CannotBeTruncated) {
  const SharedPages made = SharedPages::make(kBytes);
  EXPECT_NE(::truncate(made.path().c_str(), kPageBytes), 0);
}

TEST(SharedPages, OtherFilesAreNotOpened) {
  const std::string path = testing::TempDir() + "modicum-not-shared";
  std::ofstream(path) << std::string(kBytes, 'x');
  EXPECT_FALSE(SharedPages::open(path, kBytes).has_value());
  ::unlink(path.c_str());
  EXPECT_FALSE(SharedPages::open(path, kBytes).has_value()) << "no such file";
  EXPECT_FALSE(SharedPages::open("", kBytes).has_value());
  EXPECT_FALSE(SharedPages::open("/dev/zero", kBytes).has_value());
  EXPECT_FALSE(SharedPages::open("/tmp", kBytes).has_value());
}

TEST(SharedPages, AFifoIsNotWaitedFor) {
  const std::string path = testing::TempDir() + "modicum-fifo";
  ::unlink(path.c_str());
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  EXPECT_FALSE(SharedPages::open(path, kBytes).has_value());
  ::unlink(path.c_str());
}

}  // namespace
}  // namespace modicum
