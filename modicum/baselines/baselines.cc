#include "modicum/baselines/baselines.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "modicum/kernels/kernels.h"

namespace modicum {
namespace {

constexpr int64_t kMaxParams = 32 * 1024 * 1024;       // per rank; far larger than any cache
constexpr uint64_t kUnfusedBytes = 4 + 4 + 4 + 4 + 2;  // master, gradient, moments, bf16 copy

// State of the unfused step over `n` parameters: four fp32 arrays, and `out`, the bf16 copy.
struct UnfusedState {
  int64_t n;
  std::byte* master;
  std::byte* grad;
  std::byte* exp_avg;
  std::byte* exp_avg_sq;
  std::byte* out;

  UnfusedState(std::span<std::byte> memory, int64_t params)
      : n(params),
        master(memory.data()),
        grad(master + 4 * n),
        exp_avg(grad + 4 * n),
        exp_avg_sq(exp_avg + 4 * n),
        out(exp_avg_sq + 4 * n) {}
};

// Calls fn(worker, first, count) for all buckets of [0, n), each of at most kBucketElements
// elements. Each thread has consecutive buckets.
template <typename Fn>
void pass(int threads, int64_t n, const Fn& fn) {
  const int64_t buckets = ceil_div(n, kBucketElements);
  run_workers(threads, [&](int worker) {
    const int64_t end = std::min(n, buckets * (worker + 1) / threads * kBucketElements);
    for (int64_t at = buckets * worker / threads * kBucketElements; at < end;
         at += kBucketElements) {
      fn(worker, at, std::min(kBucketElements, end - at));
    }
  });
}

void unfused_step(const UnfusedState& state, int threads, const AdamNumbers& numbers,
                  float unscale) {
  const auto grad = [&](int64_t at) { return reinterpret_cast<float*>(state.grad) + at; };
  pass(threads, state.n, [&](int, int64_t at, int64_t n) { scale(grad(at), unscale, n); });
  std::vector<GradNorm> norms(static_cast<size_t>(threads));
  pass(threads, state.n, [&](int worker, int64_t at, int64_t n) {
    norms[static_cast<size_t>(worker)] += squares(state.grad + 4 * at, DType::f32, n);
  });
  GradNorm norm;
  for (const GradNorm& part : norms) norm += part;
  // The factor is 1, since the maximum is twice the norm. The pass is made nevertheless, because a
  // real step makes it.
  const float clip = clip_factor(norm.norm(), 2 * norm.norm());
  pass(threads, state.n, [&](int, int64_t at, int64_t n) { scale(grad(at), clip, n); });
  pass(threads, state.n, [&](int, int64_t at, int64_t n) {
    adamw(numbers, {.first = at,
                    .n = n,
                    .master = state.master + 4 * at,
                    .grad = state.grad + 4 * at,
                    .exp_avg = state.exp_avg + 4 * at,
                    .exp_avg_sq = state.exp_avg_sq + 4 * at});
  });
  pass(threads, state.n, [&](int, int64_t at, int64_t n) {
    cast(state.master + 4 * at, DType::f32, state.out + 2 * at, DType::bf16, n);
  });
}

// Copies the first half of `memory` to the second. Each thread copies complete pages.
template <typename Fn>
void copy(std::span<std::byte> memory, int threads, const Fn& copy_bytes) {
  const size_t half = memory.size() / 2;
  const size_t pages = half / kPageBytes;
  run_workers(threads, [&](int worker) {
    const auto page_of = [&](int nth) {
      return pages * static_cast<size_t>(nth) / static_cast<size_t>(threads) * kPageBytes;
    };
    const size_t begin = page_of(worker);
    copy_bytes(memory.data() + begin, memory.data() + half + begin, page_of(worker + 1) - begin);
  });
}

// Bytes of source and target of the parallel copy, rounded up to an even number of pages.
uint64_t whole_copy_bytes(const BaselineTask& task) {
  return round_up(task.copy_bytes, 2 * kPageBytes);
}

// Times one round of work, which all ranks begin at the same time. Round -1 is a warm-up and not
// recorded.
class Stopwatch {
 public:
  Stopwatch(FunctionRef<void()> line_up, Clock& clock) : line_up_(line_up), clock_(clock) {}

  template <typename Fn>
  void time(std::array<double, Baselines::kRounds>& seconds, int round, const Fn& work) {
    line_up_();
    const int64_t begin = clock_.now_ns();
    work();
    const auto taken = static_cast<double>(clock_.now_ns() - begin) / kNsPerSecond;
    if (round >= 0) seconds[static_cast<size_t>(round)] = taken;
  }

