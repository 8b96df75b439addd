// A checkpoint inside the directory of another program: begun, published.
#include "modicum/checkpoint/run_files.h"

#include <fmt/format.h>

#include <algorithm>

#include "modicum/base/base.h"
#include "modicum/checkpoint/durable.h"
#include "modicum/checkpoint/record_text.h"

namespace modicum {
namespace {

// The files of a checkpoint would be renamed to, and stale ones removed from, where a link leads.
void refuse_links(FileSystem& files, const std::string& directory) {
  for (const char* const name : kDirectories) {
    if (!is_link(files, join_path(directory, name))) continue;
    fail(Category::conflict, "a directory of the checkpoint is a symbolic link", {.file = name});
  }
}

// The model's weights in a directory, by whatever program.
std::vector<std::string> weights_in(FileSystem& files, const std::string& directory) {
  std::vector<std::string> names = files.list(directory);
  std::erase_if(names, [&](const std::string& name) {
    return !is_weights_name(name) || files.is_directory(join_path(directory, name));
  });
  return names;
}

// The tensor files, and files in subdirectories, of the record in a directory, if it has a valid
// one.
std::vector<std::string> tensor_files_of(FileSystem& files, const std::string& directory) {
  std::vector<std::string> names;
  try {
    if (!files.exists(join_path(directory, kManifest))) return names;
    const std::string manifest = text_of(files, directory, kManifest);
    if (!is_record(manifest)) return names;
    for (const CheckpointFile& file : parse_record(manifest).files) {
      if (has_tensors(file) || file.name.find('/') != std::string::npos) names.push_back(file.name);
    }
  } catch (const Error& error) {
    if (!is_damage(error.category())) throw;
    // Another program's manifest.json: it is replaced.
  }
  return names;
}

// Removes the subdirectories that only the previous checkpoint had. `stale`: its files that were
// removed. Returns a warning if there are any.
std::optional<std::string> remove_directories(FileSystem& files,
                                              const CheckpointInFlight& in_flight,
                                              const std::vector<std::string>& stale) {
  std::optional<std::string> warning;
  for (const char* const name : kDirectories) {
    const std::string directory = join_path(in_flight.root, name);
    const bool is_stale = std::any_of(stale.begin(), stale.end(), [&](const std::string& file) {
      return file.starts_with(fmt::format("{}/", name));
    });
    if (!is_stale || files.is_directory(join_path(in_flight.directory, name))) continue;
    if (files.is_directory(directory) && files.list(directory).empty()) files.remove(directory);
    warning = fmt::format("{}the previous save's files in {}/ were removed; this save has none",
                          warning ? *warning + "; " : "", name);
  }
  return warning;
}

// Removes COMMIT, if there is one. Returns whether that is durable.
bool remove_commit(FileSystem& files, const std::string& directory) {
  const std::string commit = join_path(directory, kCommit);
  if (!files.exists(commit)) return true;
  files.remove(commit);
  return files.sync_directory(directory);
}

// Renames the files of a checkpoint into the directory that becomes the checkpoint. Then removes
// the files that no new file has replaced: those of the previous checkpoint, and other weights of a
// whole model, which readers would take for the checkpoint's.
Publication place_files(FileSystem& files, const CheckpointInFlight& in_flight,
                        const CheckpointRecord& record) {
  refuse_links(files, in_flight.root);
  std::vector<std::string> stale = tensor_files_of(files, in_flight.root);
  // Next to adapters, weights of another program may be the base model.
  if (std::any_of(record.files.begin(), record.files.end(),
                  [](const CheckpointFile& file) { return is_weights_name(file.name); })) {
    const std::vector<std::string> weights = weights_in(files, in_flight.root);
    stale.insert(stale.end(), weights.begin(), weights.end());
  }
  Publication placed;
  // Another save may have committed here since this one began: no mixture of both may have COMMIT.
  placed.depend_on(remove_commit(files, in_flight.root));
  for (const char* const name : kDirectories) {
    const std::string to = join_path(in_flight.root, name);
    const bool is_needed = files.is_directory(join_path(in_flight.directory, name));
    if (is_needed) ensure_directory(files, to);
  }
  for (const CheckpointFile& file : record.files) {
    files.rename(join_path(in_flight.directory, file.name), join_path(in_flight.root, file.name));
    std::erase(stale, file.name);
  }
  files.rename(join_path(in_flight.directory, kManifest), join_path(in_flight.root, kManifest));
  for (const std::string& name : stale) {
    if (files.exists(join_path(in_flight.root, name)))
      files.remove(join_path(in_flight.root, name));
  }
  if (const auto warning = remove_directories(files, in_flight, stale)) {
    placed.warnings.push_back(*warning);
  }
  placed.depend_on(sync_directories(files, in_flight.root));
  placed.depend_on(files.sync_directory(in_flight.root));
  return placed;
}

Publication commit_inside(FileSystem& files, const CheckpointInFlight& in_flight,
                          const std::string& text) {
  replace(files, {in_flight.root, kCommit, ".COMMIT"}, text);
  return make_durable_or_take_back([&] { return files.sync_directory(in_flight.root); },
                                   [&] { files.remove(join_path(in_flight.root, kCommit)); });
}

}  // namespace

Publication publish_inside(FileSystem& files, const CheckpointInFlight& in_flight,
                           const CheckpointRecord& record, const std::string& manifest) {
  Publication published = place_files(files, in_flight, record);
  published.take_in(commit_inside(files, in_flight, commit_json(record, manifest)));
  try {
    files.remove_tree(in_flight.directory);
  } catch (const Error& error) {
    published.warnings.push_back(
        fmt::format("the checkpoint is saved, but {} could not be removed: {}",
                    base_name(in_flight.directory), error.what()));
  }
  return published;
}

CheckpointInFlight begin_checkpoint_in(FileSystem& files, const std::string& directory_given,
                                       int64_t step, const SaveOwner& owner) {
  const std::string directory = real_directory(files, directory_given);
  ensure_directory(files, directory);
  refuse_links(files, directory);
  tensor_files_of(files, directory);  // refuses a checkpoint of a later version
  CheckpointInFlight in_flight{directory, step, make_uuid(), "", true};
  // Other programs make this directory just before the save.
  in_flight.is_durable = files.sync_directory(parent_path(directory));
  make_in_flight(files, owner, in_flight);
  in_flight.is_durable &= files.sync_directory(directory);
  in_flight.is_durable &= remove_commit(files, directory);
  return in_flight;
}

}  // namespace modicum
