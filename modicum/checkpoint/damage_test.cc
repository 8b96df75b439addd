// Which errors make a resume skip a checkpoint, a retention keep it, and a save set it aside.
// Catches: an IO error that costs a checkpoint, or that makes a resume go back to an older one;
// retention by the lengths of files.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <functional>

#include "modicum/base/base.h"
#include "modicum/checkpoint/checkpoint.h"
#include "modicum/io/file_doubles.h"
#include "modicum/io/temp_dir_double.h"

namespace modicum {
namespace {

const SaveOwner kSaver{"host", 7, 11};
const std::string kRoot = "/root";

using FileNames = std::vector<std::string>;

// Saves a checkpoint with `data_files` further files.
CheckpointInFlight save_whole(FileSystem& files, int64_t number, int data_files = 0) {
  const CheckpointInFlight step = begin_checkpoint(files, kRoot, number, kSaver, true);
  CheckpointRecord record{.step = number, .uuid = step.uuid, .world_size = 1, .tool = "modicum"};
  FileNames names = {"model.safetensors", "config.json"};
  for (int i = 0; i < data_files; ++i) names.push_back(fmt::format("data-{}.safetensors", i));
  for (const std::string& name : names) {
    const std::string text = fmt::format("{} of step {}", name, number);
    write_durably(files, join_path(step.directory, name), text);
    record.files.push_back({name, text.size(), text.size(), digest_of(text)});
  }
  publish_checkpoint(files, step, record);
  return step;
}

std::string path_of(int64_t step, const std::string& file) {
  return fmt::format("{}/step-{}/{}", kRoot, step, file);
}

// Changes a byte of a file; its length stays.
void change(MemoryFileSystem& files, int64_t step, const std::string& file = "config.json") {
  std::string text = files.get(path_of(step, file));
  text.front() = static_cast<char>(text.front() ^ 1);
  files.put(path_of(step, file), text);
}

// Gives the record of a checkpoint, and its COMMIT, a later version.
void make_later(MemoryFileSystem& files, int64_t step) {
  std::string manifest = files.get(path_of(step, "manifest.json"));
  const std::string old = digest_of(manifest).hex();
  manifest.replace(manifest.find("\"version\":1"), 11, "\"version\":2");
  std::string commit = files.get(path_of(step, "COMMIT"));
  commit.replace(commit.find(old), old.size(), digest_of(manifest).hex());
  files.put(path_of(step, "manifest.json"), manifest);
  files.put(path_of(step, "COMMIT"), commit);
}

FileNames steps_in(FileSystem& files) {
  FileNames names = files.list(kRoot);
  std::erase_if(names, [](const std::string& name) { return !step_of(name); });
  return names;
}

// The category of the call's error; Category::count if the call succeeds.
Category thrown_by(FunctionRef<void()> call) {
  try {
    call();
  } catch (const Error& error) {
    return error.category();
  }
  return Category::count;
}

TEST(Damage, AnyOtherErrorEndsAResume) {
  for (const int error : {EIO, ENOMEM, EACCES, ESTALE}) {
    int64_t fail_at = 1;
    for (;; ++fail_at) {
      MemoryFileSystem under;
      for (const int64_t step : {1, 2, 3}) save_whole(under, step);
      change(under, 3);
      RecordingFileSystem files(under, fail_at);
      files.fail_with(error);
      std::vector<SkippedCheckpoint> skipped;
      int64_t found = 0;
      const Category category =
          thrown_by([&] { found = newest_checkpoint(files, kRoot, skipped).step; });
      if (static_cast<int64_t>(files.calls().size()) < fail_at) {
        EXPECT_EQ(found, 2);
        EXPECT_EQ(skipped.size(), 1U);
        break;
      }
      EXPECT_EQ(category, Category::io) << fail_at;
    }
    EXPECT_GT(fail_at, 20);
  }
}

TEST(Damage, ACheckpointOfALaterVersionEndsAResume) {
  MemoryFileSystem files;
  for (const int64_t step : {1, 2}) save_whole(files, step);
  make_later(files, 2);
  std::vector<SkippedCheckpoint> skipped;
  EXPECT_EQ(thrown_by([&] { newest_checkpoint(files, kRoot, skipped); }), Category::unsupported);
  EXPECT_TRUE(skipped.empty());
}

TEST(Damage, AFileOfAnotherKindDamagesACheckpoint) {
  const TempDir temp;
  PosixFileSystem real;
  const std::string root = temp / "root";
  const CheckpointInFlight step = begin_checkpoint(real, root, 1, kSaver);
  write_durably(real, join_path(step.directory, "a"), "x");
  publish_checkpoint(
      real, step,
      {.step = 1, .uuid = step.uuid, .tool = "m", .files = {{"a", 1, 1, digest_of("x")}}});
  const std::string path = root + "/step-1";
  EXPECT_EQ(check_run_checkpoint(real, path).step, 1);
  for (const std::string name : {"a", "manifest.json", "COMMIT"}) {
    real.rename(join_path(path, name), temp / "kept");
    EXPECT_TRUE(is_damage(thrown_by([&] { check_run_checkpoint(real, path); }))) << name;
    real.make_directory(join_path(path, name));
    EXPECT_EQ(thrown_by([&] { check_run_checkpoint(real, path); }), Category::integrity) << name;
    real.remove(join_path(path, name));
    for (const char* const target : {"absent", "/dev/null", ".."}) {
      std::filesystem::create_symlink(target, join_path(path, name));
      EXPECT_EQ(thrown_by([&] { check_run_checkpoint(real, path); }),
                name == "COMMIT" && std::string(target) == "absent" ? Category::uncommitted
                                                                    : Category::integrity)
          << name << " " << target;
      real.remove(join_path(path, name));
    }
    std::filesystem::create_symlink(temp / "kept", join_path(path, name));
    EXPECT_EQ(check_run_checkpoint(real, path).step, 1);
    real.remove(join_path(path, name));
    real.rename(temp / "kept", join_path(path, name));
  }
  EXPECT_EQ(check_run_checkpoint(real, path).step, 1);
}

TEST(Damage, ADirectoryWithTheRecordOfAnotherCheckpointIsSkipped) {
  MemoryFileSystem files;
  for (const int64_t step : {1, 2}) save_whole(files, step);
  files.rename(kRoot + "/step-2", kRoot + "/step-5");
  std::vector<SkippedCheckpoint> skipped;
  EXPECT_EQ(newest_checkpoint(files, kRoot, skipped).step, 1);
  ASSERT_EQ(skipped.size(), 1U);
  EXPECT_NE(skipped[0].reason.find("record of another checkpoint (expected step-5, got step-2)"),
            std::string::npos)
      << skipped[0].reason;
}

// Another process saves step 3 and removes step 2 at each call of the choice.
TEST(Damage, ACheckpointThatIsRemovedMeanwhileIsChosenAgain) {
  int64_t at = 1;
  for (;; ++at) {
    MemoryFileSystem under;
    for (const int64_t step : {1, 2}) save_whole(under, step);
    RecordingFileSystem files(under);
    bool is_hit = false;
    files.before_call(at, [&] {
      is_hit = true;
      EXPECT_EQ(keep_newest(under, save_whole(under, 3), 1), std::nullopt);
    });
    std::vector<SkippedCheckpoint> skipped;
    const int64_t found = newest_checkpoint(files, kRoot, skipped).step;
    EXPECT_TRUE(found == 3 || (found == 2 && at > 10)) << at << ": " << found;
    EXPECT_TRUE(skipped.empty()) << at;
    if (!is_hit) break;
  }
  EXPECT_GT(at, 10);
}

TEST(Damage, NewestCheckpointGoesOnBelowTheSkippedOnes) {
  MemoryFileSystem files;
  for (const int64_t step : {1, 2, 3}) save_whole(files, step);
  std::vector<SkippedCheckpoint> skipped = {{3, "INTEGRITY: its values"}};
  EXPECT_EQ(newest_checkpoint(files, kRoot, skipped).step, 2);
  skipped.push_back({1, "INTEGRITY: its values"});
  try {
    newest_checkpoint(files, kRoot, skipped);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), Category::uncommitted);
    EXPECT_EQ(error.what_happened(),
              "none of 2 checkpoints is intact; step-3: INTEGRITY: its values");
  }
}

