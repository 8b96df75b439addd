// Saves tensors from contiguous host memory, and loads them into it, without conversion. Part of
// the public header of `stream`.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "modicum/checkpoint/checkpoint.h"
#include "modicum/stream/sums.h"

namespace modicum {

struct RankContext;
struct SaveFiles;
struct SaveOutcome;
class ComparedChunks;
class Snapshot;

// Host memory for bytes [at, at + bytes.size()) of stored tensor `stored`. Both ends must be at
// element boundaries.
struct StoredSpan {
  uint32_t stored = 0;
  uint64_t at = 0;
  std::span<std::byte> bytes;
  bool is_repeated = false;  // another span of this rank has these bytes: a load compares them once
};
// Visits the spans of this rank: calls the given function for each. In a load that function has
// filled the span when it returns.
using Spans = FunctionRef<void(FunctionRef<void(const StoredSpan&)>)>;

// The arguments of save_spans.
struct SpansSave {
  const Manifest& manifest;
  const RankContext& at;
  int ranks = 1;
  Snapshot* snapshot = nullptr;
};
constexpr uint64_t kSnapshotStagingBytes = 1 * kMiB;
// Writes this rank's spans. Without a snapshot it creates the files and waits for all ranks; with
// one, create_files must have run on all ranks. All ranks call it at the same time, and their spans
// together must cover each byte of each tensor once. A background save (with a snapshot) charges
// kSnapshotStagingBytes; otherwise no staging is needed. In all other respects like `save`.
SaveOutcome save_spans(const SpansSave& what, Spans spans, const SaveFiles& to, ChunkSums& sums);
// Reads into this rank's spans, and adds what it has read to `compared`. Returns the bytes read.
// Throws FORMAT.TRUNC, IO; CONFLICT if a file changed; PEER if another rank failed.
uint64_t load_spans(const Checkpoint& checkpoint, Spans spans, const RankContext& at,
                    ComparedChunks& compared);

}  // namespace modicum
