// Saves and loads stored tensors from and to contiguous host memory, without conversion. Part of
// the door of `stream`.
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
class Snapshot;

// Host memory for bytes [at, at + bytes.size()) of stored tensor `stored`. No element is divided.
struct StoredSpan {
  uint32_t stored = 0;
  uint64_t at = 0;
  std::span<std::byte> bytes;
};
using Spans = FunctionRef<void(FunctionRef<void(const StoredSpan&)>)>;

// Writes this rank's spans to files, without staging or conversion. All ranks call it at the same
// time, and their spans together must cover each byte of each tensor once. Otherwise as `save`. In
// the background it charges staging of kSnapshotStagingBytes.
struct SpansSave {
  const Manifest& manifest;
  const RankContext& at;
  int ranks = 1;
  Snapshot* snapshot = nullptr;
};
constexpr uint64_t kSnapshotStagingBytes = 1 * kMiB;
SaveOutcome save_spans(const SpansSave& what, Spans spans, const SaveFiles& to, ChunkSums& sums);
// Reads into this rank's spans. Returns the bytes read. Errors as those of `load`.
uint64_t load_spans(const Checkpoint& checkpoint, Spans spans, const RankContext& at);

}  // namespace modicum