// ---- retention

TEST(Damage, RetentionComparesHeadersAndTexts) {
  MemoryFileSystem files;
  for (const int64_t step : {1, 2}) save_whole(files, step);
  change(files, 2);
  EXPECT_EQ(keep_newest(files, save_whole(files, 3), 2), std::nullopt);
  EXPECT_EQ(steps_in(files), (FileNames{"step-1", "step-2", "step-3"}));
}

// Of steps 1 to 5 the checkpoint of step 4 is damaged, and 5 has just been saved with keep 2: 1 and
// 2 must go. A call fails in turn. Whatever is removed must be one of these two.
TEST(Damage, AnErrorDuringRetentionCostsNoCheckpoint) {
  int64_t fail_at = 1;
  for (;; ++fail_at) {
    MemoryFileSystem under;
    for (const int64_t step : {1, 2, 3, 4}) save_whole(under, step);
    change(under, 4);
    const CheckpointInFlight step = save_whole(under, 5);
    RecordingFileSystem files(under, fail_at);
    const std::string warning = keep_newest(files, step, 2).value_or("");
    for (const int64_t number : {3, 4, 5}) {
      EXPECT_TRUE(under.exists(path_of(number, "COMMIT"))) << fail_at;
    }
    if (static_cast<int64_t>(files.calls().size()) < fail_at) break;
    const std::string what = files.calls()[static_cast<size_t>(fail_at) - 1].what;
    if (what == "sync_directory" || what == "remove_tree")
      continue;  // the checkpoint is trash by then
    EXPECT_NE(warning.find("IO: "), std::string::npos) << fail_at << ": " << warning;
  }
  EXPECT_GT(fail_at, 40);
}

