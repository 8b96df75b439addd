// The record of a saved checkpoint that is opened as a checkpoint.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string_view>

#include "modicum/checkpoint/parts.h"
#include "modicum/checkpoint/record_text.h"
#include "modicum/checkpoint/run_files.h"

namespace modicum {
namespace {

bool is_committed(FileSystem& files, const std::string& directory) {
  return !directory.empty() && files.exists(join_path(directory, "COMMIT"));
}

// Whether files may have left the directory of a save, for the directory around it: it has a record
// but not all recorded files, or nothing, as after a failed save. (A ROOT has such directories,
// too, but they are renamed as a whole.)
bool may_have_moved(FileSystem& files, const std::string& partial) {
  if (!files.is_directory(partial)) return false;
  if (files.list(partial).empty()) return true;
  if (!has_record(files, partial)) return false;
  const CheckpointRecord record = parse_record(text_of(files, partial, kManifest));
  return std::any_of(record.files.begin(), record.files.end(), [&](const CheckpointFile& file) {
    return !files.exists(join_path(partial, file.name));
  });
}

// Throws UNCOMMITTED for the files of a save that has not ended: those in its directory, and those
// of a directory without a record into which it may have moved some.
void refuse_in_flight(FileSystem& files, const std::string& directory) {
  std::string partial = base_name(directory);
  if (!partial.starts_with(kPartialPrefix)) {
    const std::vector<std::string> names = files.list(directory);
    const auto found = std::find_if(names.begin(), names.end(), [&](const std::string& name) {
      return name.starts_with(kPartialPrefix) && may_have_moved(files, join_path(directory, name));
    });
    if (found == names.end()) return;
    partial = *found;
  }
  fail(Category::uncommitted, "a save into this directory is in flight or was interrupted",
       {.file = directory,
        .expected = fmt::format("no {}; remove it if no save runs and the files are another "
                                "program's",
                                partial)});
}

// Whether the file is data of the saving program. It may be large, one for each rank, and no
// checkpoint includes it: those who read it compare it.
bool is_extra(std::string_view name) {
  return name.starts_with(fmt::format("{}/", kExtraDirectory));
}

// Adds the recorded sums of a stored tensor.
void add_recorded(const StoredTensor& stored, const CheckpointTensor* recorded,
                  const std::string& file, Manifest& manifest) {
  const TensorSpec& spec = stored.spec;
  if (recorded == nullptr) {
    fail(Category::integrity, "the checkpoint's record does not list this tensor",
         {.file = file, .tensor = spec.fqn});
  }
  if (recorded->spec != spec) {
    fail(Category::integrity, "the checkpoint's record lists another dtype or shape",
         {.file = file,
          .tensor = spec.fqn,
          .expected = tensor_text(recorded->spec.dtype, recorded->spec.shape),
          .got = tensor_text(spec.dtype, spec.shape)});
  }
  if (recorded->chunks.size() != digest_chunks_of(stored)) {
    fail(Category::integrity,
         "the checkpoint's record has another number of digests for this tensor",
         {.file = file,
          .tensor = spec.fqn,
          .expected = fmt::format("{} digests", digest_chunks_of(stored)),
          .got = fmt::format("{} digests", recorded->chunks.size())});
  }
  const bool is_digest = manifest.recorded_kind == ChunkSumKind::digest;
  const std::vector<uint64_t>& sums = is_digest ? recorded->chunks : recorded->checksums;
  manifest.recorded.insert(manifest.recorded.end(), sums.begin(), sums.end());
}

}  // namespace

RecordComparison::RecordComparison(FileSystem& files, const std::string& path, bool in_save) {
  std::string directory = path;
  if (!files.is_directory(directory)) {
    if (!files.exists(directory)) return;
    directory = parent_path(directory);
  }
  std::string root = directory;
  if (compare_in(files, root)) return;
  if (base_name(directory) == kStateDirectory) {
    root = parent_path(directory);
    prefix_ = kStateFolder;
    if (compare_in(files, root)) return;
  }
  if (!in_save) refuse_in_flight(files, root);
}

// Returns false, and compares nothing, if `root` has no record.
bool RecordComparison::compare_in(FileSystem& files, const std::string& root) {
  if (is_committed(files, root)) {
    record_ = open_run_checkpoint(files, root).record;
    for (const CheckpointFile& file : record_.files) {
      if (!is_extra(file.name)) check_digest(files, root, file);
    }
    return true;
  }
  if (!has_record(files, root)) return false;
  compare_uncommitted(files, root);
  return true;
}

// Without COMMIT the files are a copy of a checkpoint's, perhaps with another config, or a save
// into the directory has not ended: then only the record tells whether they belong together.
void RecordComparison::compare_uncommitted(FileSystem& files, const std::string& root) {
  record_ = parse_record(text_of(files, root, kManifest));
  for (const CheckpointFile& file : record_.files) {
    if (!has_tensors(file) || !files.exists(join_path(root, file.name))) continue;
    try {
      check_digest(files, root, file);
    } catch (const Error& error) {
      if (error.category() != Category::integrity) throw;
      fail(
          Category::integrity,
          error.what_happened() + "; if another program has written it since, remove manifest.json",
          error.facts());
    }
  }
}

bool RecordComparison::lists(const std::string& name) const {
  return std::any_of(record_.files.begin(), record_.files.end(),
                     [&](const CheckpointFile& file) { return file.name == name; });
}

void RecordComparison::add_to(Manifest& manifest) const {
  const auto name_of = [&](const DataFile& file) { return prefix_ + file.name; };
  const bool is_listed = std::any_of(manifest.files.begin(), manifest.files.end(),
                                     [&](const DataFile& file) { return lists(name_of(file)); });
  if (!is_listed) return;  // no record, or a file that another program has added
  std::map<std::string_view, const CheckpointTensor*> recorded;
  for (const CheckpointTensor& tensor : prefix_.empty() ? record_.tensors : record_.state) {
    recorded[tensor.spec.fqn] = &tensor;
    if (tensor.checksums.size() == tensor.chunks.size()) continue;
    manifest.recorded_kind = ChunkSumKind::digest;
  }
  manifest.recorded.reserve(manifest.digest_chunks());
  for (const StoredTensor& stored : manifest.tensors) {
    const auto found = recorded.find(stored.spec.fqn);
    add_recorded(stored, found == recorded.end() ? nullptr : found->second,
                 name_of(manifest.files[stored.at.file]), manifest);
  }
}

}  // namespace modicum
