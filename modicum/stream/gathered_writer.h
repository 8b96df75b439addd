// Writes short runs of files together with the other ranks of the node.
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

// All ranks of the node construct it at the same time, put in about the same order, and finish. The
// address space of the Gather is that of the files, one after the other.
class GatheredWriter {
 public:
  // `at.gather` is set. `sums` receives what this rank writes, from itself and from others.
  GatheredWriter(const Manifest& manifest, const RankContext& at, const SaveFiles& to,
                 ChunkSums& sums);

  // Less than a slot of the Gather. NOSPACE, IO, PEER.
  void put(const Extent& at, std::span<const std::byte> bytes);
  // Makes the written bytes durable, and adds the counters to `outcome`.
  void finish(SaveOutcome& outcome);

 private:
  void write(uint64_t at, std::span<const std::byte> bytes);

  const Manifest& manifest_;
  const RankContext& at_;
  ChunkSums& sums_;
  DataWriter writer_;
  std::vector<uint64_t> begins_;  // of the files, by number
  uint64_t gathered_bytes_ = 0;
};

}  // namespace modicum
