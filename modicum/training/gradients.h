// What a rehearsed training steps with: gradients that are made up. Part of the door of `training`.
#pragma once

#include <cstdint>
#include <span>

#include "modicum/memory/memory.h"
#include "modicum/optim/optim.h"
#include "modicum/runs/runs.h"

namespace modicum {

// Elements that a thread makes at a time, and the memory that it makes them in: fp32, and what they
// are rounded to.
constexpr int64_t kGradientChunk = 16384;
constexpr uint64_t kGradientChunkBytes = kGradientChunk * (sizeof(float) + 2);

// Called by several threads, for each chunk: a heartbeat.
using Heartbeat = FunctionRef<void()>;

// Neighbouring elements of a state, at most a chunk. `local` and `global` are the first one's
// indices.
struct ChunkOfShard {
  size_t shard = 0;
  int64_t local = 0;
  int64_t global = 0;
  int64_t n = 0;
};
// All elements of a state, dealt to the threads in parts of whole buckets.
void for_each_chunk(const AdamW& state, int threads,
                    FunctionRef<void(int thread, const ChunkOfShard&)> fn);

// Values that are a hash of (seed, step, name, global index), and so do not depend on how a
// parameter is cut.
class MadeGradients {
 public:
  // Charges kGradientStagingBytes. They are made on as many threads as that has chunks for,
  // `threads` at most. BUDGET, NOMEM.
  MadeGradients(uint64_t seed, int threads, Ledger& ledger);

  struct Step {
    int64_t number = 1;
    std::span<const DType> dtypes;  // of each shard's gradient as it arrives
    float loss_scale = 1;
  };
  void deliver(AdamW& state, const Step& step, Heartbeat heartbeat) const;
  // The parameters that training begins with, where nothing is loaded.
  void make_masters(AdamW& state) const;

  uint64_t seed() const noexcept { return seed_; }
  int threads() const noexcept { return threads_; }
  // A thread's fp32 chunk; kGradientChunk elements of 16 bits follow it.
  float* chunk(int thread) const noexcept;

 private:
  const uint64_t seed_;
  const int threads_;
  const Buffer staging_;
};

}  // namespace modicum
