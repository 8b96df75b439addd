#include "modicum/training/optimizer.h"

#include <malloc.h>

#include <algorithm>
#include <utility>

#include "modicum/kernels/kernels.h"

namespace modicum {
namespace {

constexpr auto kGradientThreads = static_cast<int>(kGradientStagingBytes / kGradientChunkBytes);

}  // namespace

void note(RankOutcome& outcome, const LoadOutcome& loaded) noexcept {
  outcome.bytes_loaded = loaded.bytes_loaded;
  outcome.storage_read_bytes = loaded.storage_read_bytes;
  outcome.exchanged_bytes = loaded.exchanged_bytes;
  outcome.page_cache_peak_bytes = loaded.page_cache_peak_bytes;
}

Training::Training(const Run& run, const Plan& plan, int rank, HostSink& loaded, Ledger& ledger,
                   int threads, uint64_t seed)
    : header_(ledger.adopt(Purpose::header, plan.manifest->held_bytes())),
      plan_(ledger.adopt(Purpose::plan, plan.held_bytes())),
      ring_(ledger.adopt(Purpose::staging, plan.staging.ring_part_bytes)),
      staging_(ledger.charge(Purpose::staging, kGradientStagingBytes)),
      gradients_(seed, std::min(threads, kGradientThreads), staging_.bytes()),
      states_(states_of(run, plan, rank, loaded, ledger)) {
  for (State& state : states_) {
    state.spec.seed = seed;
    state.adamw = std::make_unique<AdamW>(std::move(state.spec), ledger, threads);
  }
}

std::vector<Training::State> Training::states_of(const Run& run, const Plan& plan, int rank,
                                                 HostSink& loaded, Ledger& ledger) {
  // Lists of runs come and go. Were the threshold left to follow them, the allocator would keep
  // their memory.
  mallopt(M_MMAP_THRESHOLD, static_cast<int>(128 * kKiB));
  std::vector<State> states;
  std::vector<AdamWCount> counts;
  for (const StateFormat format : {StateFormat::fp32, run.optimizer.value()}) {
    if (!states.empty() && format == StateFormat::fp32) continue;
    states.push_back({.spec = {.format = format}});
    counts.emplace_back(format, states.back().spec.groups);
  }
  for_each_trained(run.recipe, plan.layout, *run.optimizer, rank, [&](TrainedShard&& of) {
    const size_t i = of.format == StateFormat::fp32 ? 0 : 1;
    counts[i].add(of.shard, !of.is_master());
    std::byte* const elements = loaded.host(of.buffer).data() + bytes_of(of.dtype, of.at);
    ShardSpec& shard = states[i].spec.shards.emplace_back(std::move(of.shard));
    shard.out_dtype = of.dtype;
    (of.is_master() ? shard.master : shard.out) = elements;
    states[i].dtypes.push_back(of.dtype);
    states[i].apart_from.push_back(of.is_master() ? nullptr : elements);
  });
  uint64_t tables = 0;
  for (const AdamWCount& count : counts) tables += count.held_bytes();
  tables_ = ledger.adopt(Purpose::plan, tables);
  return states;
}

void Training::begin(const std::function<void()>& alive) {
  for (const State& state : states_) {
    for_each_chunk(*state.adamw, gradients_.threads(), [&](int thread, const ChunkOfShard& of) {
      const std::byte* const elements = state.apart_from[of.shard];
      if (elements == nullptr) return;
      const DType dtype = state.dtypes[of.shard];
      float* const values = gradients_.chunk(thread);
      cast(elements + bytes_of(dtype, of.local), dtype, reinterpret_cast<std::byte*>(values),
           DType::f32, of.n);
      state.adamw->import_from(of.shard, StatePlane::master, of.local,
                               {values, static_cast<size_t>(of.n)});
      alive();
    });
  }
}

GradNorm Training::deliver(int64_t step, const std::function<void()>& alive) {
  GradNorm norm;
  for (const State& state : states_) {
    gradients_.deliver(*state.adamw, {.number = step, .dtypes = state.dtypes}, alive);
    norm += state.adamw->norm();
  }
  return norm;
}

void Training::step(const StepOptions& options) {
  for (const State& state : states_) state.adamw->step(options);
}

StateDigest Training::digest() const {
  StateDigest digest;
  for (const State& state : states_) digest += state.adamw->digest();
  return digest;
}

}  // namespace modicum
