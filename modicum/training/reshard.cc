#include "modicum/training/reshard.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "modicum/probe/probe.h"
#include "modicum/training/converting_rank.h"
#include "modicum/training/restate.h"

namespace modicum {
namespace {

const std::string kStatePrefix = std::string(kStateDirectory) + "/";

bool is_in(const FoundStep& step, const std::string& name) {
  return std::any_of(step.record.files.begin(), step.record.files.end(),
                     [&](const StepFile& file) { return file.name == name; });
}

// The parameters that have state in the step, with their formats if its state had format `format`.
std::vector<StateOf> parameters_of(const FoundStep& step, const StateFacts& facts,
                                   StateFormat format, FileSystem& files) {
  RunFlags flags{.directory = step.path, .layout = "none"};
  flags.optimizer = fmt::format("adamw:{}", row_of(format).name);
  flags.without_state = facts.without_state;
  const std::string recipe = kStatePrefix + kStateRecipeFile;
  if (is_in(step, recipe)) flags.recipe = join_path(step.path, recipe);
  return state_of(open_run(files, flags));
}

// A digest of everything that determines the bytes of the output.
Digest inputs_of(const ReshardTask& task) {
  Hasher hasher;
  hasher.add(task.step.found.record.uuid).add(task.load.plan.inputs.hex());
  hasher.add(task.form.weights().manifest().identity.hex());
  if (const ConvertedForm* const state = task.form.state()) {
    hasher.add(state->manifest().identity.hex());
  }
  hasher.add(task.form.new_facts().value_or(""));
  // Without a state the files of the weights are added twice.
  for (const Manifest* const of : {&task.load.run.checkpoint.manifest,
                                   task.form.state() ? &task.form.state_run().checkpoint.manifest
                                                     : &task.load.run.checkpoint.manifest}) {
    for (const DataFile& file : of->files) {
      hasher.add(file.identity.device).add(file.identity.inode).add(file.identity.mtime_ns);
    }
  }
  return hasher.digest();
}

// Compares the digests of copied tensors with the digests in the record of the source step. Ignores
// tensors whose values or dtype change.
class Recorded {
 public:
  Recorded(const RecordedDigests& digests, const Manifest& written,
           const std::set<std::string, std::less<>>& changed)
      : digests_(digests), written_(written), changed_(changed) {}

  void check(const ChunkSums& sums, uint32_t s) const {
    const TensorSpec& spec = written_.tensors[s].spec;
    const auto saved = digests_.chunks_of(spec);
    if (!saved || changed_.contains(spec.fqn)) return;
    const std::span<const ChunkSum> chunks = sums.of_tensor(s);
    for (size_t c = 0; c < chunks.size(); ++c) {
      if (c < saved->size() && chunks[c].digest == (*saved)[c]) continue;
      fail(Category::integrity, "the values of the step are not those that were saved",
           {.tensor = spec.fqn,
            .expected = c < saved->size() ? fmt::format("{:016x}", (*saved)[c]) : "no such chunk",
            .got = fmt::format("{:016x}", chunks[c].digest)});
    }
  }

 private:
  const RecordedDigests& digests_;
  const Manifest& written_;
  const std::set<std::string, std::less<>>& changed_;
};

std::vector<ConvertPart> parts_of(const ReshardTask& task) {
  static const std::set<std::string, std::less<>> kNone;
  const ReshardForm& form = task.form;
  const Restate* const restate = form.restate();
  const auto completes = [restate]() -> std::function<FileOutcome(const FileToComplete&)> {
    if (restate == nullptr) return {};
    return [restate](const FileToComplete& of) { return restate->write(of); };
  };
  const auto checks = [](const RecordedDigests& digests, const Manifest& written,
                         const std::set<std::string, std::less<>>& changed) {
    return [recorded = Recorded(digests, written, changed)](const ChunkSums& sums, uint32_t s) {
      recorded.check(sums, s);
    };
  };
  std::vector<ConvertPart> parts;
  const Run& weights = task.load.run;
  parts.push_back({weights.checkpoint, weights.recipe, form.weights(), "", false,
                   checks(task.step.tensors, form.weights().manifest(),
                          restate != nullptr ? restate->weights() : kNone),
                   completes()});
  if (const ConvertedForm* const state = form.state()) {
    const Run& run = form.state_run();
    parts.push_back({run.checkpoint, run.recipe, *state, kStatePrefix, false,
                     checks(task.step.state, state->manifest(), kNone), completes()});
  }
  return parts;
}

// Writes the files that hold no tensors, indexes included, and the step's record.
class Publication {
 public:
  Publication(const ReshardTask& task, ConversionJournal& conversion, const Digest& inputs)
      : task_(task), files_(*task.load.run.files), conversion_(conversion) {
    record_ = {.step = task.step.found.record.step,
               .uuid = inputs.hex(),
               .world_size = task.step.found.record.world_size,
               .tool = task.step.found.record.tool};
    for (ConvertedFile& file : conversion.recorded()) converted_[file.name] = std::move(file);
  }

