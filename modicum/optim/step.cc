// One optimizer step, in one pass over memory.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <iterator>
#include <optional>
#include <utility>

#include "modicum/optim/adamw.h"
#include "modicum/optim/arriving.h"
#include "modicum/optim/shard_map.h"

namespace modicum {

namespace {

void require_factor(const char* name, float value, bool may_be_zero) {
  if (std::isfinite(value) && (value > 0 || (may_be_zero && value == 0))) return;
  fail(Category::usage, fmt::format("gradients can't be multiplied by this {}", name),
       {.expected = may_be_zero ? "a finite number of 0 or more" : "a finite number above 0",
        .got = fmt::format("{}", value)});
}

}  // namespace

void AdamW::step(const StepOptions& options) {
  const StateStep alone{this, options};
  step_all({&alone, 1});
}

void AdamW::step_all(std::span<const StateStep> steps) {
  int threads = 1;
  for (const StateStep& each : steps) {
    each.state->prepare_step(each.options);
    threads = std::max(threads, each.state->threads_);
  }
  run_workers(threads, [&](int worker) {
    for (const StateStep& each : steps) {
      if (worker < each.state->threads_) each.state->step_of(worker, each.options);
    }
  });
  for (const StateStep& each : steps) each.state->finish_step();
}

// Everything in a step that can fail, except the start of its threads.
void AdamW::prepare_step(const StepOptions& options) {
  require_factor("unscale", options.unscale, false);
  require_factor("clip", options.clip, true);
  require_finite_gradients();
  if (options.outlet != nullptr) check_outlet(*options.outlet);
  take_numbers(options);
}

void AdamW::finish_step() {
  for (size_t shard = 0; shard < shards(); ++shard)
    steps_[shard] += arriving_[shard].left_out ? 0 : 1;
  forget_gradients();
}

void AdamW::skip() { forget_gradients(); }

void AdamW::refresh_masters() {
  run_workers(threads_, [&](int worker) {
    partition_->for_each_stretch(worker, [&](size_t shard, const Stretch& stretch) {
      refresh_masters_of(span_of(shard, stretch));
    });
  });
}

// Works in tiles that fit into the L1 cache, so that no parameter-sized buffer is needed. In a
// step, the stretch's master is still in the L2 cache when the kernel reads it again.
void AdamW::refresh_masters_of(const AdamSpan& span) const noexcept {
  if (span.out == nullptr || row_.is_split()) return;
  constexpr int64_t kTile = 2048;
  constexpr int64_t kOutBytes = 2;
  std::array<std::byte, kTile * kOutBytes> rounded;
  for (int64_t begin = 0; begin < span.n; begin += kTile) {
    const int64_t n = std::min(kTile, span.n - begin);
    std::byte* const master = span.master + bytes_of(DType::f32, begin);
    const std::byte* const out = span.out + begin * kOutBytes;
    cast(master, DType::f32, rounded.data(), span.out_dtype, n);
    if (std::memcmp(rounded.data(), out, static_cast<size_t>(n * kOutBytes)) == 0) continue;
    for (int64_t i = 0; i < n; ++i) {
      if (std::memcmp(rounded.data() + i * kOutBytes, out + i * kOutBytes, kOutBytes) == 0)
        continue;
      cast(out + i * kOutBytes, span.out_dtype, master + bytes_of(DType::f32, i), DType::f32, 1);
    }
  }
}

void AdamW::check_outlet(const Outlet& outlet) const {
  if (row_.is_split()) {
    if (outlet.dtype == DType::bf16) return;
    fail(Category::unsupported,
         fmt::format("{} keeps its parameters as bfloat16 and can send no other dtype", row_.name));
  }
  if (outlet.ring.size() / kRingSlotBytes < static_cast<size_t>(threads_)) {
    fail(Category::usage,
         fmt::format("the ring has {} bytes; expected {} or more for each of {} threads",
                     outlet.ring.size(), kRingSlotBytes, threads_));
  }
}

// One thread's slots of the ring, used round-robin.
class AdamW::Slots {
 public:
  Slots(const Outlet& outlet, int worker, int threads)
      : outlet_(outlet),
        count_(static_cast<int>(outlet.ring.size() / kRingSlotBytes) / threads),
        first_(worker * count_) {}
  // Waits for all copies, so that the ring is unused when the step returns.
  ~Slots() {
    for (int64_t slot = 0; slot < std::min<int64_t>(used_, count_); ++slot) wait(slot);
  }
  Slots(const Slots&) = delete;
  Slots& operator=(const Slots&) = delete;

