// Synthetic gradients for rehearsed training. Part of the public header of `training`.
#pragma once

#include <cstdint>
#include <span>

#include "modicum/memory/memory.h"
#include "modicum/optim/optim.h"
#include "modicum/runs/runs.h"

namespace modicum {

// The most elements that a thread generates at a time, and the bytes that it needs for them: fp32
// values, followed by a 16-bit copy.
constexpr int64_t kGradientChunk = 16384;
constexpr uint64_t kGradientChunkBytes = kGradientChunk * (sizeof(float) + 2);

// Called by several threads after each chunk.
using Heartbeat = FunctionRef<void()>;

// Contiguous elements of one shard, at most kGradientChunk. The first one has index `local` in the
// shard and `global` in the parameter.
struct ChunkOfShard {
  size_t shard = 0;
  int64_t local = 0;
  int64_t global = 0;
  int64_t n = 0;
};
// Calls `fn` for all elements of a state. The runs of the shards are divided into parts at the ends
// of buckets (kBucketElements of a parameter); each thread visits a contiguous share of the parts.
void for_each_chunk(const AdamW& state, int threads,
                    FunctionRef<void(int thread, const ChunkOfShard&)> fn);

// Gradients that are a hash of (seed, step, FQN, global index), so they do not depend on the
// sharding.
class MadeGradients {
 public:
  // Charges kGradientStagingBytes, which limits the number of threads. Throws BUDGET or NOMEM.
  MadeGradients(uint64_t seed, int threads, Ledger& ledger);

  struct Step {
    int64_t number = 1;
    std::span<const DType> dtypes;  // by shard: dtype in which its gradients arrive
    float loss_scale = 1;
  };
  // Generates the gradients of a step and has `state` accumulate them (AdamW::arrive).
  void deliver(AdamW& state, const Step& step, Heartbeat heartbeat) const;
  // Sets the master weights to a hash of (seed, global index), for runs without a checkpoint.
  void make_masters(AdamW& state) const;

  uint64_t seed() const noexcept { return seed_; }
  int threads() const noexcept { return threads_; }
  // A thread's fp32 chunk, followed by kGradientChunk elements of 16 bits.
  float* chunk(int thread) const noexcept;

 private:
  const uint64_t seed_;
  const int threads_;
  const Buffer staging_;
};

}  // namespace modicum
