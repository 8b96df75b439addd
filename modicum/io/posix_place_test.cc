// Changes of files at paths with symbolic links, also while another process replaces directories by
// links. Catches: a link that is followed by a change, and an error without its name.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/fs.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>

#include "modicum/base/base.h"
#include "modicum/io/descriptor.h"
#include "modicum/io/io.h"
#include "modicum/io/temp_dir_double.h"

namespace modicum {
namespace {

namespace fs = std::filesystem;

Descriptor directory_at(int parent, const char* name) {
  return Descriptor(::openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
}

void set_immutable(const std::string& path, bool is_immutable) {
  const Descriptor file = Descriptor::open(path.c_str(), O_RDONLY);
  int flags = is_immutable ? FS_IMMUTABLE_FL : 0;
  static_cast<void>(::ioctl(file.get(), FS_IOC_SETFLAGS, &flags));  // needs root, and not tmpfs
}

// The directory `outside` has the same names as `tree`, so that a change that follows a link from
// one to the other finds what it needs.
class PlaceTest : public testing::Test {
 protected:
  PlaceTest() {
    for (const char* const top : {"outside", "tree"}) {
      std::string directory = temp / top;
      for (const char* const below : {"", "/d", "/d", "/d"}) {
        directory += below;
        fs::create_directories(directory);
        for (const char* const name : {"a", "b", "empty"}) {
          std::ofstream(directory + "/" + name) << directory;
        }
        fs::create_directories(directory + "/full/below");
      }
    }
    static_cast<void>(::mkfifo((outside + "/pipe").c_str(), 0600));
    // For these the test must run as root.
    static_cast<void>(::mknod((outside + "/device").c_str(), S_IFCHR | 0600, makedev(1, 3)));
    static_cast<void>(::lchown((outside + "/d/b").c_str(), 65534, 65534));
    set_immutable(outside + "/d/a", true);
    before = snapshot();
  }
  ~PlaceTest() override {
    EXPECT_EQ(snapshot(), before);
    set_immutable(outside + "/d/a", false);
  }

  // Every entry outside, with its times: those of a directory show names that came and went.
  std::string snapshot() const {
    std::vector<std::string> paths{outside};
    for (const auto& entry : fs::recursive_directory_iterator(outside)) {
      paths.push_back(entry.path());
    }
    std::sort(paths.begin(), paths.end());
    std::string all;
    for (const std::string& path : paths) {
      struct stat is {};
      EXPECT_EQ(::lstat(path.c_str(), &is), 0);
      std::string text;
      if (S_ISREG(is.st_mode)) std::getline(std::ifstream(path), text);
      all += path + " " + std::to_string(is.st_mode) + " " + std::to_string(is.st_ino) + " " +
             std::to_string(is.st_mtim.tv_sec) + " " + std::to_string(is.st_mtim.tv_nsec) + " " +
             std::to_string(is.st_uid) + " " + text + "\n";
    }
    return all;
  }

  void write_into(std::unique_ptr<File> file) const {
    const std::string text = "written by the test";
    file->write(std::as_bytes(std::span(text)), 0);
    file->truncate(text.size());
    file->close();
  }

  using Change = std::function<void(const std::string& path, const std::string& other)>;
  const std::vector<std::pair<const char*, Change>> changes = {
      {"create", [this](const auto& path, const auto&) { write_into(files.create(path)); }},
      {"write", [this](const auto& path, const auto&) { write_into(files.open_to_write(path)); }},
      {"make_directory", [this](const auto& path, const auto&) { files.make_directory(path); }},
      {"rename", [this](const auto& path, const auto& other) { files.rename(path, other); }},
      {"rename_new", [this](const auto& path, const auto& to) { files.rename_new(path, to); }},
      {"remove", [this](const auto& path, const auto&) { files.remove(path); }},
      {"remove_tree", [this](const auto& path, const auto&) { files.remove_tree(path); }},
      {"empty", [this](const auto& path, const auto&) { files.empty_directory(path); }},
      {"sync", [this](const auto& path, const auto&) { files.sync_directory(path); }},
      {"lock", [this](const auto& path, const auto&) { files.lock(path); }},
  };

  const TempDir temp;
  const std::string tree = temp / "tree", outside = temp / "outside";
  std::string before;  // snapshot()
  PosixFileSystem files;
};

TEST_F(PlaceTest, AChangeRefusesALinkOnItsPathAndNamesIt) {
  fs::create_directory_symlink(outside, tree + "/link");
  for (const auto& [name, change] : changes) {
    for (const char* const place :
         {"/link/a", "/link/new", "/link/full", "/link/d/a", "/link/a/"}) {
      for (const bool is_first : {true, false}) {
        if (!is_first && std::string(name).find("rename") != 0) continue;
        const std::string to = tree + "/renamed";
        if (!is_first) std::ofstream(to) << "x";
        try {
          change(is_first ? tree + place : to, is_first ? to : tree + place);
          ADD_FAILURE() << name << " " << place;
        } catch (const Error& error) {
          EXPECT_EQ(error.category(), Category::conflict) << name << " " << error.what();
          const std::string what = error.what();
          EXPECT_NE(what.find("a directory of its path is a symbolic link"), std::string::npos);
          EXPECT_NE(what.find("file link"), std::string::npos) << what;
        }
      }
    }
  }
}

TEST_F(PlaceTest, AChangeDoesNotFollowALinkOfItsName) {
  for (const auto& [name, change] : changes) {
    for (const std::string& target : {outside + "/a", outside + "/full", outside + "/none"}) {
      const std::string link = tree + "/link", other = tree + "/other";
      fs::create_symlink(target, link);
      std::ofstream(other) << "x";
      try {
        change(link, other);
      } catch (const Error&) {
        // Only removals and renames of the link itself succeed.
      }
      files.remove_tree(link);
      files.remove_tree(other);
    }
  }
}

TEST_F(PlaceTest, AJobWorksInTheRealDirectory) {
  fs::create_directory_symlink(tree, temp / "link");
  EXPECT_EQ(real_directory(files, temp / "link"), tree);
  EXPECT_EQ(real_directory(files, (temp / "link") + "/d/"), tree + "/d");
  EXPECT_EQ(real_directory(files, (temp / "link") + "/new"), tree + "/new");
  EXPECT_EQ(real_directory(files, temp / "none/new"), temp / "none/new");
  EXPECT_EQ(with_real_parent(files, temp / "link"), temp / "link");
  EXPECT_EQ(with_real_parent(files, (temp / "link") + "/a"), tree + "/a");
  files.create(real_directory(files, temp / "link") + "/new")->close();
  EXPECT_TRUE(fs::is_regular_file(tree + "/new"));
}

TEST_F(PlaceTest, RelativePathsAreThoseOfTheWorkingDirectory) {
  const Descriptor start = Descriptor::open(".", O_RDONLY | O_DIRECTORY);
  ASSERT_EQ(::chdir(tree.c_str()), 0);
  files.create("new")->close();
  files.make_directory("./d//made/");
  files.rename("new", "d/../d/made/new");
  EXPECT_TRUE(files.lock("locked/")->is_new());
  EXPECT_TRUE(files.sync_directory("."));
  ASSERT_EQ(::fchdir(start.get()), 0);
  EXPECT_TRUE(fs::is_regular_file(tree + "/d/made/new"));
}

// A process that exchanges directories of the tree with links to the outside, until it is killed.
// It names them by descriptors, so that it itself follows no link.
class Swapper {
 public:
  Swapper(int top, int tree) : pid_(::fork()) {
    if (pid_ == 0) ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    while (pid_ == 0) {  // only system calls: it was forked from a process with threads
      ::renameat2(top, "link", tree, "d", RENAME_EXCHANGE);
      const int below = ::openat(tree, "d", O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
      ::renameat2(top, "link-below", below, "d", RENAME_EXCHANGE);
      ::close(below);
    }
  }
  ~Swapper() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }

 private:
  const pid_t pid_;
};

// One in two random paths is below a directory that is exchanged.
TEST_F(PlaceTest, NothingOutsideChangesWhileDirectoriesBecomeLinks) {
  const Descriptor top = Descriptor::open(temp.path().c_str(), O_RDONLY | O_DIRECTORY);
  const Descriptor root = Descriptor::open(tree.c_str(), O_RDONLY | O_DIRECTORY);
  const auto restore = [&] {
    ::symlinkat(outside.c_str(), top.get(), "link");
    ::symlinkat((outside + "/d").c_str(), top.get(), "link-below");
    ::mkdirat(root.get(), "d", 0700);
    const Descriptor d = directory_at(root.get(), "d");
    ::mkdirat(d.get(), "d", 0700);
    ::mkfifoat(d.get(), "pipe", 0600);
    ::mknodat(d.get(), "device", S_IFCHR | 0600, makedev(1, 3));
    ::symlinkat("..", d.get(), "cycle");
    ::symlinkat((outside + "/full").c_str(), d.get(), "full");
    ::fchownat(d.get(), "b", 65534, 65534, AT_SYMLINK_NOFOLLOW);
  };
  std::mt19937 random(1);
  const auto any = [&] {
    constexpr std::array<const char*, 10> kNames = {"a",    "b",      "empty", "full", "d",
                                                    "pipe", "device", "cycle", "new",  "new2"};
    std::string path = tree;
    for (size_t depth = random() % 4; depth > 0; --depth) path += "/d";
    return path + "/" + kNames[random() % kNames.size()];
  };
  restore();
  const Swapper swapper(top.get(), root.get());
  size_t done = 0, refused = 0;
  for (int i = 0; i < 2000; ++i) {
    if (i % 8 == 0) restore();
    try {
      changes[random() % changes.size()].second(any(), any());
      ++done;
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(done, 50U);
  EXPECT_GT(refused, 50U);
}

}  // namespace
}  // namespace modicum
