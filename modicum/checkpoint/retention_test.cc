// Removal on the real file system, where names may be symbolic links to other people's files.
// Catches: a link that is followed; a foreign file that fails a save, or is removed.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "modicum/base/base.h"
#include "modicum/checkpoint/conversion.h"
#include "modicum/checkpoint/run.h"
#include "modicum/io/temp_dir_double.h"

namespace modicum {
namespace {

const SaveOwner kOwner{"host", 7, 11};

bool is_dead(const SaveOwner&) { return true; }

class RemovalBelow : public testing::Test {
 protected:
  RemovalBelow() {
    std::filesystem::create_directory(outside);
    std::ofstream(outside + "/thesis") << "x";
    files.make_directory(root);
  }
  ~RemovalBelow() override { EXPECT_TRUE(files.exists(outside + "/thesis")); }

  CheckpointInFlight save(int64_t number) {
    CheckpointInFlight step = begin_checkpoint(files, root, number, kOwner, true);
    publish_checkpoint(files, step, {.step = number, .uuid = step.uuid, .tool = "modicum"});
    return step;
  }
  void link(const std::string& name) { std::filesystem::create_directory_symlink(outside, name); }
  void give_away(const std::string& name) { ASSERT_EQ(::lchown(name.c_str(), 12345, 12345), 0); }
  std::vector<std::string> names() { return files.list(root); }
  Category conversion_to(const std::string& out, const std::string& inputs) {
    Hasher hasher;
    hasher.add(inputs);
    try {
      ConversionJournal(files, out, {hasher.digest(), kOwner, is_dead});
    } catch (const Error& error) {
      return error.category();
    }
    return Category::count;
  }

  const TempDir temp;
  const std::string root = temp / "root", outside = temp / "outside";
  PosixFileSystem files;
};

using Names = std::vector<std::string>;

TEST_F(RemovalBelow, ALinkInAStepIsNotEntered) {
  save(1);
  link(root + "/step-1/logs");
  EXPECT_EQ(keep_newest(files, save(2), 1), std::nullopt);
  EXPECT_EQ(names(), (Names{"latest", "step-2"}));
}

TEST_F(RemovalBelow, OfAStepThatIsALinkTheLinkIsRemoved) {
  save(1);
  files.rename(root + "/step-1", outside + "/step-1");
  std::filesystem::create_directory_symlink(outside + "/step-1", root + "/step-1");
  EXPECT_EQ(keep_newest(files, save(2), 1), std::nullopt);
  EXPECT_EQ(names(), (Names{"latest", "step-2"}));
  EXPECT_EQ(open_run_checkpoint(files, outside + "/step-1").step, 1);
}

TEST_F(RemovalBelow, LeftoversThatAreLinksStayWithAWarning) {
  const Names links{".latest-2-host-8-11-0", ".partial-2-host-7-11-0",
                    ".trash-0123456789abcdef0123456789abcdef"};
  for (const std::string& name : links) link(root + "/" + name);
  const Names warnings = remove_leftovers(files, save(1), is_dead);
  ASSERT_EQ(warnings.size(), 3U);
  for (size_t i = 0; i < links.size(); ++i) {
    EXPECT_EQ(warnings[i].find(links[i] + " was not removed: CONFLICT: a symbolic link"), 0U)
        << warnings[i];
  }
  EXPECT_EQ(names().size(), 5U);
}

TEST_F(RemovalBelow, WhatAnotherUserOwnsStaysWithAWarning) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give files away";
  for (const int64_t step : {1, 2}) save(step);
  give_away(root + "/step-2");
  files.make_directory(root + "/.trash-0123456789abcdef0123456789abcdef");
  give_away(root + "/.trash-0123456789abcdef0123456789abcdef");
  const CheckpointInFlight step = save(3);
  EXPECT_EQ(remove_leftovers(files, step, is_dead),
            (Names{".trash-0123456789abcdef0123456789abcdef was not removed: user 12345 owns it"}));
  EXPECT_EQ(keep_newest(files, step, 1),
            "old checkpoints could not be removed: step-2: user 12345 owns it");
  EXPECT_EQ(names(), (Names{".trash-0123456789abcdef0123456789abcdef", "latest", "step-2",
                            "step-3"}));  // step-1 was removed
}

TEST_F(RemovalBelow, ADirectoryOfAStepThatIsALinkIsRefused) {
  link(root + "/optimizer");
  EXPECT_THROW(begin_checkpoint_in(files, root, 1, kOwner), Error);
  files.remove(root + "/optimizer");
  const CheckpointInFlight step = begin_checkpoint_in(files, root, 1, kOwner);
  link(root + "/extra");
  EXPECT_THROW(publish_checkpoint(files, step, {.step = 1, .uuid = step.uuid}), Error);
}

TEST_F(RemovalBelow, AConversionRefusesLinksInPlaceOfItsFiles) {
  for (const std::string name : {".out.partial", ".out.journal", ".out.owner"}) {
    link(root + "/" + name);
    EXPECT_EQ(conversion_to(root + "/out", "a"), Category::conflict) << name;
    files.remove(root + "/" + name);
  }
}

TEST_F(RemovalBelow, AConversionRemovesLinksAmongItsFiles) {
  for (const std::string inputs : {"a", "b"}) {  // the same inputs as the journal's, and others
    EXPECT_EQ(conversion_to(root + "/out", "a"), Category::count);
    link(root + "/.out.partial/optimizer");
    EXPECT_EQ(conversion_to(root + "/out", inputs), Category::count);
    EXPECT_EQ(files.list(root + "/.out.partial"), Names{});
  }
}

}  // namespace
}  // namespace modicum
