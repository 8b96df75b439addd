// Locks of files between real processes. Catches: a lock that a forked child inherits, or ends; one
// that ends when the process reads its own file; a lock of a file that has been removed.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <functional>
#include <string>

#include "modicum/base/base.h"
#include "modicum/io/io.h"
#include "modicum/io/temp_dir_double.h"

namespace modicum {
namespace {

// Returns what `act` returns in a forked child.
bool is_true_in_child(const std::function<bool()>& act) {
  const pid_t child = fork();
  if (child == 0) _exit(act() ? 1 : 0);
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  return WEXITSTATUS(status) == 1;
}

struct LockedFiles : testing::Test {
  LockState state() { return files.look_at(path)->lock; }
  bool is_held_for_others() {
    return is_true_in_child([this] { return !files.lock(path) && state() == LockState::locked; });
  }

  const TempDir temp;
  const std::string path = temp / "file";
  PosixFileSystem files;
};

TEST_F(LockedFiles, AreLockedByOneProcess) {
  EXPECT_FALSE(files.look_at(path).has_value());
  std::unique_ptr<LockedFile> file = files.lock(path);
  ASSERT_TRUE(file && file->is_new() && file->is_exclusive());
  file->write("a longer text");
  file->write("text");
  EXPECT_TRUE(is_held_for_others());
  EXPECT_EQ(files.lock(path), nullptr) << "not twice in a process either";
  EXPECT_EQ(files.look_at(path)->text, "text");
  EXPECT_EQ(state(), LockState::locked);
  EXPECT_TRUE(is_held_for_others()) << "reading the file has ended its lock";
  file.reset();
  EXPECT_EQ(state(), LockState::free);
  file = files.lock(path);
  ASSERT_TRUE(file && !file->is_new());
}

TEST_F(LockedFiles, AForkedChildNeitherHasNorEndsTheLock) {
  std::unique_ptr<LockedFile> file = files.lock(path);
  EXPECT_TRUE(is_true_in_child([&] {
    const bool is_held = state() == LockState::locked;
    file.reset();  // the child's copy
    return is_held && state() == LockState::locked;
  }));
  EXPECT_TRUE(is_held_for_others());
}

TEST_F(LockedFiles, AForkedChildSeesTheEndOfItsParentsLock) {
  std::unique_ptr<LockedFile> file = files.lock(path);
  int ended[2];
  ASSERT_EQ(pipe(ended), 0);
  const pid_t child = fork();
  if (child == 0) {
    char byte = 0;
    if (read(ended[0], &byte, 1) != 1) _exit(1);
    const bool is_free = state() == LockState::free;
    _exit(is_free && files.lock(path) ? 0 : 1);
  }
  file.reset();
  ASSERT_EQ(write(ended[1], "x", 1), 1);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

// Waits until the other end of a pipe is closed.
void wait_for_end(int fd) {
  char byte = 0;
  EXPECT_EQ(read(fd, &byte, 1), 0);
  close(fd);
}

TEST_F(LockedFiles, TheLockEndsWithItsProcessAlthoughAChildLives) {
  int to_child[2], of_child[2];
  ASSERT_EQ(pipe(to_child), 0);
  ASSERT_EQ(pipe(of_child), 0);
  const pid_t owner = fork();
  if (owner == 0) {
    const std::unique_ptr<LockedFile> file = files.lock(path);
    if (fork() == 0) {
      close(to_child[1]);
      close(of_child[0]);
      char byte = 0;
      static_cast<void>(read(to_child[0], &byte, 1));  // until the test has read the file
      _exit(0);
    }
    _exit(file ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(owner, &status, 0), owner);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(state(), LockState::free);
  EXPECT_NE(files.lock(path), nullptr);
  close(to_child[1]);
  close(to_child[0]);
  close(of_child[1]);
  wait_for_end(of_child[0]);
}

TEST_F(LockedFiles, AKilledProcessHasNoLock) {
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t owner = fork();
  if (owner == 0) {
    const std::unique_ptr<LockedFile> file = files.lock(path);
    if (write(ready[1], "x", 1) != 1) _exit(1);
    while (true) pause();
  }
  char byte = 0;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  EXPECT_EQ(state(), LockState::locked);
  EXPECT_EQ(files.lock(path), nullptr);
  ASSERT_EQ(kill(owner, SIGKILL), 0);
  ASSERT_EQ(waitpid(owner, nullptr, 0), owner);
  EXPECT_EQ(state(), LockState::free);
}

TEST_F(LockedFiles, AFileThatWasRemovedIsMadeAgain) {
  const std::unique_ptr<LockedFile> removed = files.lock(path);
  files.remove(path);
  const std::unique_ptr<LockedFile> lock = files.lock(path);
  ASSERT_TRUE(lock && lock->is_new());
  EXPECT_TRUE(is_held_for_others());
}

TEST_F(LockedFiles, LinksAndFifosAreNotLocked) {
  std::filesystem::create_symlink(temp / "other", path);
  EXPECT_THROW(files.lock(path), Error);
  EXPECT_EQ(state(), LockState::unknown);
  EXPECT_FALSE(files.exists(temp / "other"));
  files.remove(path);
  ASSERT_EQ(mkfifo(path.c_str(), 0666), 0);
  EXPECT_THROW(files.lock(path), Error);
  EXPECT_EQ(state(), LockState::unknown);
}

TEST_F(LockedFiles, OfAFileThatCannotBeReadNothingIsKnown) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  const std::unique_ptr<LockedFile> file = files.lock(path);
  ASSERT_EQ(chmod(path.c_str(), 0600), 0);
  ASSERT_EQ(chmod(temp.path().c_str(), 0755), 0);
  EXPECT_TRUE(is_true_in_child([&] {
    return setuid(12345) == 0 && state() == LockState::unknown && !files.look_at(path)->mtime_ns;
  }));
}

TEST_F(LockedFiles, AreOfOneKernelOnALocalDisk) {
  EXPECT_TRUE(files.is_of_one_kernel(temp.path()));
  EXPECT_FALSE(files.is_of_one_kernel("/proc"));
  EXPECT_FALSE(files.is_of_one_kernel(temp / "nothing"));
}

}  // namespace
}  // namespace modicum