  Published publish() {
    add_part("", task_.load.run.checkpoint.manifest, task_.form.weights(), record_.tensors);
    if (const ConvertedForm* const state = task_.form.state()) {
      add_part(kStatePrefix, task_.form.state_run().checkpoint.manifest, *state, record_.state);
    }
    for (const StepFile& file : task_.step.found.record.files) {
      if (!written_.contains(file.name)) copy(file);
    }
    copy_unrecorded();
    return conversion_.publish(commit_in_place(files_, conversion_.directory(), record_));
  }
  const StepRecord& record() const noexcept { return record_; }
  uint64_t written_bytes() const noexcept { return written_bytes_; }
  const std::vector<std::string>& warnings() const noexcept { return warnings_; }

 private:
  void add_part(const std::string& prefix, const Manifest& source, const ConvertedForm& form,
                std::vector<StepTensor>& tensors) {
    for (const DataFile& file : source.files) written_.insert(prefix + file.name);
    written_.insert(prefix + kIndexFile);
    const Manifest& manifest = form.manifest();
    std::vector<SumsOfFile> left;  // by file: the sums of its further tensors
    for (uint32_t f = 0; f < manifest.files.size(); ++f) {
      const DataFile& file = manifest.files[f];
      const std::string header = output_header(manifest, f);
      record_.files.push_back(
          {prefix + file.name, file.identity.size_bytes, header.size(), digest_of(header)});
      left.push_back(sums_of(prefix + file.name, ChunkSums::chunks_of_file(manifest, f)));
    }
    for (const Stored& stored : manifest.tensors) {
      SumsOfFile& from = left[stored.at.file];
      const uint64_t chunks = digest_chunks_of(stored);
      tensors.push_back({stored.spec, take(from.digests, chunks), take(from.checksums, chunks)});
    }
    if (const std::string index = output_index(manifest); !index.empty()) {
      add(prefix + kIndexFile, index);
    }
  }

  struct SumsOfFile {
    std::span<const uint64_t> digests, checksums;  // of its tensors' chunks, one after another
  };

  // The sums of a file's tensors in the journal, which is read again from the disk.
  SumsOfFile sums_of(const std::string& name, uint64_t chunks) const {
    static const ConvertedFile kNone;
    const auto found = converted_.find(name);
    const ConvertedFile& file = found == converted_.end() ? kNone : found->second;
    if (file.name == name && file.chunks.size() == chunks && file.checksums.size() == chunks) {
      return {file.chunks, file.checksums};
    }
    fail(Category::integrity, "the conversion's journal has been changed",
         {.file = name,
          .expected = fmt::format("{} digests of chunks", chunks),
          .got = std::to_string(std::min(file.chunks.size(), file.checksums.size()))});
  }

  static std::vector<uint64_t> take(std::span<const uint64_t>& from, uint64_t n) {
    const auto first = from.first(n);
    from = from.subspan(n);
    return {first.begin(), first.end()};
  }

  void copy(const StepFile& file) {
    if (const auto facts = task_.form.new_facts();
        facts && file.name == kStatePrefix + kStateFile) {
      return add(file.name, *facts);
    }
    const std::unique_ptr<File> from = files_.open(join_path(task_.step.found.path, file.name));
    const auto copied = copy_durably(*from, files_, place_of(file.name));
    if (!copied) {
      fail(Category::conflict, "the file changed while it was copied", {.file = file.name});
    }
    if (copied->digest != file.digest && file.digested_bytes == file.bytes) {
      fail(Category::integrity, "the file is not the one that was saved",
           {.file = file.name, .expected = file.digest.hex(), .got = copied->digest.hex()});
    }
    add_record({file.name, copied->bytes, copied->bytes, copied->digest});
  }

