// Reads the optimizer's state of a saved checkpoint into AdamW states of any
// format. Part of the public header of `training`.
#pragma once

#include <cstdint>
#include <span>

#include "modicum/checkpoint/checkpoint.h"
#include "modicum/stream/stream.h"
#include "modicum/training/state_files.h"

namespace modicum {

// The optimizer's state of a checkpoint.
struct StateSource {
  const Checkpoint& checkpoint;  // in the checkpoint's kStateDirectory
  const StateFiles& files;       // the files of that checkpoint
  const StateFacts& facts;
};

constexpr uint64_t kConvertedStateBytes = 512 * kKiB;  // staging, if a plane is converted
// The memory that reading a state adds to the promise of a load (PlanOptions::resume): headers,
// which are held from the start, and the window of load_state, as staging. `saved`: the manifest of
// the state, with its recorded digests; `parameters`: those of the run.
Footprint resume_footprint_of(const Manifest& saved, const StateFiles& files,
                              std::span<const StateOf> parameters);

// Reads this rank's shards of `from`, which must be of the run (StateFiles::require_of), sets their
// step counts, and adds the bytes to `compared`. The ranks must hold the values of the saved
// parameters already. All ranks call it at the same time. Returns the bytes read.
//
// A plane that the state holds as it was saved is read straight into the state. Any other is read
// in windows, exported to fp32 as saved, and imported as by AdamW::import_from with the same step
// count, so that its bits are those of an AdamW that imports the saved values. Where the master has
// memory of its own and is converted, the parameter becomes the rounded master, since the formats
// round ties between two bf16 differently.
//
//   a bf16 parameter w, saved as fp32     held as fp32-split       held as bf16-moments
//   w                 (already loaded)    ~ its upper half         ~ its upper half
//   w.master                              ~ and its lower half     ~ and its lower half
//   w.exp_avg                             = exp_avg                ~ exp_avg
//   w.exp_avg_sq                          = exp_avg_sq             ~ exp_avg_sq
//
// Throws FORMAT.TRUNC, IO, BUDGET; CONFLICT if a file changed; INTEGRITY if values are not the
// saved ones; PEER if another rank failed.
uint64_t load_state(const StateSource& from, HeldShards shards, const RankContext& at,
                    ComparedChunks& compared);

}  // namespace modicum
