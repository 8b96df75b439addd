#include "modicum/training/convert.h"

#include <unistd.h>

#include <algorithm>
#include <map>
#include <utility>

#include "modicum/training/loading_rank.h"

namespace modicum {
namespace {

// A digest of everything that determines the bytes of the output. The times of the source's files
// are a proxy for their values.
Digest inputs_of(const ConvertTask& task) {
  Hasher hasher;
  const Plan& plan = task.load.plan;
  hasher.add(plan.inputs.hex()).add(task.form.manifest().identity.hex()).add(task.keeps_holes);
  for (const DataFile& file : plan.manifest->files) {
    hasher.add(file.identity.device).add(file.identity.inode).add(file.identity.mtime_ns);
  }
  return hasher.digest();
}

StepOwner owner_of(const ProcessIdentity& process) {
  return {process.host, process.pid, process.started};
}

// The outcome of the rank. Plain data, since it is sent from the rank's process.
struct Converted {
  RankOutcome load;  // the peaks are the highest over all files
  uint64_t written_bytes = 0;
  uint64_t kept_files = 0;
};

struct ConvertWorld : LoadWorld {
  ConvertWorld(const ConvertTask& of, ConversionJournal& conversion_of)
      : LoadWorld(of.load), convert(of), conversion(conversion_of) {}

  const ConvertTask& convert;
  ConversionJournal& conversion;
};

class ConvertRank {
 public:
  ConvertRank(ConvertWorld& world, int rank)
      : world_(world),
        task_(world.convert),
        at_{rank, &world.board, nullptr, &ledger_},
        baseline_bytes_((reset_peak_rss(), read_process_memory().held())),
        ledger_(task_.load.plan.promise.ledger_limit_bytes(rank)) {}

  Converted live() {
    const Footprint held = task_.form.footprint(task_.load.plan);
    const Charge header = ledger_.adopt(Purpose::header, held[Purpose::header]);
    const Charge plan = ledger_.adopt(Purpose::plan, held[Purpose::plan]);
    Converted outcome{.load = {.rank = at_.rank, .pid = static_cast<int32_t>(getpid())}};
    const Manifest& saved = task_.form.manifest();
    for (uint32_t f = 0; f < saved.files.size(); ++f) {
      const DataFile& file = saved.files[f];
      const ConvertedFile* const done =
          world_.conversion.finished(file.name, file.identity.size_bytes);
      if (done != nullptr) {
        outcome.load.digest += done->digest;
        ++outcome.kept_files;
      } else {
        outcome.load.digest += convert(f, outcome);
      }
    }
    outcome.load.loaded_ns = world_.clock.now_ns();
    outcome.load.baseline_bytes = baseline_bytes_;
    outcome.load.ledger_peak_bytes = ledger_.peak_bytes();
    outcome.load.kernel_peak_bytes = read_process_memory().peak_held();
    return outcome;
  }

 private:
  // Returns the digest of the file's targets.
  uint64_t convert(uint32_t file, Converted& outcome) {
    const LoadTask& load = task_.load;
    const Manifest& source = load.run.checkpoint.manifest;
    const std::span<const uint32_t> targets = task_.form.targets_of(file);
    const Recipe recipe = part_of(load.run.recipe, targets, source.tensors.size());
    PlanOptions options = load.plan.options;
    options.save.reset();
    const Plan plan = make_plan(source, recipe, whole_layout(1), options);
    std::vector<uint32_t> places;
    for (const uint32_t t : targets) places.push_back(task_.form.places()[t]);

    const SaveFiles to{*load.run.files, world_.conversion.directory()};
    const uint64_t header = create_file(task_.form.manifest(), file, to,
                                        task_.keeps_holes ? Space::sparse : Space::reserved);
    FileSink sink(plan, task_.form.manifest(), places, to, {.keeps_holes = task_.keeps_holes});
    add(outcome.load,
        modicum::load(load.run.checkpoint, plan, at_, sink, {.threads = load.threads}));
    sink.finish();
    outcome.written_bytes += header + sink.bytes_written();
    const DataFile& of = task_.form.manifest().files[file];
    world_.conversion.add({of.name, of.identity.size_bytes, sink.digest()});
    return sink.digest();
  }

  static void add(RankOutcome& sum, const LoadOutcome& of) noexcept {
    sum.bytes_loaded += of.bytes_loaded;
    sum.storage_read_bytes += of.storage_read_bytes;
    sum.page_cache_peak_bytes = std::max(sum.page_cache_peak_bytes, of.page_cache_peak_bytes);
  }

