// Records that are too long, of another kind than a regular file, or would be too long once
// written. Catches: a file that is read before its length is known; a checkpoint that is written
// and then refused by every reader.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "modicum/base/base.h"
#include "modicum/base/error_double.h"
#include "modicum/checkpoint/checkpoint.h"
#include "modicum/io/file_doubles.h"
#include "modicum/io/temp_dir_double.h"

namespace modicum {
namespace {

const SaveOwner kOwner{"host", 7, 11};

// Where a sparse file of 1 TiB takes no space.
class LongRecords : public testing::Test {
 protected:
  LongRecords() {
    files.make_directory(root);
    save(1);
  }

  CheckpointInFlight save(int64_t number) {
    CheckpointInFlight step = begin_checkpoint(files, root, number, kOwner);
    publish_checkpoint(files, step, {.step = number, .uuid = step.uuid, .tool = "modicum"});
    return step;
  }
  void put_long(const std::string& path) {
    files.create(path)->close();
    std::filesystem::resize_file(path, uint64_t{1} << 40);
  }
  void expect_too_long(const std::string& file, const std::string& most, FunctionRef<void()> call) {
    const std::optional<Error> error = error_of(call);
    ASSERT_TRUE(error) << file;
    EXPECT_EQ(error->category(), Category::integrity) << error->what();
    EXPECT_EQ(error->facts().file, file);
    EXPECT_EQ(error->facts().expected, "at most " + most + " bytes");
    EXPECT_EQ(error->facts().got, "1099511627776 bytes");
  }