TEST(Damage, ACheckpointOfALaterVersionEndsRetention) {
  MemoryFileSystem files;
  for (const int64_t step : {1, 2}) save_whole(files, step);
  make_later(files, 2);
  EXPECT_NE(keep_newest(files, save_whole(files, 3), 2).value_or("").find("UNSUPPORTED"),
            std::string::npos);
  EXPECT_EQ(steps_in(files).size(), 3U);
}

TEST(Damage, ACheckpointThatStaysDoesNotEndRetention) {
  MemoryFileSystem under;
  for (const int64_t step : {1, 2, 3}) save_whole(under, step);
  const CheckpointInFlight step = save_whole(under, 4);
  int64_t renames = 0;
  int64_t fail_at = 1;
  {  // the number of the first rename
    MemoryFileSystem copy;
    for (const int64_t number : {1, 2, 3}) save_whole(copy, number);
    const CheckpointInFlight saved_checkpoint = save_whole(copy, 4);
    RecordingFileSystem files(copy);
    keep_newest(files, saved_checkpoint, 1);
    const std::vector<IoCall> calls = files.calls();
    for (const IoCall& call : calls) renames += call.what == "rename" ? 1 : 0;
    fail_at += std::find_if(calls.begin(), calls.end(),
                            [](const IoCall& call) { return call.what == "rename"; }) -
               calls.begin();
  }
  EXPECT_EQ(renames, 3);
  RecordingFileSystem files(under, fail_at);
  const std::string warning = keep_newest(files, step, 1).value_or("");
  EXPECT_EQ(warning.find("old checkpoints could not be removed: step-3: IO"), 0U) << warning;
  EXPECT_EQ(steps_in(under), (FileNames{"step-3", "step-4"}));
}

// The calls that open a file of this name.
int64_t opens(const RecordingFileSystem& files, std::string_view name) {
  const std::vector<IoCall> calls = files.calls();
  return std::count_if(calls.begin(), calls.end(), [&](const IoCall& call) {
    return call.what == "open" && (name.empty() || call.file == name);
  });
}