  ConvertWorld& world_;
  const ConvertTask& task_;
  const RankContext at_;
  const uint64_t baseline_bytes_;
  Ledger ledger_;
};

std::optional<NewForm> new_form_of(const Checkpoint& source, const Recipe& recipe) {
  FormTally tally;
  for (uint32_t t = 0; t < recipe.targets.size(); ++t) {
    if (recipe.is_alias(t)) continue;
    const std::vector<uint32_t> from = stored_under(recipe, recipe.targets[t].root);
    tally.add(recipe.targets[t].spec,
              from.empty() ? nullptr : &source.manifest.tensors[from.front()]);
  }
  return tally.new_form();
}

// Writes the companion files and the index. Returns their bytes.
uint64_t add_companions(const ConvertTask& task, const ConversionJournal& conversion) {
  FileSystem& files = *task.load.run.files;
  const Checkpoint& source = task.load.run.checkpoint;
  uint64_t written = 0;
  const auto add = [&](const std::string& name, const std::string& text) {
    write_durably(files, join_path(conversion.directory(), name), text);
    written += text.size();
  };
  for_each_companion(source, new_form_of(source, task.load.run.recipe), add);
  if (const std::string index = output_index(task.form.manifest()); !index.empty()) {
    add(kIndexFile, index);
  }
  return written;
}

}  // namespace

ConvertedForm::ConvertedForm(const Checkpoint& source, const Recipe& recipe,
                             std::optional<uint64_t> shard_bytes)
    : places_(recipe.targets.size(), UINT32_MAX) {
  std::vector<TensorSpec> specs;
  std::vector<uint32_t> file_of;
  std::map<std::string_view, uint32_t> target_of;
  for (uint32_t t = 0; t < recipe.targets.size(); ++t) {
    if (recipe.is_alias(t)) continue;
    specs.push_back(recipe.targets[t].spec);
    target_of[recipe.targets[t].spec.fqn] = t;
    const std::vector<uint32_t> from = stored_under(recipe, recipe.targets[t].root);
    // Targets without a stored tensor go into the last file.
    file_of.push_back(from.empty() ? static_cast<uint32_t>(source.manifest.files.size()) - 1
                                   : source.manifest.tensors[from.front()].at.file);
  }
  manifest_ = output_manifest(shard_bytes ? split_into_files(std::move(specs), *shard_bytes)
                                          : group_by_file(std::move(specs), file_of));
  std::vector<std::vector<uint32_t>> aliases(recipe.targets.size());
  for (uint32_t t = 0; t < recipe.targets.size(); ++t) {
    if (recipe.is_alias(t)) aliases[recipe.nodes[recipe.targets[t].root].from].push_back(t);
  }
  targets_.resize(manifest_.files.size());
  for (uint32_t s = 0; s < manifest_.tensors.size(); ++s) {
    const uint32_t t = target_of.at(manifest_.tensors[s].spec.fqn);
    places_[t] = s;
    std::vector<uint32_t>& of_file = targets_[manifest_.tensors[s].at.file];
    of_file.push_back(t);
    of_file.insert(of_file.end(), aliases[t].begin(), aliases[t].end());
  }
}

Footprint ConvertedForm::footprint(const Plan& plan) const {
  Footprint held;
  held[Purpose::header] = manifest_.held_bytes();
  held[Purpose::plan] = plan.held_bytes() + 2 * heap_block_bytes(places_.size() * sizeof(uint32_t));
  return held;
}

ConvertReport convert_in_rank(const ConvertTask& task, ShowBytes show) {
  const Run& run = task.load.run;
  ConversionJournal conversion(
      *run.files, task.out,
      {inputs_of(task), owner_of(identify_process(getpid())), [](const StepOwner& owner) {
         return is_dead({owner.host, owner.pid, owner.started});
       }});
  ConvertWorld world(task, conversion);
  const std::vector<Converted> outcomes = outcomes_of<ConvertRank>(world, show);
  const Converted& of = outcomes.front();
  ConvertReport report{.checkpoint = facts_of(run.checkpoint),
                       .promise = task.load.plan.promise,
                       .ranks = {of.load},
                       .launcher_bytes = read_process_memory().held(),
                       .path = task.out,
                       .written_bytes = of.written_bytes + add_companions(task, conversion),
                       .kept_files = of.kept_files,
                       .digest = of.load.digest};
  conversion.publish();
  report.elapsed_s = world.seconds_until(world.clock.now_ns());
  for (const DataFile& file : task.form.manifest().files) {
    report.files.push_back({file.name, file.identity.size_bytes});
  }
  for (const uint32_t stored : run.recipe.unused) {
    report.left_out.push_back(run.checkpoint.manifest.tensors[stored].spec.fqn);
  }
  return report;
}

}  // namespace modicum
