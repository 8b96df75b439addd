// Compares the values that ranks read from a saved checkpoint with the checkpoint's
// record. Part of the public header of `stream`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "modicum/checkpoint/checkpoint.h"
#include "modicum/memory/memory.h"
#include "modicum/plan/plan.h"
#include "modicum/stream/sums.h"

namespace modicum {

// The digests of what a rank has read, by chunk, as stored. A chunk that the rank has read whole is
// compared by this rank alone. The sums of other chunks are merged with those of the other ranks:
//
//   tensor of 9 MiB    chunk 0: 4 MiB    chunk 1: 4 MiB      chunk 2: 1 MiB
//   rank 0 read        all: compared     the first 2 MiB     -
//   rank 1 read        all: compared     the last 2 MiB      the first half
//   merged                               compared            not compared
//
// Elements may be read several times, as by replicas, if all of a chunk are read equally often.
// `add` is thread-safe. Without a record (Manifest::recorded) nothing is compared.
class ComparedChunks {
 public:
  // `folder`: the place of the manifest's files in the checkpoint, for errors: "" or "optimizer/".
  explicit ComparedChunks(const Manifest& manifest, std::string folder = "");
  ComparedChunks(const Manifest&&, std::string = "") = delete;

  bool has_record() const noexcept { return !manifest_.recorded.empty(); }
  // Adds bytes [at, at + bytes.size()) of a stored tensor. Both ends must be at element boundaries.
  void add(uint32_t stored, uint64_t at, std::span<const std::byte> bytes);
  // Adds the elements of a transfer. `from` points to the first one in memory, as stored.
  void add(const Transfer& transfer, const std::byte* from);
  // Compares each chunk that was added whole since the last call. Throws INTEGRITY for the first
  // chunk that differs, with file, tensor, offset and both digests.
  void compare();
  bool has_rest() const noexcept;  // whether other chunks were added
  // Reads the other chunks that were added, whole, through `room`, and compares them. Returns the
  // bytes read. Throws INTEGRITY, IO and CONFLICT.
  uint64_t compare_rest(const Checkpoint& checkpoint, std::span<std::byte> room,
                        Poll poll = kNoPoll);

  // After `compare`: what the other ranks need. Adds what another rank has returned.
  std::vector<std::byte> bytes() const;
  void merge(std::span<const std::byte> of_rank);
  // After all ranks were merged: compares the chunks that were divided among them. Throws INTEGRITY
  // as `compare` does.
  ComparedValues finish();

 private:
  // A chunk, by its number in the tensor and by that in the manifest.
  struct Chunk {
    uint32_t stored = 0;
    uint64_t of_tensor = 0, of_all = 0;
  };
  template <typename Fn>
  void for_each_chunk(const Fn& fn) const;
  Extent extent_of(const Chunk& chunk) const noexcept;  // in the tensor
  uint64_t added(const Chunk& chunk) const noexcept;    // elements that are not compared yet
  void compare(const Chunk& chunk, uint64_t times) const;

  const Manifest& manifest_;
  const std::string folder_;
  ChunkSums sums_;                 // of chunks since they were last compared
  std::vector<bool> is_compared_;  // by chunk
};

}  // namespace modicum
