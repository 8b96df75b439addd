// Export, import and digest of the state as fp32 values.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "modicum/optim/adamw.h"
#include "modicum/optim/shard_map.h"

namespace modicum {

void AdamW::export_to(size_t shard, StatePlane plane, int64_t at, std::span<float> to) const {
  const auto n = static_cast<int64_t>(to.size());
  require_held(shard, plane, at, n);
  map_->index(shard).for_each_stretch(at, at + n, [&](const Stretch& stretch) {
    export_state(span_of(shard, stretch), plane, to.data() + (stretch.at - at));
  });
}

void AdamW::import_from(size_t shard, StatePlane plane, int64_t at, std::span<const float> from) {
  const auto n = static_cast<int64_t>(from.size());
  require_held(shard, plane, at, n);
  const ShardIndex& index = map_->index(shard);
  if (row_.has_scales() && plane != StatePlane::master &&
      !(index.is_block_edge(at) && index.is_block_edge(at + n))) {
    fail(Category::usage,
         fmt::format("moments of {} are imported in whole blocks of up to {} elements; elements {} "
                     "to {} of '{}' divide a block",
                     row_.name, kScaleBlock, at, at + n, printable(spec_.shards[shard].fqn)));
  }
  AdamNumbers numbers = adam_numbers(options_of(shard), 1, spec_.seed);
  numbers.step = steps_[shard];  // import rounds with the random bits of the shard's last step
  index.for_each_stretch(at, at + n, [&](const Stretch& stretch) {
    import_state(numbers, span_of(shard, stretch), plane, from.data() + (stretch.at - at));
  });
}

void AdamW::require_held(size_t shard, StatePlane plane, int64_t at, int64_t n) const {
  checked_shard(shard);
  const int64_t numel = map_->index(shard).numel();
  if (at < 0 || at > numel - n) {
    fail_about(shard, fmt::format("expected elements within [0, {}), got {} elements from {}",
                                  numel, n, at));
  }
  if (plane == StatePlane::max_exp_avg_sq && !options_of(shard).amsgrad) {
    fail_about(shard, "its group has no max_exp_avg_sq, since amsgrad is off");
  }
}

StateDigest& StateDigest::operator+=(const StateDigest& other) noexcept {
  state += other.state;
  master += other.master;
  return *this;
}

StateDigest AdamW::digest() const {
  constexpr std::array<std::pair<StatePlane, std::string_view>, 4> kParts = {
      {{StatePlane::master, "param"},
       {StatePlane::exp_avg, "exp_avg"},
       {StatePlane::exp_avg_sq, "exp_avg_sq"},
       {StatePlane::max_exp_avg_sq, "max_exp_avg_sq"}}};
  std::vector<StateDigest> of_worker(static_cast<size_t>(threads_));
  run_workers(threads_, [&](int worker) {
    std::array<float, 4096> values;
    StateDigest sum;
    partition_->for_each_stretch(worker, [&](size_t shard, const Stretch& stretch) {
      if (!spec_.shards[shard].counts) return;
      for (const auto& [plane, name] : kParts) {
        if (plane == StatePlane::max_exp_avg_sq && !options_of(shard).amsgrad) continue;
        const uint64_t seed = parameter_[shard] ^ name_hash(name);
        for (int64_t done = 0; done < stretch.n;) {
          const auto n = std::min<int64_t>(stretch.n - done, static_cast<int64_t>(values.size()));
          export_to(shard, plane, stretch.at + done,
                    std::span(values).first(static_cast<size_t>(n)));
          const uint64_t part = digest_run(seed, reinterpret_cast<const std::byte*>(values.data()),
                                           sizeof(float), stretch.first + done, n);
          sum += {part, plane == StatePlane::master ? part : 0};
          done += n;
        }
      }
    });
    of_worker[static_cast<size_t>(worker)] = sum;
  });
  StateDigest sum;
  for (const StateDigest& part : of_worker) sum += part;
  return sum;
}

}  // namespace modicum
