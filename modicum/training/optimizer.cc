#include "modicum/training/optimizer.h"

#include <malloc.h>

#include <utility>

#include "modicum/kernels/kernels.h"

namespace modicum {
namespace {

uint64_t table_bytes(const std::vector<TrainedGroup>& trained) {
  uint64_t sum = 0;
  for (const TrainedGroup& group : trained) sum += AdamWCount(group.spec).held_bytes();
  return sum;
}

}  // namespace

std::vector<TrainedGroup> trained_of(const Run& run, const Plan& plan, int rank, HostSink& loaded) {
  // A fixed threshold: glibc's dynamic one grows when the large lists of runs are freed here, and
  // then memory of later large lists is not returned to the kernel when they are freed.
  mallopt(M_MMAP_THRESHOLD, static_cast<int>(128 * kKiB));
  std::vector<TrainedGroup> trained;
  for (const StateFormatRow& row : all_state_formats()) {
    trained.push_back({.spec = {.format = row.format}});
  }
  for_each_trained(run.recipe, plan.layout, *run.optimizer, rank,
                   [&](TrainedShard&& trained_shard) {
                     TrainedGroup& to = trained[static_cast<size_t>(trained_shard.format)];
                     std::byte* const elements = loaded.host(trained_shard.buffer).data() +
                                                 bytes_of(trained_shard.dtype, trained_shard.at);
                     ShardSpec& shard = to.spec.shards.emplace_back(std::move(trained_shard.shard));
                     shard.out_dtype = trained_shard.dtype;
                     (trained_shard.is_master() ? shard.master : shard.out) = elements;
                     to.grad_dtypes.push_back(trained_shard.dtype);
                     to.cast_from.push_back(shard.out);
                   });
  std::erase_if(trained, [](const TrainedGroup& group) { return group.spec.shards.empty(); });
  return trained;
}

RankOptimizer::RankOptimizer(std::vector<TrainedGroup> trained, const MadeGradients& gradients,
                             Ledger& ledger, int threads)
    : gradients_(gradients), tables_(ledger.adopt(Purpose::plan, table_bytes(trained))) {
  for (TrainedGroup& group : trained) {
    group.spec.seed = gradients.seed();
    states_.push_back({std::make_unique<AdamW>(std::move(group.spec), ledger, threads),
                       std::move(group.grad_dtypes), std::move(group.cast_from)});
  }
}

void RankOptimizer::cast_masters(Heartbeat heartbeat) {
  for (const State& state : states_) {
    for_each_chunk(*state.adamw, gradients_.threads(), [&](int thread, const ChunkOfShard& chunk) {
      const std::byte* const elements = state.cast_from[chunk.shard];
      if (elements == nullptr) return;
      const DType dtype = state.grad_dtypes[chunk.shard];
      float* const values = gradients_.chunk(thread);
      cast(elements + bytes_of(dtype, chunk.local), dtype, reinterpret_cast<std::byte*>(values),
           DType::f32, chunk.n);
      state.adamw->import_from(chunk.shard, StatePlane::master, chunk.local,
                               {values, static_cast<size_t>(chunk.n)});
      heartbeat();
    });
  }
}

void RankOptimizer::make_masters() {
  for (const State& state : states_) gradients_.make_masters(*state.adamw);
}

GradNorm RankOptimizer::deliver(int64_t step, float loss_scale, Heartbeat heartbeat) {
  GradNorm norm;
  for (const State& state : states_) {
    gradients_.deliver(*state.adamw, {step, state.grad_dtypes, loss_scale}, heartbeat);
    norm += state.adamw->norm();
  }
  return norm;
}

void RankOptimizer::step(const StepOptions& options) {
  std::vector<StateStep> steps;
  for (const State& state : states_) steps.push_back({state.adamw.get(), options});
  AdamW::step_all(steps);
}

void RankOptimizer::skip() {
  for (const State& state : states_) state.adamw->skip();
}

void RankOptimizer::for_each_state(FunctionRef<void(AdamW&)> fn) const {
  for (const State& state : states_) fn(*state.adamw);
}

StateDigest RankOptimizer::digest() const {
  StateDigest digest;
  for (const State& state : states_) digest += state.adamw->digest();
  return digest;
}

}  // namespace modicum
