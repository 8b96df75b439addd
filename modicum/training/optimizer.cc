#include "modicum/training/optimizer.h"

#include <malloc.h>

#include <utility>

#include "modicum/kernels/kernels.h"

namespace modicum {
namespace {

uint64_t table_bytes(const std::vector<Trained>& trained) {
  uint64_t sum = 0;
  for (const Trained& of : trained) sum += AdamWCount(of.spec).held_bytes();
  return sum;
}

}  // namespace

std::vector<Trained> trained_of(const Run& run, const Plan& plan, int rank, HostSink& loaded) {
  // A fixed threshold: glibc's dynamic one grows when the large lists of runs are freed here, and
  // then memory of later large lists is not returned to the kernel when they are freed.
  mallopt(M_MMAP_THRESHOLD, static_cast<int>(128 * kKiB));
  std::vector<Trained> trained;
  for (const StateFormatRow& row : all_state_formats()) {
    trained.push_back({.spec = {.format = row.format}});
  }
  for_each_trained(run.recipe, plan.layout, *run.optimizer, rank, [&](TrainedShard&& of) {
    Trained& to = trained[static_cast<size_t>(of.format)];
    std::byte* const elements = loaded.host(of.buffer).data() + bytes_of(of.dtype, of.at);
    ShardSpec& shard = to.spec.shards.emplace_back(std::move(of.shard));
    shard.out_dtype = of.dtype;
    (of.is_master() ? shard.master : shard.out) = elements;
    to.grad_dtypes.push_back(of.dtype);
    to.cast_from.push_back(shard.out);
  });
  std::erase_if(trained, [](const Trained& of) { return of.spec.shards.empty(); });
  return trained;
}

RankOptimizer::RankOptimizer(std::vector<Trained> trained, const MadeGradients& gradients,
                             Ledger& ledger, int threads)
    : gradients_(gradients), tables_(ledger.adopt(Purpose::plan, table_bytes(trained))) {
  for (Trained& of : trained) {
    of.spec.seed = gradients.seed();
    states_.push_back({std::make_unique<AdamW>(std::move(of.spec), ledger, threads),
                       std::move(of.grad_dtypes), std::move(of.cast_from)});
  }
}

void RankOptimizer::cast_masters(Heartbeat heartbeat) {
  for (const State& state : states_) {
    for_each_chunk(*state.adamw, gradients_.threads(), [&](int thread, const ChunkOfShard& of) {
      const std::byte* const elements = state.cast_from[of.shard];
      if (elements == nullptr) return;
      const DType dtype = state.grad_dtypes[of.shard];
      float* const values = gradients_.chunk(thread);
      cast(elements + bytes_of(dtype, of.local), dtype, reinterpret_cast<std::byte*>(values),
           DType::f32, of.n);
      state.adamw->import_from(of.shard, StatePlane::master, of.local,
                               {values, static_cast<size_t>(of.n)});
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
