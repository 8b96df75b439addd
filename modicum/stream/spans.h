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
  bool is_repeated = false;  // a load reads these bytes for another span, too: not compared again
};
// Calls its argument for each span of this rank. A load has read the bytes when the call returns.
using Spans = FunctionRef<void(FunctionRef<void(const StoredSpan&)>)>;

struct SpansSave {
  const Manifest& manifest;
  const RankContext& at;
  int ranks = 1;
  Snapshot* snapshot = nullptr;
};
constexpr uint64_t kSnapshotStagingBytes = 1 * kMiB;
// Writes this rank's spans to new files. All ranks call it at the same time, and their spans
// together must cover each byte of each tensor once. A background save (with a snapshot) charges
// kSnapshotStagingBytes; otherwise no staging is needed. In all other respects like `save`.
SaveOutcome save_spans(const SpansSave& what, Spans spans, const SaveFiles& to, ChunkSums& sums);
// Reads into this rank's spans, and adds what it has read to `compared`. Returns the bytes read.
// Throws FORMAT.TRUNC, IO; CONFLICT if a file changed; PEER if another rank failed.
uint64_t load_spans(const Checkpoint& checkpoint, Spans spans, const RankContext& at,
                    ComparedChunks& compared);

}  // namespace modicum
