// Contiguous bytes of host memory to and from stored tensors, as they are. Part of the door of
// `stream`.
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

// Bytes [at, at + bytes.size()) of a stored tensor's elements, whole elements.
struct StoredSpan {
  uint32_t stored = 0;
  uint64_t at = 0;
  std::span<std::byte> bytes;
};
using Spans = FunctionRef<void(FunctionRef<void(const StoredSpan&)>)>;

// Writes this rank's spans; all ranks together must give each byte of each tensor once, and call it
// at the same time. For tensors that are saved as they are held: no staging. Otherwise as `save`.
struct SpansSave {
  const Manifest& manifest;
  const RankContext& at;
  int ranks = 1;
};
SaveOutcome save_spans(const SpansSave& what, Spans spans, const SaveFiles& to, ChunkSums& sums);
// Reads into this rank's spans. Returns the bytes read. Errors as those of `load`.
uint64_t load_spans(const Checkpoint& checkpoint, Spans spans, const RankContext& at);

}  // namespace modicum