// Ten steps with 163 data files each. Catches: a retention that opens every step, or a file twice;
// a save that opens checkpoints although it removes none.
TEST(Damage, RetentionOpensFewFiles) {
  constexpr int kDataFiles = 163, kSteps = 10;
  constexpr size_t kKeep = 5;
  MemoryFileSystem under;
  for (int64_t step = 1; step < kSteps; ++step) save_whole(under, step, kDataFiles - 1);
  RecordingFileSystem plain(under);
  discard_checkpoint(under, begin_checkpoint(plain, kRoot, kSteps, kSaver));
  EXPECT_EQ(opens(plain, ""), 0);
  const CheckpointInFlight step = save_whole(under, kSteps, kDataFiles - 1);
  RecordingFileSystem files(under);
  EXPECT_EQ(keep_newest(files, step, kKeep), std::nullopt);
  const int64_t others = kKeep - 1, removed = kSteps - static_cast<int64_t>(kKeep);
  EXPECT_EQ(opens(files, "manifest.json"), others);
  EXPECT_EQ(opens(files, "config.json"), others);
  EXPECT_EQ(opens(files, "data-7.safetensors"), others);
  // COMMIT of each removed checkpoint, and each time that of the checkpoint just saved.
  EXPECT_EQ(opens(files, "COMMIT"), others + 2 * removed);
  EXPECT_EQ(opens(files, ""), others * (kDataFiles + 3) + 2 * removed);
  EXPECT_EQ(steps_in(under).size(), kKeep);
}

// ---- a save of a damaged checkpoint's number

TEST(Damage, ADamagedCheckpointIsSetAside) {
  MemoryFileSystem files;
  save_whole(files, 7);
  files.put(path_of(7, "optimizer/state.json"), "12345");
  const auto uuid = committed_uuid(files, kRoot + "/step-7");
  ASSERT_TRUE(uuid);
  change(files, 7);
  const uint64_t bytes = bytes_below(files, kRoot + "/step-7");
  const DamagedCheckpoint aside = set_aside(files, kRoot, {7, "INTEGRITY: it"}, uuid);
  EXPECT_EQ(aside.bytes, bytes);
  EXPECT_GT(bytes, 5U);
  EXPECT_EQ(aside.reason, "INTEGRITY: it");
  EXPECT_EQ(damaged_step_of(base_name(aside.path)), 7);
  EXPECT_EQ(steps_in(files), FileNames{});
  EXPECT_EQ(bytes_below(files, aside.path), bytes);
  // No save removes it.
  CheckpointInFlight step = save_whole(files, 7);
  EXPECT_EQ(remove_leftovers(files, step, [](const SaveOwner&) { return true; }), FileNames{});
  EXPECT_EQ(keep_newest(files, step, 1), std::nullopt);
  EXPECT_TRUE(files.exists(join_path(aside.path, "COMMIT")));
  for (const char* name : {".damaged-", ".damaged-x-1", ".damaged--1-0", "damaged-1-0"}) {
    EXPECT_FALSE(damaged_step_of(name)) << name;
  }
}

// Catches: two saves that find a damaged checkpoint, of which the second renames the checkpoint of
// the first.
TEST(Damage, ACheckpointThatHasBeenReplacedIsNotSetAside) {
  MemoryFileSystem files;
  const auto read = save_whole(files, 7).uuid;
  set_aside(files, kRoot, {7, "INTEGRITY: it"}, read);
  const std::string newer = save_whole(files, 7).uuid;
  EXPECT_EQ(thrown_by([&] {
              set_aside(files, kRoot, {7, "INTEGRITY: it"}, read);
            }),
            Category::conflict);
  EXPECT_EQ(check_run_checkpoint(files, kRoot + "/step-7").record.uuid, newer);
}

// ---- a checkpoint inside another program's directory

TEST(Damage, ACheckpointOfALaterVersionKeepsItsCommit) {
  MemoryFileSystem files;
  save_whole(files, 1);
  make_later(files, 1);
  EXPECT_EQ(thrown_by([&] { begin_checkpoint_in(files, kRoot + "/step-1", 1, kSaver); }),
            Category::unsupported);
  EXPECT_TRUE(files.exists(path_of(1, "COMMIT")));
}

}  // namespace
}  // namespace modicum
