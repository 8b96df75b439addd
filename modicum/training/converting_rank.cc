#include "modicum/training/converting_rank.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "modicum/probe/probe.h"

namespace modicum {
namespace {

// Any valid point for ChunkSums, whose proof is not used here: the load proves its coverage.
constexpr uint64_t kPoint = 2;
constexpr uint64_t kRestRoomBytes = 256 * kKiB;  // fits into the staging, which is free then

ConvertedFile finished_file(const ConvertPart& part, uint32_t file, const ChunkSums* sums) {
  const Manifest& manifest = part.form.manifest();
  const DataFile& of = manifest.files[file];
  ConvertedFile finished{part.folder + of.name, of.identity.size_bytes, 0, {}, {}, {}};
  if (sums == nullptr) return finished;
  for (uint32_t s = 0; s < manifest.tensors.size(); ++s) {
    if (manifest.tensors[s].at.file != file) continue;
    part.checks(*sums, s);
    for (const ChunkSum& chunk : sums->of_tensor(s)) {
      finished.chunks.push_back(chunk.digest);
      finished.checksums.push_back(chunk.checksum);
    }
  }
  return finished;
}

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
  for (const Stored& stored : manifest.tensors) {
    if (stored.spec.fqn == tensor) return stored.spec.dtype;
  }
  return DType::f32;
}

void require_range(const ConvertPart& part, const std::vector<TensorLoss>& losses) {
  if (part.allow_overflow) return;
  for (const TensorLoss& of : losses) {
    if (of.loss.overflowed == 0) continue;
    const DType dtype = dtype_of(part.form.manifest(), of.tensor);
    fail(Category::mismatch,
         fmt::format("{} finite value(s) of the tensor would become infinite as {}; the first is "
                     "element {}; --allow-overflow writes infinities",
                     of.loss.overflowed, torch_name(dtype), of.loss.first_index),
         {.file = of.file,
          .tensor = of.tensor,
          .expected = fmt::format("magnitudes of at most {}", largest_finite(dtype)),
          .got = fmt::format("{}", of.loss.first_value)});
  }
}

}  // namespace

void add_published(ConvertReport& report, const Published& published) {
  report.is_durable = published.is_durable;
  report.checkpoint.warnings.insert(report.checkpoint.warnings.end(), published.warnings.begin(),
                                    published.warnings.end());
}

StepOwner owner_of_conversion() {
  const ProcessIdentity process = identify_process(getpid());
  return {process.host, process.pid, process.started};
}

bool is_owner_dead(const StepOwner& owner) {
  return is_dead({owner.host, owner.pid, owner.started});
}

ConvertRank::ConvertRank(ConvertWorld& world, int rank)
    : world_(world),
      at_{rank, &world.board, nullptr, &ledger_},
      // The kernel's peak counts from here on.
      baseline_bytes_((reset_peak_rss(), read_process_memory().held())),
      ledger_(world.task.plan.promise.ledger_limit_bytes(rank), world.reporter(rank)),
      outcome_{.load = {.rank = rank, .pid = static_cast<int32_t>(getpid())}} {}

Converted ConvertRank::live() {
  ledger_.reporter().promise(world_.task.plan.promise, at_.rank);
  const ReportedPhase phase(ledger_.reporter(), "convert");
  const Charge header = ledger_.adopt(Purpose::header, world_.held[Purpose::header]);
  const Charge plan = ledger_.adopt(Purpose::plan, world_.held[Purpose::plan]);
  for (const ConvertPart& part : world_.parts) convert(part);
  RankOutcome& load = outcome_.load;
  load.loaded_ns = world_.clock.now_ns();
  load.baseline_bytes = baseline_bytes_;
  load.ledger_peak_bytes = ledger_.peak_bytes();
  load.kernel_peak_bytes = read_process_memory().peak_held();
  return outcome_;
}