 private:
  FunctionRef<void()> line_up_;
  Clock& clock_;
};

void measure_copies(const BaselineTask& task, Ledger& ledger, Stopwatch& watch,
                    Baselines& measured) {
  const Buffer memory = ledger.charge(Purpose::staging, whole_copy_bytes(task), task.threads);
  measured.copied_bytes = memory.bytes().size();
  for (int round = -1; round < Baselines::kRounds; ++round) {
    watch.time(measured.memcpy_s, round, [&] {
      copy(memory.bytes(), task.threads,
           [](const std::byte* from, std::byte* to, size_t n) { std::memcpy(to, from, n); });
    });
    watch.time(measured.streaming_s, round,
               [&] { copy(memory.bytes(), task.threads, copy_streaming); });
  }
}

// The number of parameters of the timed steps: so many that the states of the fused and the unfused
// step together fit into the memory of the state under test. At least one bucket, at most
// kMaxParams.
int64_t params_of(const BaselineTask& task) {
  const uint64_t state_bytes = adamw_footprint(task.spec).total();
  const int64_t numel = std::max<int64_t>(1, task.spec.shards[0].numel());
  const uint64_t per_param = state_bytes / static_cast<uint64_t>(numel) + 1 + kUnfusedBytes;
  const auto fit = static_cast<int64_t>(state_bytes / per_param);
  return std::clamp(fit / kBucketElements * kBucketElements, kBucketElements, kMaxParams);
}

AdamWSpec fused_spec(const BaselineTask& task) {
  AdamWSpec spec = task.spec;
  spec.shards[0].runs = {{0, params_of(task)}};
  return spec;
}

// Gives the fused step the gradients of the unfused step.
void deliver(AdamW& state, int threads, const UnfusedState& from) {
  pass(threads, from.n, [&](int, int64_t at, int64_t n) {
    state.arrive({0, at, n, from.grad + 4 * at, DType::f32});
  });
}

}  // namespace

Footprint baseline_footprint(const BaselineTask& task) {
  Footprint footprint = adamw_footprint(fused_spec(task));
  footprint[Purpose::staging] +=
      round_up(static_cast<uint64_t>(params_of(task)) * kUnfusedBytes, kPageBytes) +
      round_up(task.ring_bytes, kPageBytes);
  return footprint;
}

Footprint copy_footprint(const BaselineTask& task) {
  Footprint footprint;
  footprint[Purpose::staging] = whole_copy_bytes(task);
  return footprint;
}

Baselines measure_baselines(const BaselineTask& task, Ledger& ledger, FunctionRef<void()> line_up,
                            Clock& clock) {
  Baselines measured;
  Stopwatch watch(line_up, clock);
  measure_copies(task, ledger, watch, measured);
  const int64_t n = params_of(task);
  const Buffer memory =
      ledger.charge(Purpose::staging, static_cast<uint64_t>(n) * kUnfusedBytes, task.threads);
  const UnfusedState unfused(memory.bytes(), n);
  const Buffer ring = ledger.charge(Purpose::staging, task.ring_bytes);
  const Outlet outlet{.ring = ring.bytes(), .send = [](const ReadyChunk&) {}};
  AdamW fused(fused_spec(task), ledger, task.threads);
  for (int round = -1; round < Baselines::kRounds; ++round) {  // round -1: warm-up
    // In the unfused step, parameters and gradients are small pseudo-random numbers and moments are
    // 0. The fused step gets the same gradients.
    pass(task.threads, n, [&](int, int64_t at, int64_t count) {
      synth_fill(0, DType::f32, at, count, unfused.master + 4 * at);
      std::memcpy(unfused.grad + 4 * at, unfused.master + 4 * at, 4 * static_cast<size_t>(count));
      std::memset(unfused.exp_avg + 4 * at, 0, 4 * static_cast<size_t>(count));
      std::memset(unfused.exp_avg_sq + 4 * at, 0, 4 * static_cast<size_t>(count));
    });
    deliver(fused, task.threads, unfused);
    // The warm-up, round -1, is step 1.
    const AdamNumbers numbers = adam_numbers(AdamOptions{}, round + 2, task.spec.seed);
    watch.time(measured.unfused_s, round,
               [&] { unfused_step(unfused, task.threads, numbers, 1.0F); });
    const float clip = clip_factor(fused.norm().norm(), 2 * fused.norm().norm());
    watch.time(measured.fused_s, round,
               [&] { fused.step({.clip = clip, .outlet = ring.empty() ? nullptr : &outlet}); });
  }
  return measured;
}

}  // namespace modicum
