// The public header of `stream`: loads and saves by a plan, within the plan's staging.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "modicum/checkpoint/checkpoint.h"
#include "modicum/memory/memory.h"
#include "modicum/plan/plan.h"
#include "modicum/ranks/ranks.h"
#include "modicum/stream/compared.h"      // IWYU pragma: export
#include "modicum/stream/diff.h"          // IWYU pragma: export
#include "modicum/stream/file_sink.h"     // IWYU pragma: export
#include "modicum/stream/range_losses.h"  // IWYU pragma: export
#include "modicum/stream/reader.h"        // IWYU pragma: export
#include "modicum/stream/rings.h"         // IWYU pragma: export
#include "modicum/stream/save.h"          // IWYU pragma: export
#include "modicum/stream/sink.h"
#include "modicum/stream/snapshot.h"  // IWYU pragma: export
#include "modicum/stream/spans.h"     // IWYU pragma: export
#include "modicum/stream/verify.h"    // IWYU pragma: export

namespace modicum {

// A rank and its connections to the other ranks. All must outlive the load. A load or a save throws
// USAGE if the plan has no such rank, if the sink is of another one, if the board is for fewer
// ranks than the plan has, or without a board or a ledger.
struct RankContext {
  int rank = 0;
  Board* board = nullptr;
  Exchange* exchange = nullptr;  // required if the plan exchanges
  Ledger* ledger = nullptr;      // charged for everything that the load holds
  Gather* gather = nullptr;      // collects the short runs of the node's ranks, in a save
};

struct LoadOptions {
  int threads = 1;  // upper limit; the staging may have room for fewer workers
  // Returns caller-provided tensor `ordinal`, unsharded; the memory must stay valid until the next
  // call. Called on the thread that calls load(), in the order of the targets.
  std::function<std::span<const std::byte>(uint32_t ordinal)> caller;
  // If set, receives the losses of all casts, with indices in the rank's local buffers.
  RangeLosses* losses = nullptr;
  ComparedChunks* compared = nullptr;  // if set, receives all stored elements that are loaded
  uint64_t init_seed = 0;  // values of `init` rules depend only on this seed, the FQN and the index
};

// Loads rank `at.rank`'s part of the plan into `sink`. Memory other than the sink's own is charged
// to `at.ledger` and committed before the first data byte is read, and released at the end. Ranks
// that made their plans in different processes must first agree on `plan.inputs` (Board::agree).
//
// On success every element of every local buffer, padding included, was written exactly once
// (Coverage), and the values of stored aliases equal those of their targets. On failure the
// contents of the sink are undefined. Throws FORMAT.TRUNC, IO; CONFLICT if a file changed;
// INTEGRITY if coverage is not proven; MISMATCH, naming both tensors, if tied tensors are both
// stored and their values differ; BUDGET, NOMEM; PEER if another rank failed.
LoadOutcome load(const Checkpoint& checkpoint, const Plan& plan, const RankContext& at, Sink& sink,
                 const LoadOptions& options = {});

// Puts the expected elements [first, first + n) of a stored tensor into `out`. Must not use
// `load`, since a check would then compare a load with itself.
using ExpectedElements =
    FunctionRef<void(uint32_t stored, int64_t first, int64_t n, std::span<std::byte> out)>;

// Contiguous elements of a rank's local buffer, beginning with element `at` of the buffer.
struct HeldElements {
  int rank = 0;
  uint32_t buffer = 0;
  int64_t at = 0;
  std::span<const std::byte> bytes;
};

// Compares a rank's elements with those that the recipe makes from `expected`, and padding with
// zero. Evaluates the recipe with element_source, which is independent of the load's pull_back.
// Throws INTEGRITY at the first difference, with the tensor, the element and both values.
void check_elements(const Plan& plan, const HeldElements& elements, ExpectedElements expected,
                    const LoadOptions& options = {});
// The same for all local buffers of `sink`, which must be in host memory.
void check_values(const Plan& plan, int rank, Sink& sink, ExpectedElements expected,
                  const LoadOptions& options = {});

// The rank's part of the model's digest (DigestSum), from the sink's host memory. This and the next
// function call `poll` before each tensor or flat group; an exception from it ends the call.
uint64_t digest_of_rank(const Plan& plan, int rank, Sink& sink, Poll poll = kNoPoll);

struct DumpFile {
  FileSystem& files;
  const std::string& path;
};
// Writes `rank`'s local tensors and flat groups to one safetensors file, with aliases and without
// padding. Throws CONFLICT if the file exists, IO or NOSPACE.
void dump_rank(const Plan& plan, int rank, Sink& sink, const DumpFile& to, Poll poll = kNoPoll);

}  // namespace modicum
