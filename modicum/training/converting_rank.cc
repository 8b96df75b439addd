#include "modicum/training/converting_rank.h"

#include <unistd.h>

#include <algorithm>
#include <optional>

#include "modicum/probe/probe.h"

namespace modicum {
namespace {

// Any valid point for ChunkSums, whose proof is not used here: the load proves its coverage.
constexpr uint64_t kPoint = 2;

ConvertedFile finished_file(const ConvertPart& part, uint32_t file, uint64_t digest,
                            const ChunkSums* sums) {
  const Manifest& manifest = part.form.manifest();
  const DataFile& of = manifest.files[file];
  ConvertedFile finished{part.folder + of.name, of.identity.size_bytes, digest, {}};
  if (sums == nullptr) return finished;
  for (uint32_t s = 0; s < manifest.tensors.size(); ++s) {
    if (manifest.tensors[s].at.file != file) continue;
    part.checks(*sums, s);
    for (const ChunkSum& chunk : sums->of_tensor(s)) finished.chunks.push_back(chunk.digest);
  }
  return finished;
}

}  // namespace

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
      ledger_(world.task.plan.promise.ledger_limit_bytes(rank), world.own_report.reporter()),
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
  std::optional<ChunkSums> sums;
  if (part.checks) sums.emplace(saved, kPoint);
  for (uint32_t f = 0; f < saved.files.size(); ++f) {
    const DataFile& file = saved.files[f];
    const ConvertedFile* const done =
        world_.conversion.finished(part.folder + file.name, file.identity.size_bytes);
    if (done != nullptr) {
      outcome_.load.digest += done->digest;
      ++outcome_.kept_files;
    } else {
      outcome_.load.digest += convert(part, f, sums ? &*sums : nullptr);
    }
  }
}

uint64_t ConvertRank::convert(const ConvertPart& part, uint32_t file, ChunkSums* sums) {
  const std::string directory = join_path(world_.conversion.directory(), part.folder);
  const SaveFiles to{*world_.task.run.files, directory};
  outcome_.written_bytes += create_file(part.form.manifest(), file, to,
                                        part.keeps_holes ? Space::sparse : Space::reserved);
  const uint64_t digest =
      part.form.targets_of(file).empty() ? 0 : load_targets(part, file, to, sums);
  if (part.completes) {
    const auto beat = [this](uint64_t bytes) { world_.board.beat(at_.rank, bytes); };
    const FileOutcome rest = part.completes({part.form.manifest(), file, to, *sums, ledger_, beat});
    outcome_.written_bytes += rest.written_bytes;
    outcome_.load.bytes_loaded += rest.written_bytes;
    outcome_.load.storage_read_bytes += rest.read_bytes;
  }
  world_.conversion.add(finished_file(part, file, digest, sums));
  return digest;
}

uint64_t ConvertRank::load_targets(const ConvertPart& part, uint32_t file, const SaveFiles& to,
                                   ChunkSums* sums) {
  const std::span<const uint32_t> targets = part.form.targets_of(file);
  const Recipe recipe = part_of(part.recipe, targets, part.source.manifest.tensors.size());
  PlanOptions options = world_.task.plan.options;
  options.save.reset();
  const Plan plan = make_plan(part.source.manifest, recipe, whole_layout(1), options);
  std::vector<uint32_t> places;
  for (const uint32_t t : targets) places.push_back(part.form.places()[t]);

  FileSink sink(plan, part.form.manifest(), places, to,
                {.keeps_holes = part.keeps_holes, .sums = sums});
  const LoadOutcome loaded =
      modicum::load(part.source, plan, at_, sink, {.threads = world_.task.threads});
  sink.finish();
  outcome_.written_bytes += sink.bytes_written();
  RankOutcome& sum = outcome_.load;
  sum.bytes_loaded += loaded.bytes_loaded;
  sum.storage_read_bytes += loaded.storage_read_bytes;
  sum.page_cache_peak_bytes = std::max(sum.page_cache_peak_bytes, loaded.page_cache_peak_bytes);
  return sink.digest();
}

}  // namespace modicum
