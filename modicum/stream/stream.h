// The door of `stream`: carries out a plan within its staging.
#pragma once

#include <functional>
#include <span>

#include "modicum/checkpoint/checkpoint.h"
#include "modicum/memory/memory.h"
#include "modicum/plan/plan.h"
#include "modicum/ranks/ranks.h"
#include "modicum/stream/rings.h"  // IWYU pragma: export
#include "modicum/stream/sink.h"

namespace modicum {

// Where a rank stands among the others. All outlive the load.
struct RankContext {
  int rank = 0;
  Board* board = nullptr;
  Exchange* exchange = nullptr;  // needed where the strategy sends and there are several ranks
  Ledger* ledger = nullptr;      // what the load holds is charged to it
};

struct LoadOptions {
  int threads = 1;  // at most; staging decides how many streams fit
  // A `caller` tensor, whole, by its ordinal; valid until the next call. Called on the thread that
  // calls load(), in the order of the targets.
  std::function<std::span<const std::byte>(uint32_t ordinal)> caller;
  uint64_t init_seed = 0;  // of `init` rules: with the target's name, it decides every bit
};

// Loads rank `at.rank`'s part of the plan into `sink`. Everything that is held besides the sink's
// own is charged to `at.ledger` and committed before the first data byte is read, and given back at
// the end. Ranks whose plans were not made in one process have agreed on `plan.inputs`, before any
// of them made its sink (Board::agree). On return every element of every local buffer, padding too,
// has been written exactly once: each finished transfer is added to a fingerprint of the places
// written, which is compared with that of a tiling (else INTEGRITY; a wrong passes with a
// probability of at most elements / 2^61). Where a tie is stored under both of its names, what was
// read of them was the same (else MISMATCH, naming both). On an error nothing may be used. Errors:
// FORMAT.TRUNC, IO, BUDGET, NOMEM, PEER.
LoadOutcome load(const Checkpoint& checkpoint, const Plan& plan, const RankContext& at, Sink& sink,
                 const LoadOptions& options = {});

// The stored elements [first, first + n) of a tensor as they should be, by other means than a load:
// what `check_values` compares with.
using ExpectedElements =
    FunctionRef<void(uint32_t stored, int64_t first, int64_t n, std::span<std::byte> into)>;

// Elements of a rank's local buffer, from its element `at` on.
struct HeldElements {
  int rank = 0;
  uint32_t buffer = 0;
  int64_t at = 0;
  std::span<const std::byte> bytes;
};

// Compares what a rank holds, padding included, with what the recipe
// makes of `expected`, element by element along the recipe's second reading (element_source). The
// first difference is INTEGRITY, naming the tensor.
void check_elements(const Plan& plan, const HeldElements& held, ExpectedElements expected,
                    const LoadOptions& options = {});
// The same for everything that `sink` has in host memory.
void check_values(const Plan& plan, int rank, Sink& sink, ExpectedElements expected,
                  const LoadOptions& options = {});

// The rank's part of the digest, read from the sink's host memory. `beat`, here and below, is
// called before each tensor: the rank's heartbeat. It may throw, which ends the call.
uint64_t digest_of_rank(const Plan& plan, int rank, Sink& sink, Poll poll = kNoPoll);

// Writes `rank`'s local tensors, without padding and under their own names (aliases too), as one
// safetensors file. CONFLICT where it exists.
struct DumpFile {
  FileSystem& files;
  const std::string& path;
};
void dump_rank(const Plan& plan, int rank, Sink& sink, const DumpFile& to, Poll poll = kNoPoll);

}  // namespace modicum
