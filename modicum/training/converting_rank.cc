#include "modicum/training/converting_rank.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "modicum/probe/probe.h"

namespace modicum {
namespace {

constexpr uint64_t kRestRoomBytes = 256 * kKiB;  // fits into the staging, which is free then

// The tensors of `plan` that have lost something.
std::vector<TensorLoss> losses_of(const RangeLosses& losses, const Plan& plan) {
  std::vector<TensorLoss> lost;
  for (const auto& [t, loss] : losses.all()) {
    lost.push_back({.tensor = plan.recipe->targets[t].spec.fqn, .loss = loss});
    if (loss.first_stored >= plan.manifest->tensors.size()) continue;
    const uint32_t file = plan.manifest->tensors[loss.first_stored].at.file;
    lost.back().file = plan.manifest->files[file].name;
  }
  return lost;
}

DType dtype_of(const Manifest& manifest, const std::string& tensor) {
  for (const StoredTensor& stored : manifest.tensors) {
    if (stored.spec.fqn == tensor) return stored.spec.dtype;
  }
  return DType::f32;
}

void require_range(const ConvertTask& task, const std::vector<TensorLoss>& losses) {
  if (task.allow_overflow) return;
  for (const TensorLoss& tensor_loss : losses) {
    if (tensor_loss.loss.overflowed == 0) continue;
    const DType dtype = dtype_of(task.form.manifest(), tensor_loss.tensor);
    fail(Category::mismatch,
         fmt::format("{} of the tensor would become infinite as {}; the first is element {}; "
                     "--allow-overflow writes infinities",
                     counted(static_cast<uint64_t>(tensor_loss.loss.overflowed), "finite value"),
                     torch_name(dtype), tensor_loss.loss.first_index),
         {.file = tensor_loss.file,
          .tensor = tensor_loss.tensor,
          .expected = fmt::format("magnitudes of at most {}", largest_finite(dtype)),
          .got = fmt::format("{}", tensor_loss.loss.first_value)});
  }
}

}  // namespace

void add_published(ConvertReport& report, const Publication& published) {
  report.is_durable = published.is_durable;
  report.checkpoint.warnings.insert(report.checkpoint.warnings.end(), published.warnings.begin(),
                                    published.warnings.end());
}

SaveOwner owner_of_conversion() {
  const ProcessIdentity process = identify_process(getpid());
  return {process.host, process.pid, process.started};
}

bool is_owner_dead(const SaveOwner& owner) {
  return is_dead({owner.host, owner.pid, owner.started});
}

ConvertRank::ConvertRank(ConvertWorld& world, int rank)
    : world_(world),
      at_{rank, &world.board, nullptr, &ledger_},
      // The kernel's peak counts from here on.
      baseline_bytes_((reset_peak_rss(), read_process_memory().held_bytes())),
      ledger_(world.task.plan.promise.ledger_limit_bytes(rank), world.reporter(rank)),
      outcome_{.load = {.rank = rank, .pid = static_cast<int32_t>(getpid())}} {}

ConvertOutcome ConvertRank::live() {
  ledger_.reporter().promise(world_.task.plan.promise, at_.rank);
  const ReportedPhase phase(ledger_.reporter(), "convert");
  const Footprint footprint = form().footprint(world_.task.plan);
  const Charge header = ledger_.adopt(Purpose::header, footprint[Purpose::header]);
  const Charge plan = ledger_.adopt(Purpose::plan, footprint[Purpose::plan]);
  convert_files();
  RankOutcome& load = outcome_.load;
  load.loaded_ns = world_.clock.now_ns();
  load.baseline_bytes = baseline_bytes_;
  load.ledger_peak_bytes = ledger_.peak_bytes();
  load.kernel_peak_bytes = read_process_memory().peak_held();
  return outcome_;
}

void ConvertRank::convert_files() {
  const Manifest& written = form().manifest();
  ComparedChunks read(world_.task.run.checkpoint.manifest);
  for (uint32_t f = 0; f < written.files.size(); ++f) {
    const DataFile& file = written.files[f];
    const ConvertedFile* const done =
        world_.conversion.finished(file.name, file.identity.size_bytes);
    if (done != nullptr) {
      if (done->losses) require_range(world_.convert, *done->losses);
      outcome_.load.digest += done->digest;
      ++outcome_.kept_files;
    } else {
      world_.conversion.forget(file.name);
      outcome_.load.digest += convert(f, read);
    }
  }
  world_.compared.give(at_.rank, read);
}

// A chunk is read only in part if a recipe divides a stored tensor among targets. Its whole is
// compared before the file counts as finished: a later call keeps the file without reading again.
void ConvertRank::compare(ComparedChunks& read) {
  read.compare();
  if (!read.has_rest()) return;
  const Buffer room = ledger_.charge(Purpose::staging, kRestRoomBytes);
  const auto poll = [this] {
    at_.board->check();
    at_.board->beat(at_.rank, 0);
  };
  outcome_.load.storage_read_bytes +=
      read.compare_rest(world_.task.run.checkpoint, room.bytes(), poll);
}

uint64_t ConvertRank::convert(uint32_t file, ComparedChunks& read) {
  const Manifest& written = form().manifest();
  const SaveFiles to{*world_.task.run.files, world_.conversion.directory()};
  outcome_.written_bytes +=
      create_file(written, file, to, world_.convert.keeps_holes ? Space::sparse : Space::reserved);
  LoadedTargets loaded;
  if (!form().targets_of(file).empty()) loaded = load_targets(file, to, read);
  compare(read);
  const DataFile& data_file = written.files[file];
  world_.conversion.add(
      {data_file.name, data_file.identity.size_bytes, loaded.digest, std::move(loaded.losses)});
  return loaded.digest;
}

ConvertRank::LoadedTargets ConvertRank::load_targets(uint32_t file, const SaveFiles& to,
                                                     ComparedChunks& read) {
  const Run& run = world_.task.run;
  const Manifest& source = run.checkpoint.manifest;
  const std::span<const uint32_t> targets = form().targets_of(file);
  const Recipe recipe = part_of(run.recipe, targets, source.tensors.size());
  PlanOptions options = world_.task.plan.options;
  options.save.reset();
  const Plan plan = make_plan(source, recipe, whole_layout(1), options);
  std::vector<uint32_t> places;
  for (const uint32_t t : targets) places.push_back(form().places()[t]);

  FileSink sink(plan, form().manifest(), places, to, world_.convert.keeps_holes);
  RangeLosses losses;
  const LoadOutcome loaded =
      modicum::load(run.checkpoint, plan, at_, sink,
                    {.threads = world_.task.threads, .losses = &losses, .compared = &read});
  std::vector<TensorLoss> lost = losses_of(losses, plan);
  require_range(world_.convert, lost);
  sink.finish();
  outcome_.written_bytes += sink.bytes_written();
  RankOutcome& sum = outcome_.load;
  sum.bytes_loaded += loaded.bytes_loaded;
  sum.storage_read_bytes += loaded.storage_read_bytes;
  sum.page_cache_peak_bytes = std::max(sum.page_cache_peak_bytes, loaded.page_cache_peak_bytes);
  return {sink.digest(), std::move(lost)};
}

}  // namespace modicum
