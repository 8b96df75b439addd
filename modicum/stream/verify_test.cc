// The damage of a checkpoint's values. Catches: a file that can't be read and counts as damaged.
#include "modicum/stream/verify.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "modicum/io/file_doubles.h"
#include "modicum/kernels/kernels.h"
#include "modicum/stream/stream.h"

namespace modicum {
namespace {

const std::string kStep = "/root/step-1";

// A checkpoint with one tensor, and a text.
void save_one_tensor(MemoryFileSystem& files) {
  const CheckpointInFlight step = begin_checkpoint(files, "/root", 1, {"host", 7, 11});
  const std::vector<TensorSpec> specs = {{"w", Role::param, DType::f32, {16}}};
  std::vector<float> values(16);
  std::iota(values.begin(), values.end(), 1.F);
  SafetensorsWriter writer(files, join_path(step.directory, "model.safetensors"), specs);
  writer.write(0, 0, std::as_bytes(std::span(values)));
  writer.finish();
  files.put(join_path(step.directory, "notes"), "notes");
  const std::string written = files.get(join_path(step.directory, "model.safetensors"));
  const uint64_t header = written.size() - values.size() * sizeof(float);
  const uint64_t chunk = digest_run(digest_seed(specs[0]), std::as_bytes(std::span(values)).data(),
                                    sizeof(float), 0, 16);
  publish_checkpoint(files, step,
                     {.step = 1,
                      .uuid = step.uuid,
                      .world_size = 1,
                      .tool = "modicum",
                      .files = {{"model.safetensors", written.size(), header,
                                 digest_of(std::string_view(written).substr(0, header))},
                                {"notes", 5, 5, digest_of(std::string_view("notes"))}},
                      .tensors = {{specs[0], {chunk}}}});
}

void change_last_byte(MemoryFileSystem& files) {
  std::string bytes = files.get(kStep + "/model.safetensors");
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  files.put(kStep + "/model.safetensors", bytes);
}

TEST(Verify, OnlyDamageIsDamage) {
  int64_t fail_at = 1;
  for (;; ++fail_at) {
    MemoryFileSystem under;
    save_one_tensor(under);
    RecordingFileSystem files(under, fail_at);
    std::optional<Category> thrown;
    try {
      EXPECT_EQ(damage_of_checkpoint(files, kStep, [] {}), std::nullopt);
    } catch (const Error& error) {
      thrown = error.category();
    }
    if (static_cast<int64_t>(files.calls().size()) < fail_at) break;
    // A directory that can't be listed only hides its config.json, on which no digest depends.
    const std::string what = files.calls()[static_cast<size_t>(fail_at) - 1].what;
    if (what == "open" || what == "read" || what == "identity" || what == "entry") {
      EXPECT_EQ(thrown, Category::io) << fail_at << ": " << what;
    }
  }
  EXPECT_GT(fail_at, 15);
}

TEST(Verify, DamageIsReturned) {
  MemoryFileSystem files;
  save_one_tensor(files);
  change_last_byte(files);
  const auto damage = damage_of_checkpoint(files, kStep, [] {});
  ASSERT_TRUE(damage);
  EXPECT_EQ(damage->category(), Category::integrity);
  EXPECT_EQ(damage->facts().tensor, "w");
  files.remove(kStep + "/COMMIT");
  EXPECT_EQ(damage_of_checkpoint(files, kStep, [] {})->category(), Category::uncommitted);
}

TEST(Verify, ValuesAreReadAlsoIfAnotherFileIsDamaged) {
  MemoryFileSystem files;
  save_one_tensor(files);
  change_last_byte(files);
  files.put(kStep + "/notes", "Notes");
  const Verification verified = verify_checkpoint(files, kStep, [] {});
  ASSERT_EQ(verified.files.size(), 2U);
  for (const VerifiedFile& file : verified.files) EXPECT_TRUE(file.fault) << file.name;
  EXPECT_EQ(verified.files[0].fault->facts().tensor, "w");
}

}  // namespace
}  // namespace modicum
