#include "modicum/training/checkpoint_save.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "modicum/base/base.h"
#include "modicum/probe/probe.h"

namespace modicum {
namespace {

SaveOwner this_process() {
  const ProcessIdentity identity = identify_process(getpid());
  return {identity.host, identity.pid, identity.started};
}

// Removes what dead processes have left next to the checkpoint. Returns warnings of what remains.
std::vector<std::string> collect(FileSystem& files, const CheckpointInFlight& in_flight) {
  return remove_leftovers(files, in_flight, [](const SaveOwner& owner) {
    return is_dead({owner.host, owner.pid, owner.started});
  });
}

// Owns the directory of the checkpoint, with that of the state in it, or discards it.
std::unique_ptr<OwnerFile> owner_of(FileSystem& files, const CheckpointInFlight& in_flight,
                                    bool has_state = false) {
  try {
    std::unique_ptr<OwnerFile> owner = own_checkpoint(files, in_flight);
    if (has_state) files.make_directory(join_path(in_flight.directory, kStateDirectory));
    return owner;
  } catch (...) {
    discard_checkpoint(files, in_flight);
    throw;
  }
}

// The first damage in a checkpoint, which several threads read.
std::optional<std::string> damage_of(FileSystem& files, const std::string& path,
                                     FunctionRef<void()> poll) {
  constexpr int kMaxReaders = 4;  // each holds 4 MiB and the checkpoint's record
  const int readers = std::min(usable_cpus(), kMaxReaders);
  std::vector<std::optional<Error>> damages(static_cast<size_t>(readers));
  run_workers(readers, [&](int reader) {
    damages[static_cast<size_t>(reader)] = damage_of_checkpoint(
        files, path, poll, {static_cast<uint64_t>(reader), static_cast<uint64_t>(readers)});
  });
  for (const std::optional<Error>& damage : damages) {
    if (damage) return damage->what();
  }
  return std::nullopt;
}

}  // namespace

CarriedFiles::CarriedFiles(const RunCheckpoint& resumed, const Manifest& state)
    : directory(resumed.path), world_size(resumed.record.world_size) {
  const std::string folder = std::string(kStateDirectory) + "/";
  std::set<std::string, std::less<>> state_files = {folder + kStateFile, folder + kStateRecipeFile,
                                                    folder + kIndexFile};  // by the save itself
  for (const DataFile& file : state.files) state_files.insert(folder + file.name);
  for (const CheckpointFile& file : resumed.record.files) {
    const bool is_inside =
        file.name.starts_with(folder) || file.name.starts_with(fmt::format("{}/", kExtraDirectory));
    if (is_inside && !state_files.contains(file.name)) files.push_back(file);
  }
}

void require_recordable(const SavePlan& plan, const Manifest* state,
                        std::span<const std::string> others) {
  std::vector<const Manifest*> parts = {&plan.manifest()};
  if (state != nullptr) parts.push_back(state);
  require_recordable(parts, others);
}

std::optional<DamagedCheckpoint> set_damaged_aside(FileSystem& files, const std::string& root,
                                                   int64_t step, FunctionRef<void()> poll) {
  const std::string path = join_path(root, fmt::format("step-{}", step));
  const std::optional<DirectoryEntry> entry = files.entry(path);
  if (!entry || !entry->is_directory) return std::nullopt;
  const std::optional<std::string> uuid = committed_uuid(files, path);
  auto examined = examine_checkpoint(files, root, step);
  if (!examined) return std::nullopt;
  if (auto* const damaged = std::get_if<SkippedCheckpoint>(&*examined)) {
    return set_aside(files, root, std::move(*damaged), uuid);
  }
  examined.reset();  // the record is read again by each reader
  const std::optional<std::string> reason = damage_of(files, path, poll);
  if (!reason) return std::nullopt;
  return set_aside(files, root, {step, *reason}, uuid);
}

std::string warning_of(const DamagedCheckpoint& damaged) {
  return fmt::format(
      "the checkpoint of step {} was damaged and is now {} ({}), which Modicum never removes: {}",
      damaged.step, base_name(damaged.path), format_size(damaged.bytes), damaged.reason);
}

std::optional<std::string> state_recipe_text(const Plan& plan) {
  const Recipe& recipe = *plan.recipe;
  const Manifest& manifest = *plan.manifest;
  std::vector<uint32_t> stored;
  const std::vector<NamedTie> ties = word_embedding_ties(manifest);  // known without a recipe
  std::set<std::string_view> saved;
  for (const StoredTensor& tensor : manifest.tensors) saved.insert(tensor.spec.fqn);
  bool is_identity = recipe.unused.empty();
  for (uint32_t t = 0; t < recipe.targets.size(); ++t) {
    const TensorSpec& spec = recipe.targets[t].spec;
    const Node& root = recipe.nodes[recipe.targets[t].root];
    if (root.op == Op::caller) continue;
    stored.push_back(t);
    if (recipe.is_alias(t)) {  // without a recipe its saved tensor would be trained by itself
      is_identity &=
          !saved.contains(spec.fqn) ||
          std::any_of(ties.begin(), ties.end(), [&](const NamedTie& tie) {
            return tie.name == spec.fqn && tie.target == recipe.targets[root.from].spec.fqn;
          });
      continue;
    }
    is_identity &= root.op == Op::stored && manifest.tensors[root.from].spec.fqn == spec.fqn &&
                   root.dtype == spec.dtype;
  }
  if (is_identity) return std::nullopt;
  return recipe_text(part_of(recipe, stored, manifest.tensors.size()), manifest);
}

CheckpointSave::CheckpointSave(FileSystem& files, const std::string& root, int64_t step,
                               bool has_state, std::optional<size_t> keep)
    : files_(files),
      root_(root),
      keep_(keep),
      in_flight_(begin_checkpoint(files, root, step, this_process(), keep.has_value())),
      pid_(getpid()),
      owner_(owner_of(files, in_flight_, has_state)),
      warnings_(collect(files, in_flight_)) {}

// Begins the checkpoint before it removes leftovers: a directory without COMMIT and without a
// checkpoint in flight would look like the directory of another program.
CheckpointSave::CheckpointSave(FileSystem& files, const OuterDirectory& inside, int64_t step)
    : files_(files),
      root_(inside.directory),
      in_flight_(begin_checkpoint_in(files, inside.directory, step, this_process())),
      pid_(getpid()),
      owner_(owner_of(files, in_flight_)),
      warnings_(collect(files, in_flight_)) {}

CheckpointSave::~CheckpointSave() {
  if (is_published_ || pid_ != getpid()) return;
  owner_.reset();  // on NFS an open file stays, under another name, and with it its directory
  discard_checkpoint(files_, in_flight_);
}

uint64_t CheckpointSave::point() const { return point_of(in_flight_.uuid); }

// Completes the files that the ranks have written into the folder `prefix`, and adds them to the
// record. Returns their tensors.
std::vector<CheckpointTensor> CheckpointSave::add_part(SavedCheckpoint& saved,
                                                       const std::string& prefix,
                                                       const Manifest& manifest) {
  const std::string directory = join_path(in_flight_.directory, prefix);
  CompletedFiles part =
      complete_files(manifest, point(), saved.record.world_size, {files_, directory});
  if (part.files.size() > manifest.files.size()) saved.written_bytes += part.files.back().bytes;
  for (CheckpointFile& file : part.files) {
    file.name = prefix + file.name;
    saved.record.files.push_back(std::move(file));
  }
  return std::move(part.tensors);
}

void CheckpointSave::add_file(SavedCheckpoint& saved, const std::string& name,
                              const std::string& text) {
  require_readable(text.size(), name);
  write_durably(files_, join_path(in_flight_.directory, name), text);
  add_record(saved, {name, text.size(), text.size(), digest_of(text)});
}

void CheckpointSave::add_record(SavedCheckpoint& saved, CheckpointFile file) {
  saved.written_bytes += file.bytes;
  saved.record.files.push_back(std::move(file));
}

void CheckpointSave::add_companions(const Checkpoint& source, const ConfigChange& change,
                                    SavedCheckpoint& saved) {
  std::vector<std::string> names = companion_files(source);
  std::erase_if(names, [this](const std::string& name) {
    return in_flight_.is_inside && files_.exists(join_path(in_flight_.root, name));
  });
  Companions companions = copy_companions(source, names, change, files_, in_flight_.directory);
  for (CheckpointFile& file : companions.copied) {
    if (in_flight_.is_inside) {
      place_companion(saved, file);
    } else {
      add_record(saved, std::move(file));
    }
  }
  saved.warnings = std::move(companions.warnings);
}

// Scripts write such files of their own, a tokenizer for example, into another program's directory
// when the checkpoint is committed. So there a copied one is no part of the record.
void CheckpointSave::place_companion(SavedCheckpoint& saved, const CheckpointFile& file) {
  const std::string copied = join_path(in_flight_.directory, file.name);
  try {
    files_.rename_new(copied, join_path(in_flight_.root, file.name));
  } catch (const Error& error) {
    if (error.category() != Category::conflict) throw;
    return files_.remove(copied);  // the script has written its own meanwhile
  }
  saved.written_bytes += file.bytes;
}

// Adds a file of the caller to the record; writes it unless a rank has done so.
void CheckpointSave::add_written(SavedCheckpoint& saved, const NewFile& file) {
  if (file.text) return add_file(saved, file.name, *file.text);
  const std::unique_ptr<File> written = files_.open(join_path(in_flight_.directory, file.name));
  const uint64_t bytes = written->identity().size_bytes;
  add_record(saved, {file.name, bytes, bytes, digest_of(*written, bytes)});
}

void CheckpointSave::add_carried(SavedCheckpoint& saved, const CarriedFiles& carried) {
  for (const CheckpointFile& file : carried.files) {
    const std::string folder =
        join_path(in_flight_.directory, file.name.substr(0, file.name.find('/')));
    if (!files_.is_directory(folder)) files_.make_directory(folder);
    const std::unique_ptr<File> from = files_.open(join_path(carried.directory, file.name));
    const auto copied = copy_durably(*from, files_, join_path(in_flight_.directory, file.name));
    if (!copied) {
      fail(Category::conflict, "the file changed while it was copied", {.file = file.name});
    }
    if (file.digested_bytes == file.bytes && copied->digest != file.digest) {
      fail(Category::integrity, "the file is not the one that was saved",
           {.file = file.name, .expected = file.digest.hex(), .got = copied->digest.hex()});
    }
    add_record(saved, {file.name, copied->bytes, copied->bytes, copied->digest});
  }
  if (!carried.files.empty()) saved.record.world_size = carried.world_size;
}

SavedCheckpoint CheckpointSave::publish(const Checkpoint& source, const SavePlan& plan,
                                        const std::optional<SavedState>& state,
                                        const PublishOptions& options) {
  SavedCheckpoint saved{.step = in_flight_.step};
  saved.record = {.step = in_flight_.step,
                  .uuid = in_flight_.uuid,
                  .world_size = plan.plan().ranks(),
                  .tool = "modicum " MODICUM_VERSION};
  saved.record.tensors = add_part(saved, "", plan.manifest());
  if (state) {
    const std::string prefix = std::string(kStateDirectory) + "/";
    saved.record.state = add_part(saved, prefix, state->manifest);
    add_file(saved, prefix + kStateFile, state->facts);
    if (const auto recipe = state_recipe_text(plan.plan())) {
      add_file(saved, prefix + kStateRecipeFile, *recipe);
    }
  }
  if (!source.directory.empty()) {
    add_companions(source, {plan.new_form(source), options.vocabulary}, saved);
  }
  for (const NewFile& file : options.more) add_written(saved, file);
  if (options.carried != nullptr) add_carried(saved, *options.carried);
  commit(options, saved);
  saved.path = root_;
  if (!in_flight_.is_inside) saved.path = join_path(root_, fmt::format("step-{}", in_flight_.step));
  saved.warnings.insert(saved.warnings.end(), warnings_.begin(), warnings_.end());
  return saved;
}

// Commits without the lock, too: no committed work depends on it.
void CheckpointSave::commit(const PublishOptions& options, SavedCheckpoint& saved) {
  if (pid_ != getpid()) {
    fail(Category::conflict, "a forked child does not publish the checkpoint of its parent",
         {.file = base_name(in_flight_.directory)});
  }
  SteadyClock clock;
  const RootLock lock(files_, in_flight_.root, options.lock_limit_ns, clock, options.waits);
  owner_->require_ours();
  owner_->remove();  // it is no file of the checkpoint
  Publication published = publish_checkpoint(files_, in_flight_, saved.record);
  is_published_ = true;
  saved.is_durable = published.is_durable;
  std::move(published.warnings.begin(), published.warnings.end(),
            std::back_inserter(saved.warnings));
  saved.durable_ns = clock.now_ns();
  if (keep_ && published.may_vanish) {
    saved.warnings.emplace_back("no older checkpoint was removed, since this one may be lost");
  } else if (keep_) {
    const std::optional<std::string> warning = keep_newest(files_, in_flight_, *keep_);
    if (warning) saved.warnings.push_back(*warning);
  }
  if (lock.is_refused()) {
    saved.warnings.push_back(fmt::format(
        "another save has published or removed checkpoints here for {} s; this one did not "
        "wait for its end",
        options.lock_limit_ns / kNsPerSecond));
  }
}

}  // namespace modicum
