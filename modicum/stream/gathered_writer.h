// Writes the short parts of files that the ranks of a node have: they are collected in shared
// memory (Gather) and written together. Internal to `stream`.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "modicum/stream/data_writer.h"
#include "modicum/stream/save.h"
#include "modicum/stream/stream.h"
#include "modicum/stream/sums.h"

namespace modicum {

// Each rank of the node constructs a GatheredWriter at the same time, calls `put` in about the same
// order of files and offsets as the others, and then `finish`. The addresses of the Gather are
// those of all files, one after the other.
class GatheredWriter {
 public:
  // `at.gather` must be set. `sums` receives the bytes that this rank writes, whichever rank has
  // put them.
  GatheredWriter(const Manifest& manifest, const RankContext& at, const SaveFiles& to,
                 ChunkSums& sums);

  // Throws NOSPACE, IO or PEER.
  void put(const Extent& at, std::span<const std::byte> bytes);
  // Writes the rest, makes the written bytes durable, and adds the counters to `outcome`. Throws as
  // `put`.
  void finish(SaveOutcome& outcome);

 private:
  void write(uint64_t at, std::span<const std::byte> bytes);

  const Manifest& manifest_;
  const RankContext& at_;
  ChunkSums& sums_;
  DataWriter writer_;
  std::vector<uint64_t> begins_;  // by file: its first address in the Gather
  uint64_t gathered_bytes_ = 0;
};

}  // namespace modicum
