#include "modicum/optim/adamw.h"

#include <fmt/format.h>

#include <utility>

#include "modicum/optim/arriving.h"
#include "modicum/optim/shard_map.h"

namespace modicum {

namespace {

// The planes that a device accesses: it writes gradients and reads the bf16 half of a split master.
std::vector<Plane> pinned_planes(const StateFormatRow& row) {
  if (row.is_split()) return {Plane::master, Plane::grad};
  return {Plane::grad};
}

}  // namespace

// The pinned arenas; unpins them on destruction.
class AdamW::Pins {
 public:
  explicit Pins(Pinner pinner) : pinner_(std::move(pinner)) {}
  ~Pins() {
    for (const std::span<std::byte> arena : pinned_) pinner_.unpin(arena);
  }
  Pins(const Pins&) = delete;
  Pins& operator=(const Pins&) = delete;

  void pin(std::span<std::byte> arena) {
    if (!pinner_.pin || arena.empty()) return;
    pinned_.reserve(pinned_.size() + 1);  // push_back must not throw after `pin`
    pinner_.pin(arena);
    pinned_.push_back(arena);
  }

 private:
  const Pinner pinner_;
  std::vector<std::span<std::byte>> pinned_;
};

AdamW::AdamW(AdamWSpec spec, Ledger& ledger, int threads, Pinner pinner, Poll poll)
    : spec_(std::move(spec)),
      row_(row_of(spec_.format)),
      threads_(threads),
      map_(std::make_unique<ShardMap>(spec_)),
      partition_(std::make_unique<Partition>(*map_, threads)) {
  check_budget(ledger, pinner);
  for (size_t p = 0; p < kPlanes; ++p) {
    const auto plane = static_cast<Plane>(p);
    arenas_[p] =
        ledger.charge(plane_purpose(plane), map_->arena_bytes(plane), threads, poll, spec_.fork);
  }
  pins_ = std::make_unique<Pins>(std::move(pinner));
  for (const Plane plane : pinned_planes(row_)) {
    pins_->pin(arenas_[static_cast<size_t>(plane)].bytes());
  }
  for (const ShardSpec& shard : spec_.shards) parameter_.push_back(name_hash(shard.fqn));
  steps_.resize(shards());
  arriving_.resize(shards());
  forget_gradients();
}

AdamW::~AdamW() = default;

// Called before the first charge, since no arena may be charged if the last one would not fit.
void AdamW::check_budget(const Ledger& ledger, const Pinner& pinner) const {
  const Footprint needed = adamw_footprint(spec_);
  ledger.require_room(needed, fmt::format("AdamW's state ({})", row_.name));
  uint64_t pinned = 0;
  for (const Plane plane : pinned_planes(row_)) {
    pinned += round_up(map_->arena_bytes(plane), kPageBytes);
  }
  if (!pinner.pin || pinned <= pinner.limit_bytes) return;
  fail(Category::budget,
       fmt::format("AdamW pins memory: {}",
                   over_budget(pinner.limit_bytes, pinned, "RLIMIT_MEMLOCK")),
       {.expected = std::to_string(pinner.limit_bytes),
        .got = std::to_string(pinned),
        .shortfall_bytes = pinned - pinner.limit_bytes,
        .owners = owners_of(needed)});
}

void AdamW::fail_about(size_t shard, const std::string& what) const {
  const std::string& fqn = spec_.shards[shard].fqn;
  fail(Category::mismatch, fmt::format("parameter '{}': {}", printable(fqn), what),
       {.tensor = fqn});
}

size_t AdamW::checked_group(int group) const {
  return checked_index("group", static_cast<size_t>(group), spec_.groups.size());
}

const AdamOptions& AdamW::options(int group) const { return spec_.groups[checked_group(group)]; }

void AdamW::set_options(int group, const AdamOptions& options) {
  check_options(options);
  AdamOptions& current = spec_.groups[checked_group(group)];
  if (current.amsgrad != options.amsgrad) {
    fail(Category::usage, "amsgrad can't change: the state's constructor allocates its memory");
  }
  current = options;
}

void AdamW::set_steps(size_t shard, int64_t steps) {
  checked_shard(shard);
  if (steps < 0) {
    fail(Category::usage, fmt::format("expected a step count of 0 or more, got {}", steps),
         {.tensor = this->shard(shard).fqn});
  }
  steps_[shard] = steps;
}

// ---- addresses

std::byte* AdamW::element(size_t shard, Plane plane, int64_t at) const noexcept {
  const ShardSpec& spec = spec_.shards[shard];
  std::byte* begin = plane == Plane::master ? spec.master : nullptr;
  if (const auto& place = map_->place(shard, plane); place.codes) {
    begin = arenas_[static_cast<size_t>(plane)].bytes().data() + *place.codes;
  }
  const std::optional<DType> dtype = plane_dtype(row_, plane);
  return begin == nullptr ? nullptr : begin + bytes_of(*dtype, at);
}

std::span<std::byte> AdamW::plane(size_t shard, Plane plane) const {
  checked_shard(shard);
  std::byte* const begin = element(shard, plane, 0);
  if (begin == nullptr) return {};
  return {begin, bytes_of(*plane_dtype(row_, plane), map_->index(shard).numel())};
}

std::span<float> AdamW::scales(size_t shard, Plane plane) const {
  checked_shard(shard);
  const ShardMap::Place& place = map_->place(shard, plane);
  if (!row_.has_scales() || plane_purpose(plane) != Purpose::moments || !place.codes) return {};
  std::byte* const arena = arenas_[static_cast<size_t>(plane)].bytes().data();
  return {reinterpret_cast<float*>(arena + place.scales),
          static_cast<size_t>(map_->index(shard).scales())};
}

AdamSpan AdamW::span_of(size_t shard, const Stretch& stretch) const noexcept {
  const ShardSpec& spec = spec_.shards[shard];
  const auto scale = [&](Plane plane) -> float* {
    const std::span<float> of_shard = scales(shard, plane);
    return of_shard.empty() ? nullptr : of_shard.data() + stretch.scale;
  };
  AdamSpan span{.format = spec_.format,
                .parameter = parameter_[shard],
                .first = stretch.first,
                .n = stretch.n,
                .row = spec.row,
                .master = element(shard, Plane::master, stretch.at),
                .master_low = element(shard, Plane::master_low, stretch.at),
                .grad = element(shard, Plane::grad, stretch.at),
                .grad_dtype = row_.grad,
                .exp_avg = element(shard, Plane::exp_avg, stretch.at),
                .exp_avg_sq = element(shard, Plane::exp_avg_sq, stretch.at),
                .max_exp_avg_sq = element(shard, Plane::max_exp_avg_sq, stretch.at),
                .exp_avg_scale = scale(Plane::exp_avg),
                .exp_avg_sq_scale = scale(Plane::exp_avg_sq),
                .max_exp_avg_sq_scale = scale(Plane::max_exp_avg_sq)};
  if (spec.out == nullptr) return span;
  span.out = spec.out + bytes_of(spec.out_dtype, stretch.at);
  span.out_dtype = spec.out_dtype;
  return span;
}

}  // namespace modicum
