#include "modicum/training/state_load.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "modicum/kernels/kernels.h"

namespace modicum {
namespace {

constexpr int64_t kWindow = 32768;  // elements that are converted at a time

// What a window reads of a plane, and the values in fp32 between both forms.
struct Window {
  explicit Window(Ledger& ledger)
      : memory(ledger.charge(Purpose::staging, kConvertedStateBytes, 1)) {
    std::span<std::byte> left = memory.bytes();
    const auto take = [&](uint64_t bytes) {
      const std::span<std::byte> taken = left.first(bytes);
      left = left.subspan(bytes);
      return taken;
    };
    constexpr auto kN = static_cast<uint64_t>(kWindow);
    values = {reinterpret_cast<float*>(take(kN * sizeof(float)).data()), kN};
    stored = take(kN * sizeof(float));
    low = take(kN * 2);
    // A row of r >= kScaleBlock elements has at most 2 * r / kScaleBlock blocks; the incomplete
    // rows at both ends of the window add at most two.
    scales = take((2 * kN / kScaleBlock + 2) * sizeof(float));
  }

  Buffer memory;
  std::span<float> values;
  std::span<std::byte> stored, low, scales;
};

// A plane of a shard, and its first stored tensor.
struct PlaneOfShard {
  uint32_t stored = 0;
  const HeldShard* held_shard = nullptr;
  StateForm saved;
  StatePlane plane = StatePlane::master;
  bool is_converted = false;
  StateFiles::Part part;  // unless it is converted
};

struct Moment {
  Plane plane;
  StatePlane exported;
  const char* suffix;
  const char* scale_suffix;
};
constexpr std::array<Moment, 2> kMoments = {
    {{Plane::exp_avg, StatePlane::exp_avg, "exp_avg", "exp_avg_scale"},
     {Plane::exp_avg_sq, StatePlane::exp_avg_sq, "exp_avg_sq", "exp_avg_sq_scale"}}};

// Emits the spans of a load, and converts planes as soon as a window of them was read.
class StateReader {
 public:
  StateReader(const StateFiles& files, const std::vector<HeldShard>& held_shards, Ledger& ledger)
      : files_(files), ledger_(ledger) {
    for (const HeldShard& held_shard : held_shards) add(held_shard);
    std::sort(planes_.begin(), planes_.end(),
              [](const auto& a, const auto& b) { return a.stored < b.stored; });
  }

  void read(FunctionRef<void(const StoredSpan&)> fn) {
    for (const PlaneOfShard& plane : planes_) {
      if (!plane.is_converted) {
        files_.for_each_span(*plane.held_shard, plane.part, fn);
        continue;
      }
      if (!window_) window_.emplace(ledger_);
      convert(plane, fn);
    }
  }

 private:
  void add(const HeldShard& held_shard) {
    const StateForm saved = files_.form_of(held_shard.fqn);
    const StateFormat format = held_shard.adamw.format();
    const bool is_split = row_of(saved.format).is_split();
    if (is_master_converted(saved, format)) {
      const uint32_t stored = files_.stored(held_shard.fqn, is_split ? "master_low" : "master");
      planes_.push_back({stored, &held_shard, saved, StatePlane::master, true, {}});
    } else {
      if (!saved.is_master) add_as_saved(held_shard, "master", Plane::master);
      if (is_split) add_as_saved(held_shard, "master_low", Plane::master_low);
    }
    for (const Moment& moment : kMoments) {
      if (is_moment_converted(saved, format)) {
        const uint32_t stored = files_.stored(held_shard.fqn, moment.suffix);
        planes_.push_back({stored, &held_shard, saved, moment.exported, true, {}});
        continue;
      }
      add_as_saved(held_shard, moment.suffix, moment.plane);
      if (row_of(format).has_scales())
        add_as_saved(held_shard, moment.scale_suffix, moment.plane, true);
    }
  }

  void add_as_saved(const HeldShard& held_shard, const char* suffix, Plane plane,
                    bool is_scale = false) {
    const uint32_t stored = files_.stored(held_shard.fqn, suffix);
    planes_.push_back({stored, &held_shard, {}, {}, false, {stored, plane, is_scale}});
  }

  // Elements of a run of a shard: from parameter element `first`, and shard element `at`.
  struct Stretch {
    int64_t first = 0, at = 0, n = 0;
  };

  // A window ends where a block of scales ends, in either form, or where the run ends.
  void convert(const PlaneOfShard& plane, FunctionRef<void(const StoredSpan&)> fn) {
    const HeldShard& held_shard = *plane.held_shard;
    const ScaleBlocks blocks(moment_row(files_.manifest().tensors[plane.stored].spec.shape));
    int64_t at = 0;
    for (const ShardRun& run : held_shard.adamw.shard(held_shard.shard).runs) {
      const int64_t end = run.first + run.n;
      for (int64_t first = run.first; first < end;) {
        int64_t n = end - first;
        if (n > kWindow) n = blocks.begin_of(first + kWindow) - first;
        if (plane.plane == StatePlane::master) {
          convert_master(plane, {first, at, n}, fn);
        } else {
          convert_moment(plane, blocks, {first, at, n}, fn);
        }
        first += n;
        at += n;
      }
    }
  }

  void convert_moment(const PlaneOfShard& plane, const ScaleBlocks& blocks, const Stretch& stretch,
                      FunctionRef<void(const StoredSpan&)> fn) {
    AdamSpan span = span_of(plane, stretch);
    read_values(plane.stored, stretch, window_->stored, fn);
    const Moment& moment = kMoments[plane.plane == StatePlane::exp_avg ? 0 : 1];
    if (row_of(plane.saved.format).has_scales()) {
      span.row = blocks.row();
      read_scales(files_.stored(plane.held_shard->fqn, moment.scale_suffix), blocks, stretch, fn);
    }
    auto* const scales = reinterpret_cast<float*>(window_->scales.data());
    if (plane.plane == StatePlane::exp_avg) {
      span.exp_avg = window_->stored.data();
      span.exp_avg_scale = scales;
    } else {
      span.exp_avg_sq = window_->stored.data();
      span.exp_avg_sq_scale = scales;
    }
    import_values(plane, span, stretch);
  }

