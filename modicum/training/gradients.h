// What `step` and `rehearse` train with: made-up gradients, and the norm over all ranks.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>

#include "modicum/memory/memory.h"
#include "modicum/optim/optim.h"
#include "modicum/ranks/ranks.h"

namespace modicum {

// Elements that a thread makes at a time, and the memory that it makes them in: fp32, and what they
// are rounded to.
constexpr int64_t kGradientChunk = 16384;
constexpr uint64_t kGradientChunkBytes = kGradientChunk * (sizeof(float) + 2);
uint64_t gradient_staging_bytes(int threads) noexcept;

// Stretches of a state's elements, at most a chunk each, dealt to the threads in parts of whole
// buckets. `local` and `global` are the first one's indices.
struct ChunkOfShard {
  size_t shard = 0;
  int64_t local = 0;
  int64_t global = 0;
  int64_t n = 0;
};
void for_each_chunk(const AdamW& state, int threads,
                    const std::function<void(int thread, const ChunkOfShard&)>& fn);

// Values that are a hash of (seed, step, name, global index), and so do not depend on how a
// parameter is cut.
class MadeGradients {
 public:
  // `staging` has gradient_staging_bytes(threads).
  MadeGradients(uint64_t seed, int threads, std::span<std::byte> staging)
      : seed_(seed), threads_(threads), staging_(staging) {}

  struct Step {
    int64_t number = 1;
    std::span<const DType> dtypes;  // of each shard's gradient as it arrives
    float loss_scale = 1;
  };
  void deliver(AdamW& state, const Step& step, const std::function<void()>& alive) const;
  // The parameters that a run begins with, where it loads none.
  void make_masters(AdamW& state) const;

  int threads() const noexcept { return threads_; }
  // A thread's fp32 chunk; kGradientChunk elements of 16 bits follow it.
  float* chunk(int thread) const noexcept;

 private:
  const uint64_t seed_;
  const int threads_;
  const std::span<std::byte> staging_;
};

// A page that all ranks write to and read from.
class StepLanes {
 public:
  explicit StepLanes(int ranks);

  // Each rank's part of the norm and how long its last step took. The two sets are used in turn, so
  // that one may be written while the other is still read.
  struct Lane {
    GradNorm norm;
    double last_step_s = 0;
  };
  Lane& lane(int64_t step, int rank) const noexcept;
  // Of all ranks, when all have written theirs. Every rank adds them up in the same order, and so
  // comes to the same bits.
  GradNorm norm(int64_t step) const noexcept;
  // Waits for all ranks without sleeping, so that what is timed next begins at the same time. PEER.
  void line_up(const Board& board) const;

 private:
  std::atomic<uint64_t>& arrived() const noexcept;
  const int ranks_;
  Mapping mapping_;
};

}  // namespace modicum
