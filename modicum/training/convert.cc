#include "modicum/training/convert.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "modicum/probe/probe.h"
#include "modicum/training/converting_rank.h"

namespace modicum {
namespace {

// A digest of everything that determines the bytes of the output. The source's files are identified
// by device, inode and mtime, since reading their data would take as long as the conversion.
Digest inputs_of(const ConvertTask& task) {
  Hasher hasher;
  const Plan& plan = task.load.plan;
  hasher.add(plan.inputs.hex()).add(task.form.manifest().identity.hex()).add(task.keeps_holes);
  for (const DataFile& file : plan.manifest->files) {
    hasher.add(file.identity.device).add(file.identity.inode).add(file.identity.mtime_ns);
  }
  return hasher.digest();
}

// Whether a cast can take values out of the range of their new dtype.
bool casts_can_lose(const Run& run) {
  const Recipe& recipe = run.recipe;
  return std::any_of(recipe.targets.begin(), recipe.targets.end(), [&](const Target& target) {
    const std::vector<uint32_t> from = stored_under(recipe, target.root);
    return std::any_of(from.begin(), from.end(), [&](uint32_t stored) {
      return can_lose_range(run.checkpoint.manifest.tensors[stored].spec.dtype, target.spec.dtype);
    });
  });
}

// "N values of M tensors became ...; most of them, K, in T"
std::string loss_text(const std::vector<TensorLoss>& losses, int64_t RangeLoss::*count,
                      std::string_view became) {
  uint64_t values = 0, tensors = 0;
  const TensorLoss* most = nullptr;
  for (const TensorLoss& tensor_loss : losses) {
    const int64_t lost = tensor_loss.loss.*count;
    if (lost == 0) continue;
    values += static_cast<uint64_t>(lost);
    ++tensors;
    if (most == nullptr || lost > most->loss.*count) most = &tensor_loss;
  }
  if (most == nullptr) return "";
  return fmt::format("{} of {} became {}; most of them, {}, in {}", counted(values, "value"),
                     counted(tensors, "tensor"), became, most->loss.*count,
                     printable(most->tensor));
}

// Adds the losses of all files, including those that an earlier call has finished, and warnings.
void add_losses(const ConversionJournal& conversion, ConvertReport& report) {
  report.losses.emplace();
  for (const ConvertedFile& file : conversion.recorded()) {
    if (!file.losses) continue;
    report.losses->insert(report.losses->end(), file.losses->begin(), file.losses->end());
  }
  for (const std::string& text :
       {loss_text(*report.losses, &RangeLoss::overflowed, "infinite"),
        loss_text(*report.losses, &RangeLoss::underflowed, "zero, too small for the dtype")}) {
    if (!text.empty()) report.checkpoint.warnings.push_back(text);
  }
}

// The change that companion files such as config.json must record, if any.
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

// Writes the companion files and the index. Adds their bytes and the warnings to the report.
void add_companions(const ConvertTask& task, const ConversionJournal& conversion,
                    ConvertReport& report) {
  FileSystem& files = *task.load.run.files;
  const Checkpoint& source = task.load.run.checkpoint;
  const Companions companions =
      copy_companions(source, companion_files(source),
                      {.form = new_form_of(source, task.load.run.recipe), .vocabulary = {}}, files,
                      conversion.directory());
  for (const CheckpointFile& file : companions.copied) report.written_bytes += file.bytes;
  std::vector<std::string>& warnings = report.checkpoint.warnings;
  warnings.insert(warnings.end(), companions.warnings.begin(), companions.warnings.end());
  if (const std::string index = output_index(task.form.manifest()); !index.empty()) {
    write_durably(files, join_path(conversion.directory(), kIndexFile), index);
    report.written_bytes += index.size();
  }
}

}  // namespace

ConvertedForm::ConvertedForm(const Checkpoint& source, const Recipe& recipe,
                             std::optional<uint64_t> shard_bytes) {
  std::vector<TensorSpec> specs;
  std::vector<uint32_t> file_of;
  for (uint32_t t = 0; t < recipe.targets.size(); ++t) {
    if (recipe.is_alias(t)) continue;
    specs.push_back(recipe.targets[t].spec);
    const std::vector<uint32_t> from = stored_under(recipe, recipe.targets[t].root);
    // Targets without a stored tensor go into the last file.
    file_of.push_back(from.empty() ? static_cast<uint32_t>(source.manifest.files.size()) - 1
                                   : source.manifest.tensors[from.front()].at.file);
  }
  manifest_ = output_manifest(shard_bytes ? split_into_files(std::move(specs), *shard_bytes)
                                          : group_by_file(std::move(specs), file_of),
                              stem_of(source.manifest));
  std::map<std::string_view, uint32_t> target_of;
  std::vector<std::vector<uint32_t>> aliases(recipe.targets.size());
  for (uint32_t t = 0; t < recipe.targets.size(); ++t) {
    if (recipe.is_alias(t)) {
      aliases[recipe.nodes[recipe.targets[t].root].from].push_back(t);
    } else {
      target_of[recipe.targets[t].spec.fqn] = t;
    }
  }
  places_.assign(recipe.targets.size(), UINT32_MAX);
  targets_.resize(manifest_.files.size());
  for (uint32_t s = 0; s < manifest_.tensors.size(); ++s) {
    const TensorSpec& spec = manifest_.tensors[s].spec;
    const uint32_t t = target_of.at(spec.fqn);
    places_[t] = s;
    std::vector<uint32_t>& of_file = targets_[manifest_.tensors[s].at.file];
    of_file.push_back(t);
    of_file.insert(of_file.end(), aliases[t].begin(), aliases[t].end());
  }
}

Footprint ConvertedForm::footprint(const Plan& plan) const {
  Footprint result;
  result[Purpose::header] = manifest_.held_bytes();
  result[Purpose::plan] =
      plan.held_bytes() + 2 * heap_block_bytes(places_.size() * sizeof(uint32_t));
  return result;
}

ConvertReport convert_in_rank(const ConvertTask& task, ShowBytes show) {
  const Run& run = task.load.run;
  ConversionJournal conversion(
      *run.files, task.out,
      {inputs_of(task), owner_of_conversion(), is_owner_dead, casts_can_lose(run), task.adopts});
  ConvertWorld world(task, conversion);
  const std::vector<ConvertOutcome> outcomes = outcomes_of<ConvertRank>(world, show);
  const ConvertOutcome& outcome = outcomes.front();
  ConvertReport report{.checkpoint = facts_of(run.checkpoint),
                       .promise = task.load.plan.promise,
                       .ranks = {outcome.load},
                       .path = task.out,
                       .written_bytes = outcome.written_bytes,
                       .kept_files = outcome.kept_files,
                       .digest = outcome.load.digest,
                       .compared = world.compared.merged()};
  add_losses(conversion, report);
  add_companions(task, conversion, report);
  add_published(report, conversion.publish());
  report.launcher = world.launcher_memory();
  report.cgroup_peak_bytes = world.cgroup_peak.bytes();
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
