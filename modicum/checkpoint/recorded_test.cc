// Opening a saved checkpoint: its headers and texts are compared with its record.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "modicum/checkpoint/checkpoint.h"
#include "modicum/io/file_doubles.h"

namespace modicum {
namespace {

constexpr const char* kStep = "/root/step-3";

void put(FileSystem& files, const std::string& path, std::string_view text) {
  const auto file = files.create(path);
  file->write(std::as_bytes(std::span(text)), 0);
  file->close();
}

std::string text_of_file(FileSystem& files, const std::string& path) {
  return read_text(*files.open(path), kLongestText, Category::integrity);
}

// A checkpoint with a model, a config and an optimizer's state. The values are zeros; the digests
// are numbers from 100 on, since opening does not read values. The checksums, if any, are numbers
// from 200 on.
void put_checkpoint(FileSystem& files, bool has_checksums = false) {
  files.make_directory("/root");
  const CheckpointInFlight step = begin_checkpoint(files, "/root", 3, {"host", 1, 2});
  files.make_directory(join_path(step.directory, kStateDirectory));
  CheckpointRecord record{.step = 3, .uuid = step.uuid, .world_size = 1, .tool = "modicum"};
  uint64_t digest = 100;
  const auto add = [&](const std::string& folder, const std::vector<TensorSpec>& specs,
                       std::vector<CheckpointTensor>& tensors) {
    const Manifest manifest = output_manifest({specs});
    const std::string name = folder + manifest.files[0].name;
    SafetensorsWriter(files, join_path(step.directory, name), specs, {{"format", "pt"}}).finish();
    const std::string header = output_header(manifest, 0);
    record.files.push_back(
        {name, manifest.files[0].identity.size_bytes, header.size(), digest_of(header)});
    for (const StoredTensor& stored : manifest.tensors) {
      CheckpointTensor& tensor = tensors.emplace_back(CheckpointTensor{stored.spec, {}, {}});
      while (tensor.chunks.size() < digest_chunks_of(stored)) {
        if (has_checksums) tensor.checksums.push_back(digest + 100);
        tensor.chunks.push_back(digest++);
      }
    }
  };
  add("", {{"w", Role::param, DType::bf16, {3 << 20}}, {"b", Role::param, DType::bf16, {2}}},
      record.tensors);
  add(kStateFolder, {{"w.exp_avg", Role::param, DType::f32, {4}}}, record.state);
  put(files, join_path(step.directory, "config.json"), "{}");
  record.files.push_back({"config.json", 2, 2, digest_of("{}")});
  publish_checkpoint(files, step, record);
}

std::optional<Error> opening(FileSystem& files, const std::string& path) {
  try {
    open_checkpoint(files, path);
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

TEST(RecordComparison, GivesTheDigestsOfModelAndState) {
  MemoryFileSystem files;
  put_checkpoint(files);
  const Manifest model = open_checkpoint(files, kStep).manifest;
  std::vector<uint64_t> expected;
  for (const StoredTensor& stored : model.tensors) {
    if (stored.spec.fqn == "w") expected.insert(expected.end(), {100, 101});
    if (stored.spec.fqn == "b") expected.push_back(102);
  }
  std::vector<uint64_t> sorted = model.recorded;
  std::sort(sorted.begin(), sorted.end());
  EXPECT_EQ(sorted, (std::vector<uint64_t>{100, 101, 102}));
  EXPECT_EQ(open_checkpoint(files, std::string(kStep) + "/model.safetensors").manifest.recorded,
            model.recorded);
  for (const char* path : {"/root/step-3/optimizer", "/root/step-3/optimizer/"}) {
    EXPECT_EQ(open_checkpoint(files, path).manifest.recorded, std::vector<uint64_t>{103}) << path;
  }
  EXPECT_TRUE(open_checkpoint(files, kStep, Record::ignored).manifest.recorded.empty());
}

// Catches: the files of two saves, of which the second was interrupted between two renames, are
// read as a checkpoint; so are those of a save in flight.
TEST(RecordComparison, WithoutCommitTheTensorFilesAreCompared) {
  MemoryFileSystem files;
  put_checkpoint(files);
  const std::vector<uint64_t> recorded = open_checkpoint(files, kStep).manifest.recorded;
  files.remove(join_path(kStep, "COMMIT"));
  EXPECT_EQ(open_checkpoint(files, kStep).manifest.recorded, recorded);
  EXPECT_EQ(open_checkpoint(files, "/root/step-3/optimizer").manifest.recorded,
            std::vector<uint64_t>{103});
  files.remove(join_path(kStep, "config.json"));
  put(files, join_path(kStep, "config.json"), "{ }");
  EXPECT_FALSE(opening(files, kStep)) << "a copy may have another config";
  const std::string model = join_path(kStep, "model.safetensors");
  std::string bytes(files.open(model)->identity().size_bytes, '\0');
  files.open(model)->read(std::as_writable_bytes(std::span(bytes)), 0);
  bytes.replace(bytes.find("\"b\""), 3, "\"c\"");  // as of another save
  files.remove(model);
  put(files, model, bytes);
  EXPECT_EQ(opening(files, kStep)->category(), Category::integrity);
}

TEST(RecordComparison, RefusesTheFilesOfASaveInFlight) {
  MemoryFileSystem files;
  files.make_directory("/root");
  const CheckpointInFlight inside = begin_checkpoint_in(files, "/root/outer", 3, {"host", 1, 2});
  const auto put_weights = [&](const std::string& directory) {
    put(files, join_path(directory, "model.safetensors"),
        safetensors_header(std::vector<TensorSpec>{{"w", Role::param, DType::bf16, {0}}}, "m"));
  };
  put_weights("/root/outer");  // another program's
  put_weights(inside.directory);
  EXPECT_FALSE(opening(files, "/root/outer")) << "no file has been moved";
  EXPECT_EQ(opening(files, inside.directory)->category(), Category::uncommitted);
  CheckpointRecord record{.step = 3, .uuid = inside.uuid, .world_size = 1, .tool = "modicum"};
  record.files.push_back({"model.safetensors", 1, 1, {}});
  put(files, join_path(inside.directory, "manifest.json"), record_json(record));
  EXPECT_FALSE(opening(files, "/root/outer"));
  files.rename(join_path(inside.directory, "model.safetensors"), "/root/outer/model.safetensors");
  const auto error = opening(files, "/root/outer");
  ASSERT_TRUE(error);
  EXPECT_EQ(error->category(), Category::uncommitted);
  EXPECT_EQ(error->facts().expected.find("no " + base_name(inside.directory)), 0U);
  open_checkpoint(files, "/root/outer", Record::in_save);
  files.remove_tree(inside.directory);
  EXPECT_FALSE(opening(files, "/root/outer"));
}

// Catches: a text that is not read is not compared.
TEST(RecordComparison, GivesChecksumsIfEveryTensorHasThem) {
  MemoryFileSystem files;
  put_checkpoint(files, true);
  const auto sums_of = [&](const std::string& path) {
    Manifest manifest = open_checkpoint(files, path).manifest;
    std::sort(manifest.recorded.begin(), manifest.recorded.end());
    return std::pair(manifest.recorded_kind, manifest.recorded);
  };
  using Sums = std::vector<uint64_t>;
  EXPECT_EQ(sums_of(kStep), std::pair(ChunkSumKind::checksum, Sums{200, 201, 202}));
  CheckpointRecord record = open_run_checkpoint(files, kStep).record;
  record.tensors.front().checksums.clear();
  for (const char* name : {"COMMIT", "manifest.json"}) files.remove(join_path(kStep, name));
  commit_in_place(files, kStep, record);
  EXPECT_EQ(sums_of(kStep), std::pair(ChunkSumKind::digest, Sums{100, 101, 102}));
  EXPECT_EQ(sums_of("/root/step-3/optimizer"), std::pair(ChunkSumKind::checksum, Sums{203}));
}

TEST(RecordComparison, ChangedHeadersAndTextsAreFoundByModelAndState) {
  for (const std::string name :
       {"config.json", "model.safetensors", "manifest.json", "optimizer/model.safetensors"}) {
    MemoryFileSystem files;
    put_checkpoint(files);
    const std::string path = join_path(kStep, name);
    std::string text = text_of_file(files, path);
    const size_t at = name.ends_with("json") ? 0 : text.find("dtype");
    text[at] ^= 1;
    files.remove(path);
    put(files, path, text);
    for (const char* opened :
         {"/root/step-3", "/root/step-3/optimizer", "/root/step-3/model.safetensors"}) {
      const auto error = opening(files, opened);
      ASSERT_TRUE(error) << name << " " << opened;
      EXPECT_EQ(error->category(), Category::integrity) << name << " " << opened;
      EXPECT_EQ(error->facts().file, name) << opened;
    }
  }
}

TEST(RecordComparison, AMissingFileIsNamed) {
  MemoryFileSystem files;
  put_checkpoint(files);
  files.remove(join_path(kStep, "model.safetensors"));
  const auto error = opening(files, kStep);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->category(), Category::integrity);
  EXPECT_EQ(error->facts().file, "model.safetensors");
}

TEST(RecordComparison, AFileOfAnotherProgramHasNoDigests) {
  MemoryFileSystem files;
  put_checkpoint(files);
  const std::string other = join_path(kStep, "other.safetensors");
  SafetensorsWriter(files, other, std::vector<TensorSpec>{{"w", Role::param, DType::f32, {2}}})
      .finish();
  EXPECT_TRUE(open_checkpoint(files, other).manifest.recorded.empty());
}

TEST(RecordComparison, ARecordOfOtherTensorsIsRefused) {
  for (const char* what : {"dtype", "digests", "checksums", "name"}) {
    MemoryFileSystem files;
    put_checkpoint(files);
    CheckpointRecord record = open_run_checkpoint(files, kStep).record;
    CheckpointTensor& tensor = record.tensors.front();
    if (what == std::string("dtype")) tensor.spec.dtype = DType::f16;
    if (what == std::string("digests")) tensor.chunks.push_back(1);
    if (what == std::string("checksums")) tensor.checksums.assign(9, 1);
    if (what == std::string("name")) tensor.spec.fqn = "other";
    for (const char* name : {"COMMIT", "manifest.json"}) files.remove(join_path(kStep, name));
    commit_in_place(files, kStep, record);
    const auto error = opening(files, kStep);
    ASSERT_TRUE(error) << what;
    EXPECT_EQ(error->category(), Category::integrity) << what;
    EXPECT_FALSE(error->facts().tensor.empty()) << what;
  }
}

}  // namespace
}  // namespace modicum
