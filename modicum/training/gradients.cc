#include "modicum/training/gradients.h"

#include <fmt/format.h>

#include <algorithm>

#include "modicum/kernels/kernels.h"

namespace modicum {
namespace {

// Visits the runs of a state's shards in order, divided at the ends of buckets.
template <typename Fn>
void for_each_part(const AdamW& state, const Fn& fn) {
  for (size_t shard = 0; shard < state.shards(); ++shard) {
    int64_t local = 0;
    for (const ShardRun& run : state.shard(shard).runs) {
      for (int64_t first = run.first; first < run.first + run.n;) {
        const int64_t to_edge = kBucketElements - first % kBucketElements;
        const int64_t n = std::min(to_edge, run.first + run.n - first);
        fn(ChunkOfShard{shard, local, first, n});
        local += n;
        first += n;
      }
    }
  }
}

constexpr auto kMaxThreads = static_cast<int>(kGradientStagingBytes / kGradientChunkBytes);

}  // namespace

void for_each_chunk(const AdamW& state, int threads,
                    FunctionRef<void(int thread, const ChunkOfShard&)> fn) {
  int64_t parts = 0;
  for_each_part(state, [&](const ChunkOfShard&) { ++parts; });
  run_workers(threads, [&](int thread) {
    const int64_t begin = parts * thread / threads;
    const int64_t end = parts * (thread + 1) / threads;
    int64_t part = 0;
    for_each_part(state, [&](ChunkOfShard chunk) {
      const int64_t number = part++;
      if (number < begin || number >= end) return;
      for (int64_t left = chunk.n; left > 0; left -= chunk.n) {
        chunk.n = std::min(kGradientChunk, left);
        fn(thread, chunk);
        chunk.local += chunk.n;
        chunk.global += chunk.n;
      }
    });
  });
}

MadeGradients::MadeGradients(uint64_t seed, int threads, Ledger& ledger)
    : seed_(seed),
      threads_(std::min(threads, kMaxThreads)),
      staging_(ledger.charge(Purpose::staging, kGradientStagingBytes)) {}

float* MadeGradients::chunk(int thread) const noexcept {
  return reinterpret_cast<float*>(staging_.bytes().data() +
                                  static_cast<uint64_t>(thread) * kGradientChunkBytes);
}

void MadeGradients::deliver(AdamW& state, const Step& step, Heartbeat heartbeat) const {
  const uint64_t of_step = name_hash(fmt::format("gradient {} {}", seed_, step.number));
  for_each_chunk(state, threads_, [&](int thread, const ChunkOfShard& part) {
    auto* const values = chunk(thread);
    auto* arriving = reinterpret_cast<std::byte*>(values);
    synth_fill(of_step ^ name_hash(state.shard(part.shard).fqn), DType::f32, part.global, part.n,
               arriving);
    if (step.loss_scale != 1) scale(values, step.loss_scale, part.n);
    const DType dtype = step.dtypes[part.shard];
    if (dtype != DType::f32) {
      arriving = reinterpret_cast<std::byte*>(values + kGradientChunk);
      cast(reinterpret_cast<const std::byte*>(values), DType::f32, arriving, dtype, part.n);
    }
    state.arrive({part.shard, part.local, part.n, arriving, dtype});
    heartbeat();
  });
}

void MadeGradients::make_masters(AdamW& state) const {
  const uint64_t hash = name_hash(fmt::format("master {}", seed_));
  for_each_chunk(state, threads_, [&](int thread, const ChunkOfShard& part) {
    float* const values = chunk(thread);
    synth_fill(hash, DType::f32, part.global, part.n, reinterpret_cast<std::byte*>(values));
    state.import_from(part.shard, StatePlane::master, part.local,
                      {values, static_cast<size_t>(part.n)});
  });
}

}  // namespace modicum
