// Removal of trees with links, cycles, pipes and immutable files, also while another thread swaps
// directories for links. Catches: a link that is followed, a descriptor or a directory that is
// left.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include "modicum/base/base.h"
#include "modicum/io/descriptor.h"
#include "modicum/io/io.h"
#include "modicum/io/temp_dir_double.h"

namespace modicum {
namespace {

namespace fs = std::filesystem;

// A directory next to the tree, to which links of the tree lead.
class TreeTest : public testing::Test {
 protected:
  TreeTest() {
    for (const char* name : {"outside/a/b", "tree"}) fs::create_directories(temp / name);
    for (const char* name : {"outside/x", "outside/a/y", "outside/a/b/z"}) {
      std::ofstream(temp / name) << name;
    }
    before = outside();
  }
  ~TreeTest() override { EXPECT_EQ(outside(), before); }

  // The paths outside, and the texts of the files.
  std::string outside() const {
    std::string all;
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(temp / "outside")) {
      if (!entry.is_regular_file()) continue;
      std::string text;
      std::getline(std::ifstream(entry.path()), text);
      all += fs::relative(entry.path(), temp.path()).string() + "=" + text + "\n";
    }
    return all;
  }

  // Adds `count` entries at random places below the tree.
  void grow(std::mt19937& random, int count) const {
    std::vector<std::string> directories{tree};
    for (int i = 0; i < count; ++i) {
      const auto any = [&] { return directories[random() % directories.size()]; };
      const std::string path = any() + "/." + std::to_string(i);
      const int kind = static_cast<int>(random() % 6);
      if (kind <= 1) directories.push_back((fs::create_directory(path), path));
      if (kind == 2) fs::create_directory_symlink(temp / "outside", path);
      if (kind == 3) fs::create_directory_symlink(any(), path);  // maybe a cycle
      if (kind == 4) static_cast<void>(::mkfifo(path.c_str(), 0600));
      if (kind == 5) std::ofstream(path) << "x";
    }
  }

  const TempDir temp;
  const std::string tree = temp / "tree";
  std::string before;  // outside()
  PosixFileSystem files;
};

TEST_F(TreeTest, RandomTreesAreRemovedAndNothingElse) {
  std::mt19937 random(1);
  const size_t descriptors = files.list("/proc/self/fd").size();
  for (int i = 0; i < 30; ++i) {
    fs::create_directories(tree);
    grow(random, 60);
    if (i % 2 == 0) {
      files.empty_directory(tree);
      ASSERT_TRUE(fs::is_empty(tree));
    } else {
      files.remove_tree(tree + "/");
      ASSERT_FALSE(files.entry(tree));
    }
    ASSERT_EQ(outside(), before);
  }
  EXPECT_EQ(files.list("/proc/self/fd").size(), descriptors);
}

TEST_F(TreeTest, ALinkIsRemovedAndNotEmptied) {
  for (const char* slash : {"", "/"}) {
    fs::create_directory_symlink(temp / "outside", temp / "link");
    EXPECT_TRUE(files.entry(temp / "link")->is_link);
    EXPECT_THROW(files.empty_directory((temp / "link") + slash), Error);
    files.remove_tree((temp / "link") + slash);
    EXPECT_FALSE(files.entry(temp / "link"));
  }
}

// Deeper than PATH_MAX and than the limit of descriptors.
TEST_F(TreeTest, DeepTreesNeedFewDescriptors) {
  std::string here = tree;
  const Descriptor start = Descriptor::open(".", O_RDONLY | O_DIRECTORY);
  ASSERT_EQ(::chdir(tree.c_str()), 0);
  for (int i = 0; i < 1500; ++i) {
    ASSERT_EQ(::mkdir("directory", 0700), 0);
    ASSERT_EQ(::chdir("directory"), 0);
  }
  ASSERT_EQ(::fchdir(start.get()), 0);
  files.remove_tree(tree);
  EXPECT_FALSE(files.entry(tree));
}

TEST_F(TreeTest, TheRestIsRemovedAfterAFailure) {
  std::ofstream(tree + "/kept") << "x";
  std::ofstream(tree + "/removed") << "x";
  const Descriptor kept = Descriptor::open((tree + "/kept").c_str(), O_RDONLY);
  int flags = FS_IMMUTABLE_FL;
  if (::ioctl(kept.get(), FS_IOC_SETFLAGS, &flags) != 0) GTEST_SKIP() << "needs root and ext4";
  try {
    files.remove_tree(tree);
    ADD_FAILURE() << "an immutable file was removed";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("cannot remove: EPERM"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("file kept"), std::string::npos);
  }
  EXPECT_EQ(files.list(tree), std::vector<std::string>{"kept"});
  flags = 0;
  ::ioctl(kept.get(), FS_IOC_SETFLAGS, &flags);
}

// Another thread exchanges a directory of the tree with a link to the outside, all the time. It and
// the test name directories by descriptors, so that they themselves follow no link.
TEST_F(TreeTest, ADirectoryThatBecomesALinkIsNotFollowed) {
  std::atomic<bool> stop{false};
  fs::create_directory_symlink(temp / "outside/a", temp / "link");
  const Descriptor top = Descriptor::open(temp.path().c_str(), O_RDONLY | O_DIRECTORY);
  const Descriptor root = Descriptor::open(tree.c_str(), O_RDONLY | O_DIRECTORY);
  const auto open_below = [](const Descriptor& parent, const char* name) {
    return Descriptor(::openat(parent.get(), name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
  };
  std::thread swapper([&] {
    while (!stop) {
      ::renameat2(top.get(), "link", root.get(), "a", RENAME_EXCHANGE);
      const Descriptor a = open_below(root, "a");
      if (a.is_valid()) ::renameat2(top.get(), "link", a.get(), "b", RENAME_EXCHANGE);
    }
  });
  for (int i = 0; i < 100; ++i) {
    ::mkdirat(root.get(), "a", 0700);
    const Descriptor a = open_below(root, "a");
    if (a.is_valid()) ::mkdirat(a.get(), "b", 0700);
    const Descriptor b = a.is_valid() ? open_below(a, "b") : Descriptor(-1);
    if (b.is_valid()) ::mkdirat(b.get(), "c", 0700);
    try {
      files.empty_directory(tree);
    } catch (const Error&) {
      // The thread has put something in an emptied directory.
    }
  }
  stop = true;
  swapper.join();
}

}  // namespace
}  // namespace modicum