void ConvertRank::convert(const ConvertPart& part) {
  const Manifest& saved = part.form.manifest();
  std::optional<ChunkSums> written;
  std::optional<Compared> read;  // not if `checks` compares the same values
  if (part.checks) {
    written.emplace(saved, kPoint);
  } else {
    read.emplace(part.source.manifest);
  }
  const Sums sums{written ? &*written : nullptr, read ? &*read : nullptr};
  for (uint32_t f = 0; f < saved.files.size(); ++f) {
    const DataFile& file = saved.files[f];
    const ConvertedFile* const done =
        world_.conversion.finished(part.folder + file.name, file.identity.size_bytes,
                                   part.checks ? ChunkSums::chunks_of_file(saved, f) : 0);
    if (done != nullptr) {
      if (done->losses) require_range(part, *done->losses);
      outcome_.load.digest += done->digest;
      ++outcome_.kept_files;
    } else {
      world_.conversion.forget(part.folder + file.name);
      outcome_.load.digest += convert(part, f, sums);
    }
  }
  if (read) world_.compared.give(at_.rank, *read);
}

// A chunk is read only in part if a recipe divides a stored tensor among targets. Its whole is
// compared before the file counts as finished: a later call keeps the file without reading again.
void ConvertRank::compare(const ConvertPart& part, Compared& read) {
  read.compare();
  if (!read.has_rest()) return;
  const Buffer room = ledger_.charge(Purpose::staging, kRestRoomBytes);
  outcome_.load.storage_read_bytes += read.compare_rest(part.source, room.bytes());
}

uint64_t ConvertRank::convert(const ConvertPart& part, uint32_t file, const Sums& sums) {
  const std::string directory = join_path(world_.conversion.directory(), part.folder);
  const SaveFiles to{*world_.task.run.files, directory};
  outcome_.written_bytes += create_file(part.form.manifest(), file, to,
                                        part.keeps_holes ? Space::sparse : Space::reserved);
  Loaded loaded;
  if (!part.form.targets_of(file).empty()) loaded = load_targets(part, file, to, sums);
  if (sums.read != nullptr) compare(part, *sums.read);
  if (part.completes) {
    const auto beat = [this](uint64_t bytes) { world_.board.beat(at_.rank, bytes); };
    const FileOutcome rest =
        part.completes({part.form.manifest(), file, to, *sums.written, ledger_, beat});
    outcome_.written_bytes += rest.written_bytes;
    outcome_.load.bytes_loaded += rest.written_bytes;
    outcome_.load.storage_read_bytes += rest.read_bytes;
  }
  ConvertedFile finished = finished_file(part, file, sums.written);
  finished.digest = loaded.digest;
  finished.losses = std::move(loaded.losses);
  world_.conversion.add(std::move(finished));
  return loaded.digest;
}

ConvertRank::Loaded ConvertRank::load_targets(const ConvertPart& part, uint32_t file,
                                              const SaveFiles& to, const Sums& sums) {
  const std::span<const uint32_t> targets = part.form.targets_of(file);
  const Recipe recipe = part_of(part.recipe, targets, part.source.manifest.tensors.size());
  PlanOptions options = world_.task.plan.options;
  options.save.reset();
  const Plan plan = make_plan(part.source.manifest, recipe, whole_layout(1), options);
  std::vector<uint32_t> places;
  for (const uint32_t t : targets) places.push_back(part.form.places()[t]);

  FileSink sink(plan, part.form.manifest(), places, to,
                {.keeps_holes = part.keeps_holes, .sums = sums.written});
  RangeLosses losses;
  const LoadOutcome loaded =
      modicum::load(part.source, plan, at_, sink,
                    {.threads = world_.task.threads, .losses = &losses, .compared = sums.read});
  std::vector<TensorLoss> lost = losses_of(losses, plan);
  require_range(part, lost);
  sink.finish();
  outcome_.written_bytes += sink.bytes_written();
  RankOutcome& sum = outcome_.load;
  sum.bytes_loaded += loaded.bytes_loaded;
  sum.storage_read_bytes += loaded.storage_read_bytes;
  sum.page_cache_peak_bytes = std::max(sum.page_cache_peak_bytes, loaded.page_cache_peak_bytes);
  return {sink.digest(), std::move(lost)};
}

}  // namespace modicum