  const TempDir temp;
  PosixFileSystem files;
  const std::string root = temp / "root";
};

TEST_F(LongRecords, ACommitIsDamage) {
  files.make_directory(root + "/step-9");
  put_long(root + "/step-9/COMMIT");
  expect_too_long("COMMIT", "65536", [&] { open_run_checkpoint(files, root + "/step-9"); });
  std::vector<SkippedCheckpoint> skipped;
  EXPECT_EQ(newest_checkpoint(files, root, skipped).step, 1);
  ASSERT_EQ(skipped.size(), 1);
  EXPECT_EQ(skipped[0].step, 9);
  // A save with retention succeeds, and leaves the damaged checkpoint.
  const CheckpointInFlight step = save(2);
  EXPECT_EQ(keep_newest(files, step, 2), std::nullopt);
  EXPECT_EQ(files.list(root), (std::vector<std::string>{"latest", "step-1", "step-2", "step-9"}));
}

TEST_F(LongRecords, AManifestIsDamage) {
  files.remove(root + "/step-1/manifest.json");
  put_long(root + "/step-1/manifest.json");
  expect_too_long("manifest.json", "100000000",
                  [&] { open_run_checkpoint(files, root + "/step-1"); });
}

TEST_F(LongRecords, AManifestOfAnotherProgramMakesNoStep) {
  files.make_directory(root + "/other");
  put_long(root + "/other/manifest.json");
  EXPECT_FALSE(is_run_checkpoint(files, root + "/other"));
}

TEST_F(LongRecords, AnIndexIsRefused) {
  const std::string path = root + "/step-1/model.safetensors.index.json";
  put_long(path);
  const std::optional<Error> error = error_of([&] { open_checkpoint(files, path); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->category(), Category::index_json) << error->what();
}

// Opening a FIFO as a file would wait for its other end.
TEST_F(LongRecords, OtherKindsOfFilesAreRefusedAtOnce) {
  const std::string commit = root + "/step-1/COMMIT";
  const auto refused = [&] {
    const std::optional<Error> error =
        error_of([&] { open_run_checkpoint(files, root + "/step-1"); });
    return error ? error->what_happened() : "opened";
  };
  files.remove(commit);
  ASSERT_EQ(::mkfifo(commit.c_str(), 0600), 0);
  EXPECT_EQ(refused(), "a file of the checkpoint is not a regular file");
  files.remove(commit);
  std::filesystem::create_symlink("/dev/zero", commit);
  EXPECT_EQ(refused(), "a file of the checkpoint is not a regular file");
  files.remove(commit);
  files.make_directory(commit);
  EXPECT_EQ(refused(), "a file of the checkpoint is not a regular file");
}

std::vector<TensorSpec> specs_of(size_t tensors, std::vector<int64_t> shape, DType dtype) {
  std::vector<TensorSpec> specs;
  for (size_t i = 0; i < tensors; ++i) {
    specs.push_back({fmt::format("model.layers.{}.\"weight\"", i), Role::param, dtype, shape});
  }
  return specs;
}

std::vector<CheckpointTensor> recorded(const Manifest& manifest) {
  std::vector<CheckpointTensor> tensors;
  for (const StoredTensor& stored : manifest.tensors) {
    const uint64_t chunks = (stored.at.bytes() + kDigestChunkBytes - 1) / kDigestChunkBytes;
    tensors.push_back({stored.spec, std::vector<uint64_t>(chunks, UINT64_MAX), {}});
  }
  return tensors;
}

TEST(MostRecordBytes, IsJustAboveTheLengthOfTheRecord) {
  const Manifest weights =
      output_manifest(split_into_files(specs_of(7, {1000, 9000}, DType::bf16), 40 << 20));
  const Manifest state = output_manifest({specs_of(3, {3, 1'000'000}, DType::f32)});
  ASSERT_GT(weights.files.size(), 1);
  CheckpointRecord record{
      .step = 7, .uuid = std::string(32, 'a'), .world_size = 8, .tool = "modicum"};
  std::vector<std::string> others;
  for (int i = 0; i < 500; ++i) others.push_back(fmt::format("extra/rank-{:05}.safetensors", i));
  for (const std::string& name : others) record.files.push_back({name, UINT64_MAX, UINT64_MAX, {}});
  for (const DataFile& file : weights.files) record.files.push_back({file.name, 1 << 30, 999, {}});
  record.files.push_back({kIndexFile, 1000, 1000, {}});
  record.files.push_back({"optimizer/model.safetensors", 1 << 30, 999, {}});
  record.tensors = recorded(weights);
  record.state = recorded(state);
  const uint64_t bytes = record_json(record).size();
  const std::vector<const Manifest*> parts = {&weights, &state};
  EXPECT_GE(most_record_bytes(parts, others), bytes);
  EXPECT_LE(most_record_bytes(parts, others), bytes + kMiB + 1000);
}

// 13 TB of one tensor: 59 MB of digests.
TEST(MostRecordBytes, ARecordThatWouldBeTooLongHasNoChecksums) {
  constexpr uint64_t kChunks = 3'100'000;
  MemoryFileSystem files;
  const CheckpointInFlight step = begin_checkpoint(files, "/root", 3, {"host", 1, 2});
  CheckpointRecord record{.step = 3, .uuid = step.uuid, .world_size = 1, .tool = "modicum"};
  const std::vector<uint64_t> sums(kChunks, UINT64_MAX);
  const auto numel = static_cast<int64_t>(kChunks * kDigestChunkBytes);
  record.tensors.push_back({{"w", Role::param, DType::u8, {numel}}, sums, sums});
  publish_checkpoint(files, step, record);
  record.tensors.front().checksums.clear();
  EXPECT_EQ(open_run_checkpoint(files, "/root/step-3").record, record);
}

// 3 T parameters in bfloat16, with master, exp_avg and exp_avg_sq in float32: 42 TB, and 191 MB of
// digests.
TEST(MostRecordBytes, ACheckpointOfThreeTrillionParametersIsRefused) {
  const auto of_parameters = [](size_t billions, size_t tensors, DType dtype) {
    return output_manifest(
        split_into_files(specs_of(billions * tensors, {1'000, 1'000'000}, dtype), 5 * kGiB));
  };
  const Manifest weights = of_parameters(3'000, 1, DType::bf16);
  const Manifest state = of_parameters(3'000, 3, DType::f32);
  const std::vector<const Manifest*> both = {&weights, &state};
  const std::optional<Error> error = error_of([&] { require_recordable(both, {}); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->category(), Category::unsupported);
  EXPECT_EQ(error->facts().file, "manifest.json");
  EXPECT_EQ(error->facts().expected, "at most 100000000 bytes");
  EXPECT_GT(most_record_bytes(both, {}), 190'000'000);
  EXPECT_EQ(error->facts().got, fmt::format("{} bytes", most_record_bytes(both, {})));
  // Without the optimizer, or with a seventh of the parameters, the checkpoint can be read.
  require_recordable(std::span(both).first(1), {});
  const Manifest fewer = of_parameters(400, 1, DType::bf16);
  const Manifest fewer_state = of_parameters(400, 3, DType::f32);
  require_recordable(std::vector<const Manifest*>{&fewer, &fewer_state}, {});
}

// Catches: a checkpoint that is committed with a record that no reader accepts, if its length was
// not known before. The test's record has 5.3 million digests.
TEST_F(LongRecords, ARecordThatIsTooLongIsNotWritten) {
  CheckpointInFlight step = begin_checkpoint(files, root, 2, kOwner);
  CheckpointRecord record{.step = 2, .uuid = step.uuid};
  record.tensors = {{{"w", Role::param, DType::u8, {5'300'000 * int64_t{kDigestChunkBytes}}},
                     std::vector<uint64_t>(5'300'000)}};
  const std::optional<Error> error = error_of([&] { publish_checkpoint(files, step, record); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->category(), Category::unsupported) << error->what();
  EXPECT_EQ(files.list(step.directory), std::vector<std::string>());
  EXPECT_FALSE(files.exists(root + "/step-2"));
}

TEST(OutputManifest, AnIndexThatWouldBeTooLongIsRefused) {
  FileSpecs two(2);
  for (int i = 0; i < 25'000; ++i) {
    two[i % 2].push_back({fmt::format("{:04080}", i), Role::param, DType::u8, {}});
  }
  const std::optional<Error> error = error_of([&] { output_manifest(two); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->category(), Category::unsupported) << error->what();
  EXPECT_EQ(error->facts().file, "model.safetensors.index.json");
}

}  // namespace
}  // namespace modicum
