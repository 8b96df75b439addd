// Saving local buffers into the files of a checkpoint. Part of the door of `stream`.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "modicum/checkpoint/checkpoint.h"
#include "modicum/memory/memory.h"
#include "modicum/plan/plan.h"
#include "modicum/ranks/ranks.h"
#include "modicum/stream/sink.h"
#include "modicum/stream/snapshot.h"
#include "modicum/stream/sums.h"

namespace modicum {

struct RankContext;

struct SaveForm {
  bool copies_unused = true;   // stored tensors that no target reads are copied from the source
  std::optional<DType> dtype;  // default: as loaded
  std::optional<uint64_t> shard_bytes;  // of a file; default: the files of the source
  std::vector<bool> is_computed;        // see SavedOptions
  std::string_view stem = kModelStem;   // of the files' names
  bool gathers = true;                  // see PlanOptions; not in the background
};

// A save carries out, in reverse, the plan that would load the saved files. Not movable, as the
// plan borrows.
class SavePlan {
 public:
  // Saves the buffers that the plan `loaded` has filled from the checkpoint `source`.
  // MISMATCH if two tensors would have one name; USAGE without a tensor.
  SavePlan(const Checkpoint& source, const Plan& loaded, const SaveForm& form = {});
  SavePlan(const SavePlan&) = delete;
  SavePlan& operator=(const SavePlan&) = delete;

  const SavedForm& form() const noexcept { return form_; }
  const Manifest& manifest() const noexcept { return manifest_; }  // of the saved files
  const Plan& plan() const noexcept { return plan_; }              // that would load them
  // A tensor that no target reads: its index in the source's manifest and in the saved one.
  struct Copied {
    uint32_t from = 0;
    uint32_t to = 0;
  };
  std::span<const Copied> copied() const noexcept { return copied_; }
  // The memory of a save on each rank, besides the buffers and plan().staging.
  Footprint footprint() const;

 private:
  SavedForm form_;
  Manifest manifest_;
  Recipe recipe_;
  Plan plan_;
  std::vector<Copied> copied_;
};

// The destination of a save: an existing directory without files of these names.
struct SaveFiles {
  FileSystem& files;
  const std::string& directory;
};

// Creates file `file` of `manifest` in its full size, with its header. Reserved space cannot run
// out later; a sparse file takes space for written pages. Returns the bytes written. CONFLICT if
// the file exists; NOSPACE, IO.
enum class Space : uint8_t { reserved, sparse };
uint64_t create_file(const Manifest& manifest, uint32_t file, const SaveFiles& to,
                     Space space = Space::reserved);

// The counters of one rank's save.
struct SaveOutcome {
  uint64_t written_bytes = 0;   // headers included
  uint64_t read_bytes = 0;      // of tensors copied from the source
  uint64_t gathered_bytes = 0;  // that this rank gave to the ranks of its node to write
};

// Saves rank `at.rank`'s part of the plan from `from`, the buffers that were loaded. All ranks call
// it at the same time; `sums` receives the sums of this rank's writes. Memory besides the
// buffers is charged to `at.ledger` and committed before the first byte is written.
//
// On success this rank's writes are synced, but not the directory. The files are complete once all
// ranks have returned and the merged sums are proven. On failure the caller must discard the
// directory. Errors: NOSPACE, IO, CONFLICT if a file exists; UNSUPPORTED if a buffer can't be read;
// BUDGET, NOMEM; PEER if another rank failed.
//
// With `at.gather`, which is required if the plan's staging has a part of it and which has been
// committed, the ranks of the node write the short runs of divided rows together.
//
// In the background the host memory is read through `snapshot`, which `expect_writes` was called
// for. All ranks have called create_files before, and then met; the save meets no other rank.
struct SaveRun {
  const Checkpoint& source;
  const SavePlan& plan;
  const RankContext& at;
  Sink& from;
  int threads = 1;  // upper limit
  Snapshot* snapshot = nullptr;
};
SaveOutcome save(const SaveRun& run, const SaveFiles& to, ChunkSums& sums);
// Expects what rank `rank` will read from host memory in a save of this plan. All of it is covered.
void expect_writes(Snapshot& snapshot, const SavePlan& plan, int rank, Sink& from);

// Creates this rank's share of the files of `manifest`, with their headers, and reserves their
// space, so that a full disk fails here. Returns the bytes written. CONFLICT if a file exists;
// NOSPACE, IO.
struct RankOfMany {
  int rank = 0;
  int ranks = 1;
};
uint64_t create_files(const Manifest& manifest, const SaveFiles& to, Board& board,
                      const RankOfMany& which);

}  // namespace modicum