  // A step inside another program's directory does not record that program's files, such as config,
  // tokenizer, schedulers and states of random number generators.
  void copy_unrecorded() {
    Companions others =
        copy_companions(task_.load.run.checkpoint, unrecorded_files(files_, task_.step.found),
                        std::nullopt, files_, conversion_.directory());
    for (StepFile& file : others.copied) add_record(std::move(file));
    warnings_ = std::move(others.warnings);
  }

  void add(const std::string& name, const std::string& text) {
    write_durably(files_, place_of(name), text);
    add_record({name, text.size(), text.size(), digest_of(text)});
  }

  // The path of a new file, whose folder is made.
  std::string place_of(const std::string& name) {
    std::string path = join_path(conversion_.directory(), name);
    const std::string folder = path.substr(0, path.rfind('/'));
    if (!files_.is_directory(folder)) files_.make_directory(folder);
    return path;
  }

  void add_record(StepFile file) {
    written_.insert(file.name);
    written_bytes_ += file.bytes;
    record_.files.push_back(std::move(file));
  }

  const ReshardTask& task_;
  FileSystem& files_;
  ConversionJournal& conversion_;
  StepRecord record_;
  std::map<std::string, ConvertedFile> converted_;  // the journal's entries, by file
  std::vector<std::string> warnings_;
  // The source's data files and indexes, which are not copied, and the files that were copied.
  std::set<std::string> written_;
  uint64_t written_bytes_ = 0;
};

uint64_t digest_of(const std::vector<StepTensor>& tensors) {
  uint64_t digest = 0;
  for (const StepTensor& tensor : tensors) {
    digest += digest_of_empty(tensor.spec);
    for (const uint64_t chunk : tensor.chunks) digest += chunk;
  }
  return digest;
}

void require_recordable(const ReshardTask& task) {
  std::vector<const Manifest*> parts = {&task.form.weights().manifest()};
  if (task.form.state() != nullptr) parts.push_back(&task.form.state()->manifest());
  std::vector<std::string> others;
  for (const StepFile& file : task.step.found.record.files) others.push_back(file.name);
  modicum::require_recordable(parts, others);
}

// Checks the parts of the source that the rank process does not check: headers and files without
// tensors. If the state's format changes, also checks all values, since the converted values have
// no recorded digest to compare with.
void check_source(const ReshardTask& task) {
  FileSystem& files = *task.load.run.files;
  for (const StepFile& file : task.step.found.record.files) {
    check_digest(files, task.step.found.path, file);
  }
  if (task.form.restate() == nullptr) return;
  const Verified verified = verify_step(files, task.step.found.path, [] {});
  if (const Error* const fault = verified.first_fault()) throw *fault;
}

}  // namespace

ReshardForm::ReshardForm(const RecordedStep& from, const Run& weights,
                         const ReshardOptions& options) {
  FileSystem& files = *weights.files;
  const FoundStep& step = from.found;
  if (from.has_state) {
    RunFlags flags{.directory = join_path(step.path, kStateDirectory),
                   .layout = "none",
                   .destination = "discard",
                   .staging = options.staging};
    state_run_.emplace(open_run(files, flags));
  }
  if (options.format) restate_in(step, weights, options);
  ConvertedForm::Options of{.shard_bytes = options.shard_bytes};
  if (restate_ != nullptr) of.without = restate_->weights();
  weights_.emplace(weights.checkpoint, weights.recipe, of);
  if (!state_run_ || state_) return;
  state_.emplace(state_run_->checkpoint, state_run_->recipe,
                 ConvertedForm::Options{.shard_bytes = options.shard_bytes});
}

ReshardForm::~ReshardForm() = default;

void ReshardForm::restate_in(const FoundStep& step, const Run& weights,
                             const ReshardOptions& options) {
  FileSystem& files = *weights.files;
  const StateFormat format = *options.format;
  if (!state_run_) {
    fail(Category::mismatch, "the step has no optimizer state", {.file = base_name(step.path)});
  }
  const std::string path = join_path(state_run_->checkpoint.directory, kStateFile);
  facts_ = std::make_unique<StateFacts>(
      parse_state(read_text(*files.open(path), kLongestText, Category::integrity)));
  if (facts_->format == format) return;
  const std::vector<StateOf> from = parameters_of(step, *facts_, facts_->format, files);
  const std::vector<StateOf> to = parameters_of(step, *facts_, format, files);
  StateFiles(state_run_->checkpoint.manifest).require_of(from);
  restate_ =
      std::make_unique<Restate>(weights.checkpoint, state_run_->checkpoint, *facts_, from, to);
  const uint64_t most = options.shard_bytes.value_or(kStateFileBytes);
  state_.emplace(output_manifest(split_into_files(state_specs(to), most)), state_run_->recipe);
  facts_->format = format;
  facts_->digest.reset();  // of the old values
}

std::optional<std::string> ReshardForm::new_facts() const {
  if (restate_ == nullptr) return std::nullopt;
  return state_json(*facts_);
}

Footprint ReshardForm::footprint(const Plan& plan) const {
  Footprint held = weights_->footprint(plan);
  held[Purpose::plan] += ChunkSums::held_bytes(weights_->manifest());
  held[Purpose::header] += RecordedDigests::held_bytes(*plan.manifest);
  if (!state_) return held;
  const Plan state = plan_run(*state_run_, *state_run_->options.strategy, std::nullopt);
  held += state_->footprint(state);
  held[Purpose::header] += state_run_->checkpoint.manifest.held_bytes();
  held[Purpose::header] += RecordedDigests::held_bytes(state_run_->checkpoint.manifest);
  // The promise covers the loads of the weights; those of the state may need more.
  const uint64_t of_state = state.promise.ledger_limit_bytes(0);
  const uint64_t of_weights = plan.promise.ledger_limit_bytes(0);
  held[Purpose::plan] += of_state - std::min(of_state, of_weights);
  held[Purpose::plan] += ChunkSums::held_bytes(state_->manifest());
  if (restate_ != nullptr) {
    held[Purpose::header] += restate_->held_bytes({&weights_->manifest(), &state_->manifest()});
    // Its window takes the place of the load's staging, which may be smaller.
    const uint64_t staging = plan.staging.total_bytes;
    held[Purpose::staging] += Restate::kBytes - std::min(Restate::kBytes, staging);
  }
  return held;
}

ConvertReport reshard_in_rank(const ReshardTask& task, ShowBytes show) {
  const Run& run = task.load.run;
  require_recordable(task);
  const Digest inputs = inputs_of(task);
  ConversionJournal conversion(*run.files, task.out,
                               {inputs, owner_of_conversion(), is_owner_dead, false, task.adopts});
  check_source(task);
  if (task.form.state() != nullptr) {
    const std::string folder = join_path(conversion.directory(), kStateDirectory);
    if (!run.files->is_directory(folder)) run.files->make_directory(folder);
  }
  ConvertWorld world(task.load, parts_of(task), task.form.footprint(task.load.plan), conversion);
  const std::vector<Converted> outcomes = outcomes_of<ConvertRank>(world, show);
  const Converted& of = outcomes.front();
  Publication publication(task, conversion, inputs);
  const Published published = publication.publish();
  const StepRecord& record = publication.record();
  ConvertReport report{.checkpoint = facts_of(run.checkpoint),
                       .promise = task.load.plan.promise,
                       .ranks = {of.load},
                       .launcher_bytes = read_process_memory().held(),
                       .path = task.out,
                       .written_bytes = of.written_bytes + publication.written_bytes(),
                       .kept_files = of.kept_files,
                       .digest = digest_of(record.tensors),
                       .step = record.step};
  add_published(report, published);
  report.elapsed_s = world.seconds_until(world.clock.now_ns());
  report.checkpoint.warnings.insert(report.checkpoint.warnings.end(),
                                    publication.warnings().begin(), publication.warnings().end());
  for (const StepFile& file : record.files) report.files.push_back({file.name, file.bytes});
  return report;
}

}  // namespace modicum