  int next() {
    if (used_ >= count_) wait(used_ % count_);
    return first_ + static_cast<int>(used_++ % count_);
  }
  std::byte* begin(int slot) const noexcept {
    return outlet_.ring.data() + static_cast<uint64_t>(slot) * kRingSlotBytes;
  }

 private:
  void wait(int64_t slot) const {
    if (outlet_.wait) outlet_.wait(first_ + static_cast<int>(slot));
  }
  const Outlet& outlet_;
  const int count_;
  const int first_;
  int64_t used_ = 0;
};

// Computes one entry per group and step count. The powers of an entry continue from the last step's
// entry of the same group with the highest count not above its own, which is usually the count
// before. Shards that are left out get an entry too, so that their powers are kept.
void AdamW::take_numbers(const StepOptions& options) {
  decltype(numbers_) taken;
  for (size_t shard = 0; shard < shards(); ++shard) {
    const int group = spec_.shards[shard].group;
    const auto [at, is_new] = taken.try_emplace({group, steps_[shard] + 1});
    if (!is_new) continue;
    auto& [numbers, powers] = at->second;
    if (const auto above = numbers_.upper_bound(at->first); above != numbers_.begin()) {
      const auto& [key, last] = *std::prev(above);
      if (key.first == group) powers = last.powers;
    }
    numbers = adam_numbers(options_of(shard), steps_[shard] + 1, spec_.seed, powers);
    numbers.unscale = options.unscale;
    numbers.clip = options.clip;
  }
  numbers_ = std::move(taken);
}

void AdamW::announce(size_t shard, const Stretch& stretch, const BeforeOverwrite& before) const {
  const ShardSpec& spec = spec_.shards[shard];
  const ScaleBlocks blocks(spec.row);
  for (size_t p = 0; p < kPlanes; ++p) {
    const auto plane = static_cast<Plane>(p);
    const std::byte* const begin = element(shard, plane, stretch.at);
    if (plane == Plane::grad || begin == nullptr) continue;
    before({begin, bytes_of(*plane_dtype(row_, plane), stretch.n)});
    const std::span<float> all = scales(shard, plane);
    if (all.empty()) continue;
    const int64_t last = blocks.block_of(stretch.first + stretch.n - 1);
    const auto n = static_cast<size_t>(last - blocks.block_of(stretch.first) + 1);
    before(std::as_bytes(all.subspan(static_cast<size_t>(stretch.scale), n)));
  }
  if (spec.out == nullptr) return;
  before({spec.out + bytes_of(spec.out_dtype, stretch.at), bytes_of(spec.out_dtype, stretch.n)});
}

void AdamW::step_of(int worker, const StepOptions& options) {
  const Outlet* const outlet = options.outlet;
  std::optional<Slots> slots;
  if (outlet != nullptr && !row_.is_split()) slots.emplace(*outlet, worker, threads_);
  partition_->for_each_stretch(worker, [&](size_t shard, const Stretch& stretch) {
    if (arriving_[shard].left_out) return;
    const int group = spec_.shards[shard].group;
    const AdamNumbers& numbers = numbers_.at({group, steps_[shard] + 1}).numbers;
    if (options.before_overwrite != nullptr) announce(shard, stretch, *options.before_overwrite);
    AdamSpan span = span_of(shard, stretch);
    if (options.refresh_masters) refresh_masters_of(span);
    ReadyChunk chunk{shard, stretch.at, stretch.n, span.master, -1};
    if (slots) {
      chunk.slot = slots->next();
      span.out = slots->begin(chunk.slot);
      span.out_dtype = outlet->dtype;
      chunk.elements = span.out;
    }
    adamw(numbers, span);
    if (outlet != nullptr) outlet->send(chunk);
  });
}

}  // namespace modicum