  void convert_master(const PlaneOfShard& plane, const Stretch& stretch,
                      FunctionRef<void(const StoredSpan&)> fn) {
    AdamSpan span = span_of(plane, stretch);
    span.master = window_->stored.data();
    if (row_of(plane.saved.format).is_split()) {
      if (plane.saved.is_master) {
        take_upper_halves(*plane.held_shard, stretch);
      } else {
        read_values(files_.stored(plane.held_shard->fqn, "master"), stretch, window_->stored, fn);
      }
      read_values(plane.stored, stretch, window_->low, fn);
      span.master_low = window_->low.data();
    } else {
      read_values(plane.stored, stretch, window_->stored, fn);
    }
    import_values(plane, span, stretch);
    const ShardSpec& shard = plane.held_shard->adamw.shard(plane.held_shard->shard);
    if (shard.out == nullptr || row_of(plane.held_shard->adamw.format()).is_split()) return;
    cast(reinterpret_cast<const std::byte*>(window_->values.data()), DType::f32,
         shard.out + bytes_of(shard.out_dtype, stretch.at), shard.out_dtype, stretch.n);
  }

  // The parameter itself, as it was saved.
  void take_upper_halves(const HeldShard& held_shard, const Stretch& stretch) {
    const ShardSpec& shard = held_shard.adamw.shard(held_shard.shard);
    const uint64_t begin = bytes_of(DType::bf16, stretch.at);
    const uint64_t bytes = bytes_of(DType::bf16, stretch.n);
    std::byte* const to = window_->stored.data();
    if (row_of(held_shard.adamw.format()).is_split()) {
      std::copy_n(held_shard.adamw.plane(held_shard.shard, Plane::master).data() + begin, bytes,
                  to);
    } else if (shard.out != nullptr && shard.out_dtype == DType::bf16) {
      std::copy_n(shard.out + begin, bytes, to);
    } else {
      const auto values = window_->values.first(static_cast<size_t>(stretch.n));
      held_shard.adamw.export_to(held_shard.shard, StatePlane::master, stretch.at, values);
      cast(reinterpret_cast<const std::byte*>(values.data()), DType::f32, to, DType::bf16,
           stretch.n);
    }
  }

  static AdamSpan span_of(const PlaneOfShard& plane, const Stretch& stretch) {
    return {.format = plane.saved.format,
            .parameter = name_hash(plane.held_shard->fqn),
            .first = stretch.first,
            .n = stretch.n};
  }

  void import_values(const PlaneOfShard& plane, const AdamSpan& saved, const Stretch& stretch) {
    const auto values = window_->values.first(static_cast<size_t>(stretch.n));
    export_state(saved, plane.plane, values.data());
    plane.held_shard->adamw.import_from(plane.held_shard->shard, plane.plane, stretch.at, values);
  }

  void read_values(uint32_t stored, const Stretch& stretch, std::span<std::byte> to,
                   FunctionRef<void(const StoredSpan&)> fn) const {
    const DType dtype = files_.manifest().tensors[stored].spec.dtype;
    fn({stored, bytes_of(dtype, stretch.first), to.first(bytes_of(dtype, stretch.n))});
  }

  // A block that begins before the run is the end of another shard, which compares its scale.
  void read_scales(uint32_t stored, const ScaleBlocks& blocks, const Stretch& stretch,
                   FunctionRef<void(const StoredSpan&)> fn) const {
    const int64_t begin = blocks.block_of(stretch.first);
    const int64_t end = blocks.block_of(stretch.first + stretch.n - 1) + 1;
    const bool is_cut = blocks.begin_of(stretch.first) != stretch.first;
    const uint64_t at = bytes_of(DType::f32, begin), of_cut = is_cut ? sizeof(float) : 0;
    const auto to = window_->scales.first(bytes_of(DType::f32, end - begin));
    if (is_cut) fn({stored, at, to.first(of_cut), true});
    if (to.size() > of_cut) fn({stored, at + of_cut, to.subspan(of_cut)});
  }

  const StateFiles& files_;
  Ledger& ledger_;
  std::vector<PlaneOfShard> planes_;
  std::optional<Window> window_;
};

}  // namespace

Footprint resume_footprint_of(const Manifest& saved, const StateFiles& files,
                              std::span<const StateOf> parameters) {
  Footprint result;
  result[Purpose::header] = files.held_bytes() + saved.held_bytes();
  if (files.is_converted(parameters)) result[Purpose::staging] = kConvertedStateBytes;
  return result;
}

uint64_t load_state(const StateSource& from, HeldShards shards, const RankContext& at,
                    ComparedChunks& compared) {
  std::vector<HeldShard> held_shards;
  shards([&](const HeldShard& held_shard) {
    // Before an import, which rounds with the random bits of the last step.
    held_shard.adamw.set_steps(held_shard.shard, from.facts.steps_made_by(held_shard.fqn));
    if (!held_shard.adamw.shard(held_shard.shard).runs.empty()) held_shards.push_back(held_shard);
  });
  StateReader reader(from.files, held_shards, *at.ledger);
  const uint64_t bytes = load_spans(
      from.checkpoint, [&](FunctionRef<void(const StoredSpan&)> fn) { reader.read(fn); }, at,
      compared);
  compared.compare();
  return bytes;
}

}  // namespace modicum
