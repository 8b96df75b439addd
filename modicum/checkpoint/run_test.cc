// The record of a checkpoint under faults and power cuts, on files in memory that lose unsynced
// writes.
#include "modicum/checkpoint/run.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <set>
#include <string>

#include "modicum/base/base.h"
#include "modicum/checkpoint/checkpoint.h"
#include "modicum/io/file_doubles.h"

namespace modicum {
namespace {

const SaveOwner kOwner{"host", 7, 11};
using Warnings = std::vector<std::string>;

CheckpointRecord record_of_checkpoint(const CheckpointInFlight& step) {
  CheckpointRecord record{.step = step.step, .uuid = step.uuid, .world_size = 2, .tool = "modicum"};
  for (const char* name : {"model.safetensors", "config.json"}) {
    const std::string text = fmt::format("{} of step {}", name, step.step);
    record.files.push_back({name, text.size(), text.size(), digest_of(text)});
  }
  record.tensors = {{{"w", Role::param, DType::bf16, {3, 0}}, {}},
                    {{"\u00e9\"", Role::param, DType::f32, {}}, {0x0123456789abcdef}}};
  record.state = {{{"w.exp_avg", Role::param, DType::u8, {4}}, {5}}};
  return record;
}

// Writes the files of the record, and syncs each of them, as the ranks do.
void write_files(FileSystem& files, const CheckpointInFlight& step,
                 const CheckpointRecord& record) {
  for (const CheckpointFile& file : record.files) {
    const std::unique_ptr<File> out = files.create(join_path(step.directory, file.name));
    const std::string text = fmt::format("{} of step {}", file.name, step.step);
    out->write(std::as_bytes(std::span(text)), 0);
    out->sync();
    out->close();
  }
}

void write_files(FileSystem& files, const CheckpointInFlight& step) {
  write_files(files, step, record_of_checkpoint(step));
}

Publication save_checkpoint(FileSystem& files, int64_t number) {
  const CheckpointInFlight step = begin_checkpoint(files, "/root", number, kOwner);
  write_files(files, step);
  return publish_checkpoint(files, step, record_of_checkpoint(step));
}

const char* const kInside = "/root/checkpoint-1";

// Publishes a checkpoint that also has a file in a subdirectory.
Publication finish_inside(FileSystem& files, const CheckpointInFlight& step) {
  CheckpointRecord record = record_of_checkpoint(step);
  const std::string name = fmt::format("{}/{}", kStateDirectory, kStateFile);
  const std::string text = fmt::format("{} of step {}", name, step.step);
  record.files.push_back({name, text.size(), text.size(), digest_of(text)});
  files.make_directory(join_path(step.directory, kStateDirectory));
  write_files(files, step, record);
  return publish_checkpoint(files, step, record);
}

Publication save_inside(FileSystem& files, int64_t number) {
  return finish_inside(files, begin_checkpoint_in(files, kInside, number, kOwner));
}

// Saves `saved`, as if it had begun after all others of the root.
CheckpointInFlight published(FileSystem& files, int64_t saved) {
  CheckpointInFlight step{.root = "/root", .step = saved};
  for (const RunCheckpoint& found : find_checkpoints(files, "/root").found) {
    (found.step == saved ? step.uuid : step.committed[found.step]) = found.record.uuid;
  }
  return step;
}

std::optional<std::string> retain(FileSystem& files, size_t keep, int64_t saved) {
  return keep_newest(files, published(files, saved), keep);
}

void expect_intact(FileSystem& files, const RunCheckpoint& found) {
  for (const CheckpointFile& file : found.record.files) {
    const std::string text =
        read_text(*files.open(join_path(found.path, file.name)), kLongestText, Category::io);
    EXPECT_EQ(digest_of(text), file.digest);
    EXPECT_EQ(text, fmt::format("{} of step {}", file.name, found.step));
  }
}

// The category of the call's error; Category::count if the call succeeds.
Category category_of(FunctionRef<void()> call) {
  try {
    call();
  } catch (const Error& error) {
    return error.category();
  }
  return Category::count;
}

TEST(CheckpointRecord, SurvivesARoundTrip) {
  const CheckpointRecord record = record_of_checkpoint({"/root", 12, "0123", "/root/.partial"});
  EXPECT_EQ(parse_record(record_json(record)), record);
}

// Catches: a record that is accepted although a member is missing, has the wrong type, or names a
// file outside the checkpoint.
TEST(CheckpointRecord, InvalidRecordsAreRefused) {
  const std::string good = record_json(record_of_checkpoint({"/root", 12, "0123", ""}));
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    EXPECT_NE(text.find(from), std::string::npos) << from;
    text.replace(text.find(from), from.size(), to);
    return category_of([&] { parse_record(text); });
  };
  EXPECT_EQ(with("\"version\":1", "\"version\":2"), Category::unsupported);
  for (const auto& [from, to] :
       std::vector<std::pair<std::string, std::string>>{{"\"version\":1,", ""},
                                                        {"\"config.json\"", "\"../config.json\""},
                                                        {"\"config.json\"", "\".hidden\""},
                                                        {"0123456789abcdef", "0123456789abcdeg"},
                                                        {"0123456789abcdef", "0123456789abcde"},
                                                        {"\"BF16\"", "\"BF17\""},
                                                        {"[3,0]", "[3,-1]"},
                                                        {"[3,0]", "[3,1]"},
                                                        {"[4]", "[4194305]"},
                                                        {"[4]", "[0]"},
                                                        {"[4]", "[4611686018427387904,4]"},
                                                        {"\"name\":\"w\",", ""},
                                                        {"\"dtype\":\"U8\",\"shape\":[4],", ""},
                                                        {"[]}", "[]"}}) {
    EXPECT_EQ(with(from, to), Category::integrity) << from << " -> " << to;
  }
}

TEST(RunCheckpoints, TheNewestIntactCheckpointIsChosen) {
  MemoryFileSystem files;
  for (const int64_t step : {9, 10, 2})
    EXPECT_EQ(save_checkpoint(files, step).warnings, Warnings());
  files.make_directory("/root/step-11");
  files.put("/root/step-010/COMMIT", "{}");  // begin_checkpoint makes no such name
  std::vector<SkippedCheckpoint> skipped;
  const RunCheckpoint found = newest_checkpoint(files, "/root", skipped);
  EXPECT_EQ(found.step, 10);
  expect_intact(files, found);
  ASSERT_EQ(skipped.size(), 1U);
  EXPECT_EQ(skipped[0].step, 11);
  EXPECT_NE(skipped[0].reason.find("UNCOMMITTED"), std::string::npos) << skipped[0].reason;
  EXPECT_EQ(files.get("/root/latest"), "step-2\n");
}

TEST(RunCheckpoints, SavingAnExistingCheckpointIsAConflict) {
  MemoryFileSystem files;
  save_checkpoint(files, 3);
  const std::string before = files.get("/root/step-3/manifest.json");
  EXPECT_EQ(category_of([&] { save_checkpoint(files, 3); }), Category::conflict);
  // Both saves began before either was published.
  const CheckpointInFlight first = begin_checkpoint(files, "/root", 4, kOwner);
  const CheckpointInFlight two = begin_checkpoint(files, "/root", 4, kOwner);
  for (const CheckpointInFlight& step : {first, two}) write_files(files, step);
  publish_checkpoint(files, first, record_of_checkpoint(first));
  EXPECT_EQ(category_of([&] { publish_checkpoint(files, two, record_of_checkpoint(two)); }),
            Category::conflict);
  EXPECT_EQ(open_run_checkpoint(files, "/root/step-4").record.uuid, first.uuid);
  EXPECT_EQ(files.get("/root/step-3/manifest.json"), before);
}

// Damages each file in turn: removes it, or cuts off its last byte. The previous checkpoint must
// then be chosen, and the reason must name the file.
TEST(RunCheckpoints, ADamagedCheckpointIsSkippedWithTheReason) {
  for (const std::string name : {"model.safetensors", "config.json", "manifest.json", "COMMIT"}) {
    for (const bool removes : {true, false}) {
      MemoryFileSystem files;
      save_checkpoint(files, 1);
      save_checkpoint(files, 2);
      const std::string path = "/root/step-2/" + name;
      const std::string text = files.get(path);
      files.remove(path);
      if (!removes) files.put(path, text.substr(0, text.size() - 1));
      std::vector<SkippedCheckpoint> skipped;
      EXPECT_EQ(newest_checkpoint(files, "/root", skipped).step, 1);
      ASSERT_EQ(skipped.size(), 1U);
      EXPECT_NE(skipped[0].reason.find(name), std::string::npos) << skipped[0].reason;
    }
  }
}

// Catches: a byte of the manifest or of COMMIT that no check covers.
TEST(RunCheckpoints, AnyFlippedBitIsDetected) {
  for (const char* name : {"manifest.json", "COMMIT"}) {
    MemoryFileSystem files;
    save_checkpoint(files, 1);
    const std::string path = std::string("/root/step-1/") + name;
    const std::string text = files.get(path);
    for (size_t bit = 0; bit < 8 * text.size(); ++bit) {
      std::string flipped = text;
      flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
      files.put(path, flipped);
      EXPECT_NE(category_of([&] { open_run_checkpoint(files, "/root/step-1"); }), Category::count)
          << name << " bit " << bit << ": " << flipped;
    }
  }
}

TEST(RunCheckpoints, RetentionKeepsTheNewestIntactCheckpoints) {
  MemoryFileSystem files;
  for (const int64_t step : {1, 2, 3, 4}) save_checkpoint(files, step);
  files.remove("/root/step-4/config.json");
  EXPECT_EQ(retain(files, 2, 3), std::nullopt);
  EXPECT_EQ(files.list("/root"),
            (std::vector<std::string>{"latest", "step-2", "step-3", "step-4"}));
  EXPECT_EQ(retain(files, 0, 3), std::nullopt);
  EXPECT_EQ(files.list("/root"), (std::vector<std::string>{"latest", "step-3", "step-4"}));
}

// Another program's weights in the directory. Catches: a checkpoint that readers skip, and that
// retention keeps in place of an intact one.
TEST(RunCheckpoints, ACheckpointToWhichWeightsWereAddedIsDamaged) {
  MemoryFileSystem files;
  for (const int64_t step : {1, 2, 3}) save_checkpoint(files, step);
  files.put("/root/step-2/model.safetensors.index.json", "{}");
  EXPECT_EQ(category_of([&] { check_run_checkpoint(files, "/root/step-2"); }), Category::integrity);
  files.put("/root/step-2/other.safetensors.index.json", "{}");
  EXPECT_EQ(category_of([&] { check_run_checkpoint(files, "/root/step-2"); }),
            Category::index_ambiguous);
  EXPECT_EQ(retain(files, 2, 3), std::nullopt);
  EXPECT_EQ(files.list("/root"),
            (std::vector<std::string>{"latest", "step-1", "step-2", "step-3"}));
}

// Catches: a checkpoint that is removed by its own save, since checkpoints with larger numbers
// exist.
TEST(RunCheckpoints, RetentionKeepsTheCheckpointJustSaved) {
  MemoryFileSystem files;
  for (const int64_t step : {100, 200, 300, 150}) save_checkpoint(files, step);
  EXPECT_EQ(retain(files, 2, 150), std::nullopt);
  EXPECT_EQ(files.list("/root"), (std::vector<std::string>{"latest", "step-150", "step-300"}));
  EXPECT_EQ(retain(files, 1, 150), std::nullopt);
  EXPECT_EQ(files.list("/root"), (std::vector<std::string>{"latest", "step-150"}));
}

TEST(RunCheckpoints, AFailedRemovalOfOldCheckpointsIsAWarning) {
  std::set<std::string> failed;
  for (int64_t fail_at = 1;; ++fail_at) {
    MemoryFileSystem under;
    for (const int64_t step : {1, 2}) save_checkpoint(under, step);
    RecordingFileSystem files(under, fail_at);
    const auto warning = keep_newest(files, published(under, 2), 1);
    if (files.calls().size() < static_cast<size_t>(fail_at)) break;
    EXPECT_EQ(open_run_checkpoint(under, "/root/step-2").step, 2);
    const std::string what = files.calls()[static_cast<size_t>(fail_at) - 1].what;
    failed.insert(what);
    if (what == "rename") {
      EXPECT_NE(warning.value_or("").find("old checkpoints could not be removed: step-1: IO"),
                std::string::npos);
      EXPECT_EQ(open_run_checkpoint(under, "/root/step-1").step, 1);
    } else if (what == "remove_tree") {  // of the renamed checkpoint
      EXPECT_NE(warning.value_or("").find("old checkpoints could not be removed: step-1: .trash-"),
                std::string::npos);
      EXPECT_EQ(under.list("/root").size(), 3);
    }
  }
  EXPECT_TRUE(failed.contains("rename") && failed.contains("remove_tree"));
}

// ---- two saves at the same time

// Saves step 5 (a) and step 6 (b), with keep 1, in every order of their begins, publications and
// retentions. Catches: a save that removes the checkpoint of another, so that none is left.
TEST(RunCheckpoints, RetentionSparesTheCheckpointsOfSavesAtTheSameTime) {
  std::string order = "aaabbb";
  do {
    MemoryFileSystem files;
    save_checkpoint(files, 1);
    std::array<std::optional<CheckpointInFlight>, 2> steps;
    std::array<int, 2> done{};
    int64_t last = 1;  // the checkpoint that was published last
    for (const char c : order) {
      const size_t i = c == 'a' ? 0 : 1;
      const int64_t number = i == 0 ? 5 : 6;
      const int part = done[i]++;
      if (part == 0) steps[i] = begin_checkpoint(files, "/root", number, kOwner, true);
      if (part == 1) {
        write_files(files, *steps[i]);
        publish_checkpoint(files, *steps[i], record_of_checkpoint(*steps[i]));
        last = number;
      }
      if (part == 2) keep_newest(files, *steps[i], 1);
      EXPECT_TRUE(files.exists(fmt::format("/root/step-{}/COMMIT", last))) << order;
    }
    const bool at_once = !steps[0]->committed.contains(6) && !steps[1]->committed.contains(5);
    EXPECT_EQ(find_checkpoints(files, "/root").found.size(), at_once ? 2U : 1U) << order;
  } while (std::next_permutation(order.begin(), order.end()));
}

// A whole save of step 6 at each call of a save of step 5. The latter removes step 6 only if it was
// there before it began.
TEST(RunCheckpoints, ASaveAtAnyCallOfAnotherKeepsItsCheckpoint) {
  const auto save = [](FileSystem& files, int64_t number) {
    const CheckpointInFlight step = begin_checkpoint(files, "/root", number, kOwner, true);
    write_files(files, step);
    publish_checkpoint(files, step, record_of_checkpoint(step));
    keep_newest(files, step, 1);
    return step;
  };
  for (int64_t at = 1;; ++at) {
    MemoryFileSystem under;
    save_checkpoint(under, 1);
    RecordingFileSystem files(under);
    bool is_hit = false;
    files.before_call(at, [&] {
      is_hit = true;
      save(under, 6);
    });
    const CheckpointInFlight step = save(files, 5);
    if (!is_hit) break;
    const bool is_first = step.committed.contains(6);
    EXPECT_EQ(under.exists("/root/step-6/COMMIT"), !is_first) << at;
    EXPECT_TRUE(!is_first || under.exists("/root/step-5/COMMIT")) << at;
    EXPECT_EQ(find_checkpoints(under, "/root").skipped.size(), 0U) << at;
  }
}

// Catches: a save that removes old checkpoints although somebody has removed or replaced its own.
TEST(RunCheckpoints, RetentionNeedsTheCheckpointJustSaved) {
  MemoryFileSystem files;
  for (const int64_t step : {1, 2}) save_checkpoint(files, step);
  CheckpointInFlight step{.root = "/root", .step = 3, .uuid = "0"};
  step.committed = {{1, open_run_checkpoint(files, "/root/step-1").record.uuid}};
  const std::string warning =
      "old checkpoints could not be removed: step-3 is no longer the one of this save";
  EXPECT_EQ(keep_newest(files, step, 1), warning);
  save_checkpoint(files, 3);
  EXPECT_EQ(keep_newest(files, step, 1), warning);
  EXPECT_EQ(find_checkpoints(files, "/root").found.size(), 3U);
  // Step 1 has been saved again since the save began.
  step.uuid = open_run_checkpoint(files, "/root/step-3").record.uuid;
  step.committed = {{1, "0"}};
  EXPECT_EQ(keep_newest(files, step, 1), std::nullopt);
  EXPECT_EQ(find_checkpoints(files, "/root").found.size(), 3U);
}

// Catches: another program's manifest.json that makes a directory look like a saved checkpoint.
TEST(RunCheckpoints, AManifestOfAnotherProgramIsNoRecord) {
  MemoryFileSystem files;
  save_checkpoint(files, 1);
  const std::string record = files.get("/root/step-1/manifest.json");
  EXPECT_TRUE(is_record(record));
  std::string later = record;
  later.replace(later.find("\"version\":1"), 11, "\"version\":2");
  EXPECT_TRUE(is_record(later));
  for (const char* text : {R"({"version": 1, "files": []})", R"({"version": "1.0", "uuid": "a"})",
                           R"({"step": 1, "uuid": "a"})", "[]", "7", "{", ""}) {
    EXPECT_FALSE(is_record(text)) << text;
  }
  files.put("/a/step-1-hf/manifest.json", R"({"version": 1})");
  EXPECT_FALSE(is_run_checkpoint(files, "/a/step-1-hf"));
  files.put("/a/checkpoint-7/manifest.json", record);
  EXPECT_TRUE(is_run_checkpoint(files, "/a/checkpoint-7"));
}

TEST(RunCheckpoints, LeftoversOfDeadOwnersAreRemoved) {
  MemoryFileSystem files;
  save_checkpoint(files, 1);
  const CheckpointInFlight live = begin_checkpoint(files, "/root", 2, {"host", 8, 11});
  const CheckpointInFlight dead = begin_checkpoint(files, "/root", 2, kOwner);
  write_files(files, dead);
  files.make_directory("/root/.partial-3-cut");
  files.put("/root/.latest-2-host-7-11-0", "step-2");
  files.put("/root/.latest-2-host-8-11-0", "step-2");
  files.put("/root/.trash-0123456789abcdef0123456789abcdef/sub/file", "x");
  files.put("/root/.trash-step-9/file", "x");  // a user's
  const auto is_dead = [](const SaveOwner& owner) {
    return owner.pid == kOwner.pid && owner.host == "host" && owner.started == kOwner.started;
  };
  EXPECT_EQ(base_name(live.directory), ".partial-2-host-8-11-" + live.uuid);
  const std::string left = " of another save is left over or in flight";
  EXPECT_EQ(remove_leftovers(files, {.root = "/root"}, is_dead),
            (std::vector<std::string>{base_name(live.directory) + left, ".partial-3-cut" + left}));
  EXPECT_EQ(files.list("/root"),
            (std::vector<std::string>{".latest-2-host-8-11-0", base_name(live.directory),
                                      ".partial-3-cut", ".trash-step-9", "latest", "step-1"}));
}

// Each call fails in turn, with each error. The new checkpoint is then absent, or intact if the
// save returned, and the old one is intact. Catches: a checkpoint that is durable only if `latest`
// is written; an error although the checkpoint is visible.
TEST(RunCheckpoints, AFaultAtAnyCallLosesNothing) {
  for (const int error : {EIO, ENOSPC, EDQUOT, EINTR, ESTALE}) {
    for (int64_t fail_at = 1;; ++fail_at) {
      MemoryFileSystem under;
      under.make_directory("/root");
      under.sync_directory("/");
      save_checkpoint(under, 1);
      RecordingFileSystem files(under, fail_at);
      files.fail_with(error);
      bool is_saved = false;
      std::optional<CheckpointInFlight> step;
      try {
        step = begin_checkpoint(files, "/root", 2, kOwner);
        write_files(files, *step);
        is_saved = publish_checkpoint(files, *step, record_of_checkpoint(*step)).is_durable;
        EXPECT_TRUE(is_saved) << fail_at;
      } catch (const Error&) {
        EXPECT_FALSE(under.exists("/root/step-2")) << fail_at;
        if (step) discard_checkpoint(under, *step);
      }
      if (is_saved) under.lose_unsynced();  // a checkpoint that was reported as saved must survive
      const FoundCheckpoints steps = find_checkpoints(under, "/root");
      ASSERT_EQ(steps.skipped.size(), 0U) << fail_at;
      for (const RunCheckpoint& found : steps.found) expect_intact(under, found);
      EXPECT_EQ(steps.found.back().step, 1) << fail_at;
      EXPECT_EQ(steps.found.size(), is_saved ? 2U : 1U) << fail_at;
      if (static_cast<int64_t>(files.calls().size()) < fail_at) break;
    }
  }
}

// Catches: an error, after which the caller saves the checkpoint again, for a name that stays.
TEST(RunCheckpoints, ACheckpointWhoseNameCannotBeTakenBackIsSaved) {
  for (const bool is_inside : {false, true}) {
    int warned = 0;
    for (int64_t cut_at = 1;; ++cut_at) {
      MemoryFileSystem under;
      under.make_directory("/root");
      const CheckpointInFlight step =
          is_inside ? begin_checkpoint_in(under, "/root/checkpoint-1", 2, kOwner)
                    : begin_checkpoint(under, "/root", 2, kOwner);
      write_files(under, step);
      const std::string path = is_inside ? step.root : "/root/step-2";
      RecordingFileSystem files(under);
      files.cut_power_at(cut_at);  // all later calls fail, too
      try {
        const Publication published = publish_checkpoint(files, step, record_of_checkpoint(step));
        EXPECT_EQ(open_run_checkpoint(under, path).step, 2) << cut_at;
        if (!published.is_durable) {
          EXPECT_NE(published.warnings.front().find("may not survive a power cut"),
                    std::string::npos);
          EXPECT_TRUE(published.may_vanish) << "so no older checkpoint may be removed";
          ++warned;
        }
      } catch (const Error&) {
        EXPECT_EQ(category_of([&] { open_run_checkpoint(under, path); }), Category::uncommitted)
            << cut_at;
      }
      if (static_cast<int64_t>(files.calls().size()) < cut_at) break;
    }
    EXPECT_EQ(warned, 1);  // the sync after the name
  }
}

// As a server's reply that is lost: the rename is made, and the call fails.
TEST(RunCheckpoints, ARenameThatWasMadeDespiteItsErrorIsASavedCheckpoint) {
  MemoryFileSystem under;
  int64_t renames_at = 0;
  for (const bool is_lost : {false, true}) {
    const CheckpointInFlight step = begin_checkpoint(under, "/root", is_lost ? 2 : 1, kOwner);
    write_files(under, step);
    RecordingFileSystem files(under, is_lost ? renames_at : 0);
    const std::string to = fmt::format("/root/step-{}", step.step);
    if (is_lost) files.before_call(renames_at, [&] { under.rename_new(step.directory, to); });
    EXPECT_EQ(publish_checkpoint(files, step, record_of_checkpoint(step)).warnings, Warnings());
    EXPECT_EQ(open_run_checkpoint(under, to).record.uuid, step.uuid);
    const std::vector<IoCall> calls = files.calls();
    const auto rename = std::find_if(calls.begin(), calls.end(),
                                     [](const IoCall& call) { return call.what == "rename_new"; });
    renames_at = rename - calls.begin() + 1;
  }
}

// As on some FUSE file systems.
TEST(RunCheckpoints, WithoutSyncsOfDirectoriesACheckpointIsSavedWithAWarning) {
  MemoryFileSystem under;
  RecordingFileSystem files(under);
  files.refuse_directory_syncs();
  for (const bool is_inside : {false, true}) {
    const Publication published = is_inside ? save_inside(files, 1) : save_checkpoint(files, 1);
    EXPECT_FALSE(published.is_durable);
    EXPECT_FALSE(published.may_vanish);
    EXPECT_EQ(
        published.warnings,
        Warnings{"a directory can't be synced here, so the result may not survive a power cut"});
  }
  EXPECT_EQ(open_run_checkpoint(under, "/root/step-1").step, 1);
  EXPECT_EQ(open_run_checkpoint(under, kInside).step, 1);
}

struct PowerCut {};

struct CutSave {
  bool is_cut = false;
  bool is_saved = false;  // the save has returned
};

// Saves checkpoint 2 by `save`; the power fails before call `cut_at`, if there is one.
CutSave save_with_cut(MemoryFileSystem& under, int64_t cut_at, void (*save)(FileSystem&)) {
  RecordingFileSystem files(under);
  CutSave result;
  files.before_call(cut_at, [&] {
    result.is_cut = true;
    throw PowerCut();
  });
  try {
    save(files);
    result.is_saved = true;
  } catch (const PowerCut&) {
  }
  return result;
}

// The power fails before each call in turn; only synced writes survive. The old checkpoint is then
// intact, the new one intact or absent. The new one must be intact if the save had returned.
// Catches: any omitted sync; COMMIT or a name that is written too early.
TEST(RunCheckpoints, APowerCutAtAnyCallLosesNothing) {
  int cuts = 0;
  for (int64_t cut_at = 1;; ++cut_at, ++cuts) {
    MemoryFileSystem under;
    under.make_directory("/root");
    under.sync_directory("/");
    save_checkpoint(under, 1);
    const auto [is_cut, is_saved] =
        save_with_cut(under, cut_at, [](FileSystem& files) { save_checkpoint(files, 2); });
    under.lose_unsynced();
    const FoundCheckpoints steps = find_checkpoints(under, "/root");
    ASSERT_EQ(steps.skipped.size(), 0U) << cut_at << ": " << steps.skipped.front().reason;
    ASSERT_GE(steps.found.size(), 1U) << cut_at;
    for (const RunCheckpoint& found : steps.found) expect_intact(under, found);
    EXPECT_EQ(steps.found.back().step, 1) << cut_at;
    if (is_saved) {
      EXPECT_EQ(steps.found.front().step, 2) << cut_at;
    }
    if (!is_cut) break;
  }
  EXPECT_GT(cuts, 30);  // a save makes over 30 calls
}

// Two processes make the root at the same time.
TEST(Checkpoint, TheRootMayAppearWhileItIsMade) {
  MemoryFileSystem files;
  files.make_directory("/root");
  EXPECT_FALSE(ensure_directory(files, "/root"));
  EXPECT_TRUE(ensure_directory(files, "/new"));
  files.put("/file", "x");
  EXPECT_EQ(category_of([&] { ensure_directory(files, "/file"); }), Category::conflict);
}

// ---- inside a directory

// Makes a directory with the checkpoint `number` and another program's file.
void put_directory(MemoryFileSystem& files, int64_t number) {
  files.make_directory("/root");
  files.sync_directory("/");
  save_inside(files, number);
  files.sync_directory("/root");
  const std::unique_ptr<File> other = files.create(join_path(kInside, "trainer_state.json"));
  other->sync();
  other->close();
  files.sync_directory(kInside);
}

bool has_name_in_flight(FileSystem& files) {
  const std::vector<std::string> names = files.list(kInside);
  return std::any_of(names.begin(), names.end(),
                     [](const std::string& name) { return name.starts_with(".partial-"); });
}

// Expects an intact checkpoint, or one that is refused because it was not committed. In the second
// case a `.partial-` directory must distinguish it from another program's directory. `cut_at`: the
// number of the call that failed.
void expect_whole_or_uncommitted(FileSystem& files, int64_t cut_at) {
  const Category category =
      category_of([&] { expect_intact(files, open_run_checkpoint(files, kInside)); });
  if (category == Category::count) return;
  EXPECT_EQ(category, Category::uncommitted) << cut_at;
  EXPECT_TRUE(has_name_in_flight(files)) << cut_at;
}

TEST(CheckpointInside, LeavesOtherFilesAndReplacesTheTensorsOfTheLastCheckpoint) {
  MemoryFileSystem files;
  put_directory(files, 1);
  CheckpointInFlight step = begin_checkpoint_in(files, kInside, 2, kOwner);
  EXPECT_EQ(category_of([&] { open_run_checkpoint(files, kInside); }), Category::uncommitted);
  write_files(files, step);
  CheckpointRecord record = record_of_checkpoint(step);
  // The new checkpoint has no model.safetensors, so that of the last checkpoint must be removed.
  files.rename(join_path(step.directory, "model.safetensors"), join_path(step.directory, "a.b"));
  record.files.front().name = "a.b";
  EXPECT_EQ(publish_checkpoint(files, step, record).warnings.size(), 1U);  // of the lost state
  EXPECT_EQ(files.list(kInside), (std::vector<std::string>{"COMMIT", "a.b", "config.json",
                                                           "manifest.json", "trainer_state.json"}));
  EXPECT_EQ(open_run_checkpoint(files, kInside).record, record);
}

// Saves a checkpoint whose weights have these names into a directory that has the weights of
// another program. Returns the names of all weights that are there afterwards.
std::vector<std::string> weights_after(const std::vector<std::string>& saved,
                                       const std::vector<std::string>& others) {
  MemoryFileSystem files;
  files.make_directory("/root");
  files.make_directory(kInside);
  for (const std::string& name : others) files.put(join_path(kInside, name), "another's");
  const CheckpointInFlight step = begin_checkpoint_in(files, kInside, 1, kOwner);
  CheckpointRecord record = record_of_checkpoint(step);
  record.files.clear();
  for (const std::string& name : saved) {
    const std::string text = fmt::format("{} of step {}", name, step.step);
    record.files.push_back({name, text.size(), text.size(), digest_of(text)});
  }
  write_files(files, step, record);
  EXPECT_EQ(publish_checkpoint(files, step, record).warnings, Warnings());
  expect_intact(files, open_run_checkpoint(files, kInside));
  std::vector<std::string> names = files.list(kInside);
  std::erase(names, "COMMIT");
  std::erase(names, "manifest.json");
  return names;
}

// Catches: model.safetensors of another program, which from_pretrained reads instead of the shards;
// a removed base model of adapters, or a removed file that readers don't take for the model.
TEST(CheckpointInside, ReplacesTheWeightsOfAnotherProgram) {
  const std::string single = "model.safetensors", adapter = "adapter_model.safetensors";
  const std::string first_shard = "model-00001-of-00002.safetensors";
  const std::string two = "model-00002-of-00002.safetensors";
  const std::string old = "model-00003-of-00003.safetensors";
  const std::string variant = "model.fp16.safetensors", pickle = "pytorch_model.bin";
  const std::string long_one = "model-000001-of-00002.safetensors";
  using Names = std::vector<std::string>;
  EXPECT_EQ(weights_after({first_shard, two, kIndexFile}, {single, old, variant, pickle}),
            (Names{first_shard, two, variant, kIndexFile, pickle}));
  EXPECT_EQ(weights_after({single}, {first_shard, two, kIndexFile, long_one}),
            (Names{long_one, single}));
  EXPECT_EQ(weights_after({adapter}, {first_shard, two, kIndexFile, adapter}),
            (Names{adapter, first_shard, two, kIndexFile}));
}

// Catches: a state that is lost without a warning; an empty directory that stays.
TEST(CheckpointInside, AModelWithoutStateReplacesOneWithState) {
  MemoryFileSystem files;
  put_directory(files, 1);
  const CheckpointInFlight step = begin_checkpoint_in(files, kInside, 2, kOwner);
  write_files(files, step);
  EXPECT_EQ(publish_checkpoint(files, step, record_of_checkpoint(step)).warnings,
            Warnings{"the previous save's files in optimizer/ were removed; this save has none"});
  EXPECT_FALSE(files.exists(join_path(kInside, kStateDirectory)));
  EXPECT_EQ(save_inside(files, 3).warnings, Warnings());
  EXPECT_EQ(save_inside(files, 4).warnings, Warnings());
}

TEST(CheckpointInside, AFailedSaveIsRefusedAsUncommitted) {
  MemoryFileSystem files;
  put_directory(files, 1);
  const CheckpointInFlight step = begin_checkpoint_in(files, kInside, 2, kOwner);
  write_files(files, step);
  discard_checkpoint(files, step);
  EXPECT_EQ(files.list(step.directory), std::vector<std::string>());
  expect_whole_or_uncommitted(files, 0);
}

// Each call fails in turn.
TEST(CheckpointInside, AFaultAtAnyCallLeavesAWholeCheckpointOrNone) {
  for (int64_t fail_at = 1;; ++fail_at) {
    MemoryFileSystem under;
    put_directory(under, 1);
    RecordingFileSystem files(under, fail_at);
    bool is_saved = false;
    std::optional<CheckpointInFlight> step;
    try {
      step = begin_checkpoint_in(files, kInside, 2, kOwner);
      is_saved = finish_inside(files, *step).is_durable;
      EXPECT_TRUE(is_saved) << fail_at;
    } catch (const Error&) {
      if (step) discard_checkpoint(under, *step);
    }
    if (is_saved) under.lose_unsynced();
    expect_whole_or_uncommitted(under, fail_at);
    if (is_saved) {
      EXPECT_EQ(open_run_checkpoint(under, kInside).step, 2) << fail_at;
    }
    if (static_cast<int64_t>(files.calls().size()) < fail_at) break;
  }
}

// Another save commits into the same directory while this one is in flight, and each call of this
// one fails in turn. Catches: COMMIT of the other save over files of both.
TEST(CheckpointInside, AFaultAfterAnotherSavesCommitLeavesAWholeCheckpointOrNone) {
  for (int64_t fail_at = 1;; ++fail_at) {
    MemoryFileSystem under;
    put_directory(under, 1);
    const CheckpointInFlight step = begin_checkpoint_in(under, kInside, 2, kOwner);
    save_inside(under, 3);
    RecordingFileSystem files(under, fail_at);
    bool is_saved = false;
    try {
      is_saved = finish_inside(files, step).is_durable;
    } catch (const Error&) {
    }
    expect_whole_or_uncommitted(under, fail_at);
    if (is_saved) {
      EXPECT_EQ(open_run_checkpoint(under, kInside).step, 2) << fail_at;
    }
    if (static_cast<int64_t>(files.calls().size()) < fail_at) break;
  }
}

// The power fails before each call in turn. Catches: COMMIT that is written before a rename is
// durable; an old COMMIT next to files of the new checkpoint; an uncommitted directory that nothing
// distinguishes from another program's.
TEST(CheckpointInside, APowerCutAtAnyCallLeavesAWholeCheckpointOrNone) {
  int cuts = 0;
  for (int64_t cut_at = 1;; ++cut_at, ++cuts) {
    MemoryFileSystem under;
    put_directory(under, 1);
    const auto [is_cut, is_saved] =
        save_with_cut(under, cut_at, [](FileSystem& files) { save_inside(files, 2); });
    for (const bool loses : {false, true}) {  // after a kill, then after a power cut
      if (loses) under.lose_unsynced();
      expect_whole_or_uncommitted(under, cut_at);
      if (is_saved) {
        EXPECT_EQ(open_run_checkpoint(under, kInside).step, 2) << cut_at;
      }
    }
    if (!is_cut) break;
  }
  EXPECT_GT(cuts, 30);  // a save makes over 30 calls
}

// The text that state_json writes, with `from` replaced by `to`.
std::string state_with(std::string_view from, std::string_view to) {
  std::string text = state_json({.format = StateFormat::int8_moments, .seed = 5, .digest = 9});
  const size_t at = text.find(from);
  return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

TEST(State, ItsFactsAreReadAsWritten) {
  const StateFacts facts{.format = StateFormat::bf16_moments,
                         .seed = UINT64_MAX,
                         .steps = 4,
                         .steps_of = {{"w", 3}},
                         .without_state = {"frozen"},
                         .digest = 0x0123456789abcdef};
  const StateFacts reread = parse_state(state_json(facts));
  EXPECT_EQ(reread.format, facts.format);
  EXPECT_EQ(reread.seed, facts.seed);
  EXPECT_EQ(reread.steps_made_by("w"), 3);
  EXPECT_EQ(reread.steps_made_by("v"), 4);
  EXPECT_EQ(reread.without_state, facts.without_state);
  EXPECT_EQ(reread.digest, facts.digest);
}

TEST(State, ErrorsNameTheFile) {
  const auto error_of = [](const std::string& text) -> std::string {
    try {
      parse_state(text);
    } catch (const Error& error) {
      EXPECT_EQ(error.facts().file, kStateFile);
      return error.what();
    }
    return "none";
  };
  EXPECT_EQ(error_of(state_with("", "")), "none");
  EXPECT_EQ(category_of([] { parse_state(state_with("int8", "int9")); }), Category::unsupported);
  EXPECT_NE(error_of(state_with("int8", "int9")).find("int9"), std::string::npos);
  EXPECT_EQ(category_of([] { parse_state(state_with("adamw", "lion")); }), Category::unsupported);
  EXPECT_NE(error_of(state_with("adamw", "lion")).find("lion"), std::string::npos);
  EXPECT_EQ(category_of([] { parse_state(state_with("codes", "other")); }), Category::unsupported);
  EXPECT_EQ(category_of([] { parse_state(state_with("\"5\"", "\"5x\"")); }), Category::integrity);
  EXPECT_EQ(category_of([] { parse_state(state_with("0009\"", "009\"")); }), Category::integrity);
  EXPECT_EQ(category_of([] { parse_state("{"); }), Category::integrity);
  EXPECT_NE(error_of("{"), "none");
}

}  // namespace
}  // namespace modicum
