#include "modicum/optim/shards.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <span>
#include <utility>

#include "modicum/optim/arriving.h"
#include "modicum/optim/shard_map.h"

namespace modicum {
namespace {

// Bytes per shard in AdamW's vectors. The last line: name hash, step count and first bucket.
constexpr uint64_t kTableBytes = sizeof(ShardSpec) + sizeof(ShardIndex) +
                                 sizeof(std::array<ShardMap::Place, kPlanes>) +
                                 sizeof(GradientArrival) + 3 * sizeof(uint64_t);

bool has_scales(const StateFormatRow& row, Plane plane) noexcept {
  return row.has_scales() && plane_purpose(plane) == Purpose::moments;
}

// Whether a shard of this group has elements of the plane in the arenas.
bool holds(Plane plane, const AdamOptions& group, bool owns_master) {
  if (plane == Plane::master) return owns_master;
  return plane != Plane::max_exp_avg_sq || group.amsgrad;
}

const AdamOptions& group_of(const std::vector<AdamOptions>& groups, const ShardSpec& shard) {
  if (shard.group < 0 || static_cast<size_t>(shard.group) >= groups.size()) {
    fail(Category::mismatch, "a parameter's group index is out of range",
         {.tensor = shard.fqn,
          .expected = fmt::format("an index within [0, {})", groups.size()),
          .got = fmt::format("{}", shard.group)});
  }
  return groups[static_cast<size_t>(shard.group)];
}

}  // namespace

int64_t ShardSpec::numel() const noexcept {
  int64_t sum = 0;
  for (const ShardRun& run : runs) sum += run.n;
  return sum;
}

std::optional<DType> plane_dtype(const StateFormatRow& row, Plane plane) noexcept {
  switch (plane) {
    case Plane::master: return row.master;
    case Plane::master_low:
      if (row.master_low == DType::boolean) return std::nullopt;
      return row.master_low;
    case Plane::grad: return row.grad;
    case Plane::exp_avg: return row.moment;
    case Plane::exp_avg_sq:
    case Plane::max_exp_avg_sq: return row.has_scales() ? DType::u8 : row.moment;
    case Plane::count: break;
  }
  return std::nullopt;
}

Purpose plane_purpose(Plane plane) noexcept {
  switch (plane) {
    case Plane::master:
    case Plane::master_low: return Purpose::master;
    case Plane::grad: return Purpose::grad;
    default: return Purpose::moments;
  }
}

void check_options(const AdamOptions& options) {
  const auto require = [](bool holds, const char* name, const char* range, const auto& got) {
    if (holds) return;
    fail(Category::usage, fmt::format("AdamW can't step with this {}", name),
         {.expected = range, .got = fmt::format("{}", got)});
  };
  const auto is_non_negative = [](double x) { return std::isfinite(x) && x >= 0; };
  require(is_non_negative(options.lr), "lr", "a finite number of 0 or more", options.lr);
  require(options.beta1 >= 0 && options.beta1 < 1, "beta1", "a number in [0, 1)", options.beta1);
  require(options.beta2 >= 0 && options.beta2 < 1, "beta2", "a number in [0, 1)", options.beta2);
  require(is_non_negative(options.eps), "eps", "a finite number of 0 or more", options.eps);
  require(is_non_negative(options.weight_decay), "weight_decay", "a finite number of 0 or more",
          options.weight_decay);
  // The kernels compute in fp32, where 1 - beta may round to 0 and a large value to infinity. The
  // first step has the most extreme coefficients.
  const AdamNumbers first = adam_numbers(options, 1, 0);
  const char* const range = "a finite coefficient in fp32";
  require(std::isfinite(first.step_size), "lr and beta1", range,
          fmt::format("{} and {}", options.lr, options.beta1));
  require(std::isfinite(first.bias2) && first.bias2 > 0, "beta2",
          "a finite coefficient other than 0 in fp32", options.beta2);
  require(std::isfinite(first.eps), "eps", range, options.eps);
  require(std::isfinite(first.decay), "weight_decay", range, options.weight_decay);
  if (options.semantics == AdamSemantics::torch) return;
  if (options.amsgrad || options.maximize) {
    fail(Category::unsupported,
         "DeepSpeed's semantics lack amsgrad and maximize; torch's have both");
  }
}

// ---- one shard

ShardIndex::ShardIndex(const ShardSpec& spec) : blocks_(spec.row) {
  int64_t end = 0;
  runs_.reserve(spec.runs.size());
  for (const ShardRun& run : spec.runs) {
    if (run.n <= 0 || run.first < end || run.first > INT64_MAX - run.n) {
      fail(Category::mismatch, "a shard's runs must be ascending, disjoint and not empty",
           {.tensor = spec.fqn,
            .expected = fmt::format("1 element or more within [{}, 2^63)", end),
            .got = fmt::format("{} elements from {}", run.n, run.first)});
    }
    end = run.first + run.n;
    runs_.push_back({numel_, run.first, run.n, scales_});
    numel_ += run.n;
    scales_ += blocks_.block_of(end - 1) - blocks_.block_of(run.first) + 1;
  }
  if (numel_ == 0) return;
  first_bucket_ = bucket_of(runs_.front().first);
  buckets_ = bucket_of(end - 1) + 1;
}

ShardIndex::Runs::const_iterator ShardIndex::run_around(int64_t at) const noexcept {
  return std::prev(std::upper_bound(runs_.begin(), runs_.end(), at,
                                    [](int64_t x, const Stretch& run) { return x < run.at; }));
}

int64_t ShardIndex::before(int64_t first) const noexcept {
  const auto next = std::upper_bound(runs_.begin(), runs_.end(), first,
                                     [](int64_t x, const Stretch& run) { return x < run.first; });
  if (next == runs_.begin()) return 0;
  const Stretch& run = *std::prev(next);
  return run.at + std::min(run.n, first - run.first);
}

int64_t ShardIndex::bucket_end_around(int64_t at) const noexcept {
  const Stretch& run = *run_around(at);
  return bucket_begin(bucket_of(run.first + (at - run.at)) + 1);
}

bool ShardIndex::is_block_edge(int64_t at) const noexcept {
  if (at == numel_) return true;
  const Stretch& run = *run_around(at);
  const int64_t first = run.first + (at - run.at);
  return at == run.at || blocks_.begin_of(first) == first;
}

// ---- all shards

namespace {

// A piece of caller-owned memory that a step writes.
struct CallerPiece {
  std::span<const std::byte> bytes;
  size_t shard = 0;
};

std::vector<CallerPiece> written_of_caller(const AdamWSpec& spec) {
  std::vector<CallerPiece> all;
  const DType master = row_of(spec.format).master;
  for (size_t s = 0; s < spec.shards.size(); ++s) {
    const ShardSpec& shard = spec.shards[s];
    const auto add = [&](const std::byte* begin, DType dtype) {
      const uint64_t bytes = bytes_of(dtype, shard.numel());
      if (begin != nullptr && bytes > 0) all.push_back({{begin, bytes}, s});
    };
    add(shard.master, master);
    add(shard.out, shard.out_dtype);
  }
  return all;
}

// Sorts the pieces by address: if any two of them overlap, so do two neighbours.
void require_memory_apart(const AdamWSpec& spec) {
  std::vector<CallerPiece> all = written_of_caller(spec);
  const std::less<const std::byte*> before;
  std::sort(all.begin(), all.end(), [&](const CallerPiece& a, const CallerPiece& b) {
    return before(a.bytes.data(), b.bytes.data());
  });
  for (size_t i = 1; i < all.size(); ++i) {
    const CallerPiece& last = all[i - 1];
    if (!before(all[i].bytes.data(), last.bytes.data() + last.bytes.size())) continue;
    const auto [first, two] = std::minmax(last.shard, all[i].shard);
    const std::string& fqn = spec.shards[two].fqn;
    if (first == two) {
      fail(Category::mismatch,
           fmt::format("master and out of parameter '{}' share memory", printable(fqn)),
           {.tensor = fqn});
    }
    fail(Category::mismatch,
         fmt::format("parameter '{}' shares memory with parameter '{}'", printable(fqn),
                     printable(spec.shards[first].fqn)),
         {.tensor = fqn});
  }
}

}  // namespace

ShardMap::ShardMap(const AdamWSpec& spec) {
  for (const AdamOptions& options : spec.groups) check_options(options);
  require_memory_apart(spec);
  first_bucket_.push_back(0);
  for (const ShardSpec& shard : spec.shards) {
    group_of(spec.groups, shard);  // throws if the group is out of range
    shards_.emplace_back(shard);
    first_bucket_.push_back(first_bucket_.back() + static_cast<uint64_t>(shards_.back().buckets()));
  }
  places_.resize(shards_.size());
  for (size_t plane = 0; plane < kPlanes; ++plane) lay_out(spec, static_cast<Plane>(plane));
  uint64_t& gradients = arena_bytes_[static_cast<size_t>(Plane::grad)];
  buckets_at_ = gradients;
  gradients += buckets() * sizeof(Bucket);
}

PlaneBytes plane_bytes(const StateFormatRow& row, Plane plane, const ShardIndex& shard) {
  const std::optional<DType> dtype = plane_dtype(row, plane);
  if (!dtype) return {};
  const auto lines = [](uint64_t bytes) { return round_up(bytes, PlaneBytes::kAlignment); };
  const auto scales = static_cast<uint64_t>(has_scales(row, plane) ? shard.scales() : 0);
  return {lines(bytes_of(*dtype, shard.numel())), lines(scales * sizeof(float))};
}

void ShardMap::lay_out(const AdamWSpec& spec, Plane plane) {
  const StateFormatRow& row = row_of(spec.format);
  if (!plane_dtype(row, plane)) return;
  uint64_t& end = arena_bytes_[static_cast<size_t>(plane)];
  end = bytes_before(plane);
  const auto each = [&](const auto& fn) {
    for (size_t s = 0; s < shards_.size(); ++s) {
      const ShardSpec& shard = spec.shards[s];
      if (!holds(plane, group_of(spec.groups, shard), shard.master == nullptr)) continue;
      fn(places_[s][static_cast<size_t>(plane)], plane_bytes(row, plane, shards_[s]));
    }
  };
  each([&](Place& place, const PlaneBytes& bytes) {
    place.codes = end;
    end += bytes.codes;
  });
  each([&](Place& place, const PlaneBytes& bytes) {
    place.scales = end;
    end += bytes.scales;
  });
  if (end == bytes_before(plane)) end = 0;  // no shard has the plane
}

Partition::Partition(const ShardMap& map, int threads) : map_(map) {
  MODICUM_ASSERT(threads >= 1);
  int64_t total = 0;
  for (size_t shard = 0; shard < map.shards(); ++shard) total += map.index(shard).numel();
  Cut cut;
  int64_t before = 0;  // elements of the shards before cut.shard
  for (int thread = 0; thread < threads; ++thread) {
    // The element at which the thread's share would begin if it were not rounded.
    const auto aim = static_cast<int64_t>(static_cast<double>(total) * thread / threads);
    while (cut.shard < map.shards() && before + map.index(cut.shard).numel() <= aim) {
      before += map.index(cut.shard).numel();
      cut = {cut.shard + 1, 0};
    }
    if (cut.shard < map.shards() && before + cut.at < aim) {
      cut.at = map.index(cut.shard).bucket_end_around(aim - before - 1);
    }
    cuts_.push_back(cut);
  }
  cuts_.push_back({map.shards(), 0});
}

// ---- footprint

AdamWCount::AdamWCount(StateFormat format, std::vector<AdamOptions> groups)
    : format_(format), groups_(std::move(groups)) {
  for (const AdamOptions& options : groups_) check_options(options);
}

AdamWCount::AdamWCount(const AdamWSpec& spec) : AdamWCount(spec.format, spec.groups) {
  for (const ShardSpec& shard : spec.shards) add(shard, shard.master == nullptr);
}

void AdamWCount::add(const ShardSpec& shard, bool owns_master) {
  const AdamOptions& group = group_of(groups_, shard);
  const ShardIndex index(shard);
  for (size_t p = 0; p < kPlanes; ++p) {
    const auto plane = static_cast<Plane>(p);
    if (!holds(plane, group, owns_master)) continue;
    const PlaneBytes bytes = plane_bytes(row_of(format_), plane, index);
    arena_bytes_[p] += bytes.codes + bytes.scales;
  }
  arena_bytes_[static_cast<size_t>(Plane::grad)] +=
      static_cast<uint64_t>(index.buckets()) * sizeof(Bucket);
  held_bytes_ += kTableBytes + heap_bytes(shard.fqn) +
                 heap_block_bytes(shard.runs.size() * sizeof(ShardRun)) +
                 heap_block_bytes(shard.runs.size() * sizeof(Stretch));
}

Footprint AdamWCount::footprint() const {
  Footprint footprint;
  for (size_t p = 0; p < kPlanes; ++p) {
    if (arena_bytes_[p] == 0) continue;
    const auto plane = static_cast<Plane>(p);
    footprint[plane_purpose(plane)] += round_up(bytes_before(plane) + arena_bytes_[p], kPageBytes);
  }
  return footprint;
}

Footprint adamw_footprint(const AdamWSpec& spec) {
  Footprint footprint = AdamWCount(spec).footprint();
  if (spec.fork == Fork::inherited) footprint[Purpose::fork] = footprint.total();
  return footprint;
}

double bytes_moved_per_parameter(StateFormat format, bool out) noexcept {
  const StateFormatRow& row = row_of(format);
  double sum = out ? 2 : 0;
  for (size_t p = 0; p < static_cast<size_t>(Plane::max_exp_avg_sq); ++p) {
    const auto plane = static_cast<Plane>(p);
    const auto dtype = plane_dtype(row, plane);
    if (!dtype) continue;
    double bytes = bits_per_element(*dtype) / 8.0;
    if (has_scales(row, plane)) bytes += static_cast<double>(sizeof(float)) / kScaleBlock;
    sum += plane == Plane::grad ? bytes : 2 * bytes;  // read and written back
  }
  return sum;
}

}  // namespace modicum
