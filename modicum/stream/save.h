// Saves local buffers into the files of a checkpoint. Part of the public header of `stream`.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "modicum/checkpoint/checkpoint.h"
#include "modicum/memory/memory.h"
#include "modicum/plan/plan.h"
#include "modicum/ranks/ranks.h"
#include "modicum/stream/sink.h"
#include "modicum/stream/snapshot.h"
#include "modicum/stream/sums.h"

namespace modicum {

class ComparedChunks;
struct RankContext;

struct SaveForm {
  bool copies_unused = true;   // stored tensors that no target reads are copied from the source
  std::optional<DType> dtype;  // dtype of saved floats; default: as loaded
  // Largest size of a file. If empty, the source's division into files is kept.
  std::optional<uint64_t> shard_bytes;
  std::vector<bool> is_computed;         // see SavedOptions
  std::optional<std::string_view> stem;  // of the files' names; default: as in the source
  bool gathers = true;                   // see PlanOptions; must be false for a background save
  std::vector<bool> from_first;          // see PlanOptions
};

// A save carries out, in reverse, the plan that would load the saved files. Not movable, as plan_
// refers to the other members.
class SavePlan {
 public:
  // Saves the buffers that the plan `loaded` has filled from the checkpoint `source`. Throws
  // MISMATCH if two saved tensors would have the same name; USAGE if there is no tensor to save.
  SavePlan(const Checkpoint& source, const Plan& loaded, const SaveForm& form = {});
  SavePlan(const SavePlan&) = delete;
  SavePlan& operator=(const SavePlan&) = delete;

  const SavedForm& form() const noexcept { return form_; }
  const Manifest& manifest() const noexcept { return manifest_; }  // lists the saved files
  const Plan& plan() const noexcept { return plan_; }              // would load the saved files
  // A tensor that no target reads: its index in the source's manifest and in the saved one.
  struct CopiedTensor {
    uint32_t from = 0;
    uint32_t to = 0;
  };
  std::span<const CopiedTensor> copied() const noexcept { return copied_; }
  // The facts of config.json that the save changes, for copy_companions.
  std::optional<NewForm> new_form(const Checkpoint& source) const;
  // The memory of a save on each rank in addition to the buffers and plan().staging.
  Footprint footprint() const;
  struct SaveNeeds needs() const;

 private:
  SavedForm form_;
  Manifest manifest_;
  Recipe recipe_;
  Plan plan_;
  std::vector<CopiedTensor> copied_;
};

// The texts of a part's files that a rank holds one after the other: a file's header, then the sums
// that it hands over.
uint64_t text_bytes(const Manifest& manifest) noexcept;

// What the save of a part, the model or the optimizer's state, holds on a rank besides the values
// that it saves.
struct SaveNeeds {
  Footprint footprint;        // its staging included, but not its part of a Gather
  uint64_t gather_bytes = 0;  // that part
};
// What a save of all `parts` holds on a rank; the one rule for every front. The parts are saved one
// after the other: all their plans are held at the same time, but only one part's staging; one
// Gather serves all. `own_bytes`: the rank's file of a program's own values, of which two copies
// exist while it is written. `record_bytes`: of the record, if the rank publishes the checkpoint,
// which it does after its writes, without their staging.
Footprint save_footprint(std::span<const SaveNeeds> parts, uint64_t own_bytes = 0,
                         uint64_t record_bytes = 0);

// The destination of a save: an existing directory that has no file with the name of a saved one.
struct SaveFiles {
  FileSystem& files;
  const std::string& directory;
};

// reserved: later writes can't run out of space. sparse: only written pages take space.
enum class Space : uint8_t { reserved, sparse };
// Creates file `file` of `manifest` in its full size, with its header. Returns the bytes written.
// Throws CONFLICT if the file exists, NOSPACE or IO.
uint64_t create_file(const Manifest& manifest, uint32_t file, const SaveFiles& to,
                     Space space = Space::reserved);

// The counters of one rank's save.
struct SaveOutcome {
  uint64_t written_bytes = 0;   // bytes that this rank wrote, headers included
  uint64_t read_bytes = 0;      // bytes read from the source to copy its unread tensors
  uint64_t gathered_bytes = 0;  // bytes that this rank put into the node's Gather
};

struct SaveRun {
  const Checkpoint& source;
  const SavePlan& plan;
  const RankContext& at;
  Sink& from;       // the buffers that were loaded
  int threads = 1;  // upper limit
  Snapshot* snapshot = nullptr;
  ComparedChunks* compared = nullptr;  // if set, receives the copies from the source
};
// Saves one rank's part of the plan. All ranks call it at the same time; `sums` receives the sums
// of this rank's writes. Charges its memory, which is that of footprint() and the staging, to the
// rank's ledger and commits it before the first byte is written.
//
// On success this rank's writes are synced, but not the directory. The files are complete once all
// ranks have returned and the merged sums are proven. On failure the caller must discard the
// directory. Throws NOSPACE, IO; CONFLICT if a file exists; UNSUPPORTED if a buffer can't be read;
// BUDGET, NOMEM; PEER if another rank failed.
//
// If the plan's staging has a gather part, RankContext::gather is required and must be committed:
// the ranks of a node then collect the short runs of rows that are divided among ranks, and write
// them together.
//
// A background save has a `snapshot`, for which expect_writes was called, and reads host memory
// through it. Its SavePlan must be made from a plan with Destination::copy, so that no write is
// direct. Before it, all ranks must call create_files and pass a barrier; the save itself has no
// barrier.
SaveOutcome save(const SaveRun& run, const SaveFiles& to, ChunkSums& sums);
// Calls snapshot.expect for all host memory that rank `rank` reads in a save of this plan. The
// snapshot must cover this memory.
void expect_writes(Snapshot& snapshot, const SavePlan& plan, int rank, Sink& from);

// Share number `rank` of `ranks` equal shares of the files.
struct FileShare {
  int rank = 0;
  int ranks = 1;
};
// Creates every which.ranks-th file of `manifest` from number which.rank on, with its header and
// reserved space, so that a full disk fails here. Returns the bytes written. Throws CONFLICT if a
// file exists, NOSPACE or IO; PEER if another rank failed.
uint64_t create_files(const Manifest& manifest, const SaveFiles& to, Board& board,
                      const FileShare& which);

// The prefix of the names of the files that hand_over_sums writes. A directory with one holds a
// save that is not complete.
constexpr std::string_view kSumsPrefix = ".sums-";
// Writes the sums of rank `rank`, after its save, to a file next to the saved ones, for the process
// that calls complete_files. Throws IO, NOSPACE.
void hand_over_sums(const ChunkSums& sums, int rank, const SaveFiles& to);
// The entries of saved files in a CheckpointRecord.
struct CompletedFiles {
  std::vector<CheckpointFile> files;  // those of the manifest, then the index, if there is one
  std::vector<CheckpointTensor> tensors;
};
// Call it once all `ranks` ranks have handed over their sums. `point`: that of their ChunkSums.
// Merges the sums, removes their files, proves that each element was written once, and writes the
// index, if the manifest has several files. Throws
// INTEGRITY, naming the tensor, if an element was not written exactly once; IO, NOSPACE.
CompletedFiles complete_files(const Manifest& manifest, uint64_t point, int ranks,
                              const SaveFiles& to);

}  // namespace modicum
