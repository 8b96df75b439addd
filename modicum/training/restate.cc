#include "modicum/training/restate.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "modicum/kernels/kernels.h"

namespace modicum {
namespace {

constexpr std::array<StatePlane, 3> kPlanesOf = {StatePlane::master, StatePlane::exp_avg,
                                                 StatePlane::exp_avg_sq};

// The parts of one side of a window: values of a plane, lower halves of a split master, scales of
// 8-bit moments, and the bf16 weight that is cast from a master.
enum Slot : uint8_t { kValues, kLow, kScales, kOut, kSlots };

// A map or set keeps each element in a block with four words of its own.
template <typename Element>
constexpr uint64_t kNodeBytes = heap_block_bytes(4 * sizeof(void*) + sizeof(Element));
using ByName = std::map<std::string_view, uint32_t>;

ByName by_name(const Manifest& manifest) {
  ByName places;
  for (uint32_t s = 0; s < manifest.tensors.size(); ++s) places[manifest.tensors[s].spec.fqn] = s;
  return places;
}

bool is_of(Plane stored, StatePlane plane) noexcept {
  switch (plane) {
    case StatePlane::master: return stored == Plane::master || stored == Plane::master_low;
    case StatePlane::exp_avg: return stored == Plane::exp_avg;
    default: return stored == Plane::exp_avg_sq;
  }
}

// One side of a window: memory for a plane in one format, by slot.
struct Side {
  std::array<std::span<std::byte>, kSlots> slots;

  AdamSpan span(StateFormat format, StatePlane plane) const noexcept {
    AdamSpan span{.format = format};
    std::byte* const values = slots[kValues].data();
    auto* const scales = reinterpret_cast<float*>(slots[kScales].data());
    if (plane == StatePlane::master) {
      span.master = values;
      span.master_low = slots[kLow].data();
    } else if (plane == StatePlane::exp_avg) {
      span.exp_avg = values;
      span.exp_avg_scale = scales;
    } else {
      span.exp_avg_sq = values;
      span.exp_avg_sq_scale = scales;
    }
    return span;
  }
};

}  // namespace

struct Restate::Tensor {
  Slot slot;
  bool is_weight = false;
  std::string name;
  DType dtype;
};

// The memory of a window: both sides and the fp32 values between them.
struct Restate::Window {
  explicit Window(Ledger& ledger) : memory(ledger.charge(Purpose::staging, kBytes, 1)) {
    std::span<std::byte> left = memory.bytes();
    const auto take = [&](uint64_t bytes) {
      const std::span<std::byte> taken = left.first(bytes);
      left = left.subspan(bytes);
      return taken;
    };
    constexpr auto kN = static_cast<uint64_t>(kElements);
    values = {reinterpret_cast<float*>(take(kN * sizeof(float)).data()), kN};
    for (Side* const side : {&from, &to}) {
      side->slots[kValues] = take(kN * 4);
      side->slots[kLow] = take(kN * 2);
      // A row of r >= kScaleBlock elements has at most 2 * r / kScaleBlock blocks; the incomplete
      // rows at both ends of the window add at most two.
      side->slots[kScales] = take((2 * kN / kScaleBlock + 2) * sizeof(float));
    }
    to.slots[kOut] = take(kN * 2);
  }

  Buffer memory;
  std::span<float> values;
  Side from, to;
};

struct Restate::Places {
  Window window;
  DataReader weights, state;
  DataWriter writer;
  const FileToComplete& of;
  ByName written;  // the tensors of the file, by name

  Places(const Restate& restate, const FileToComplete& to)
      : window(to.ledger),
        weights(restate.weights_),
        state(restate.state_),
        writer(to.to.files, to.to.directory),
        of(to) {
    for (uint32_t s = 0; s < to.manifest.tensors.size(); ++s) {
      const Stored& stored = to.manifest.tensors[s];
      if (stored.at.file == to.file) written[stored.spec.fqn] = s;
    }
  }
};

bool Restate::changes(const Parameter& of, StatePlane plane) noexcept {
  const StateFormatRow &from = row_of(of.from), &to = row_of(of.to);
  if (plane != StatePlane::master) return from.moment != to.moment;
  return from.master != to.master || from.master_low != to.master_low;
}

std::vector<Restate::Tensor> Restate::tensors_of(const Parameter& of, StateFormat format,
                                                 bool is_master, StatePlane plane) {
  std::vector<Tensor> tensors;
  const StateFormatRow& row = row_of(format);
  if (plane == StatePlane::master) {
    tensors.push_back({row.is_split() ? kValues : kOut, true, of.spec.fqn, of.spec.dtype});
  }
  for (const StoredPlane& stored : stored_planes(format, is_master)) {
    if (!is_of(stored.plane, plane)) continue;
    std::string name = fmt::format("{}.{}", of.spec.fqn, stored.suffix);
    tensors.push_back(
        {stored.plane == Plane::master_low ? kLow : kValues, false, name, stored.dtype});
    name += kScaleSuffix;
    if (stored.has_scales) tensors.push_back({kScales, false, std::move(name), DType::f32});
  }
  return tensors;
}

Restate::Restate(const Checkpoint& weights, const Checkpoint& state, const StateFacts& facts,
                 std::span<const StateOf> from, std::span<const StateOf> to)
    : weights_(weights),
      state_(state),
      seed_(facts.seed),
      weight_of_(by_name(weights.manifest)),
      plane_of_(by_name(state.manifest)) {
  MODICUM_ASSERT(from.size() == to.size());
  parameters_.reserve(from.size());
  for (size_t p = 0; p < from.size(); ++p) {
    const TensorSpec& spec = from[p].parameter;
    MODICUM_ASSERT(spec.fqn == to[p].parameter.fqn);
    Parameter of{spec,
                 from[p].format,
                 to[p].format,
                 from[p].is_master,
                 to[p].is_master,
                 facts.steps_made_by(spec.fqn)};
    if (changes(of, StatePlane::master)) {
      const auto found = weight_of_.find(spec.fqn);
      const bool is_stored = found != weight_of_.end() &&
                             weights.manifest.tensors[found->second].spec.shape == spec.shape &&
                             weights.manifest.tensors[found->second].spec.dtype == spec.dtype;
      if (!is_stored) {
        fail(Category::unsupported,
             "the parameter is not stored under its own name, dtype and shape; its master can't "
             "change its format",
             {.tensor = spec.fqn,
              .expected = fmt::format("a format with the masters of {}", row_of(of.from).name),
              .got = std::string(row_of(of.to).name)});
      }
      changed_weights_.insert(spec.fqn);
    }
    parameters_.push_back(std::move(of));
  }
}

uint64_t Restate::held_bytes(std::initializer_list<const Manifest*> written) const {
  uint64_t names = weight_of_.size() + plane_of_.size();
  uint64_t most = 0;
  for (const Manifest* const of : written) most = std::max<uint64_t>(most, of->tensors.size());
  names += most;  // Places::written
  uint64_t bytes = names * kNodeBytes<ByName::value_type>;
  for (const std::string& name : changed_weights_) {
    bytes += kNodeBytes<std::string> + heap_bytes(name);
  }
  bytes += heap_block_bytes(parameters_.capacity() * sizeof(Parameter));
  for (const Parameter& of : parameters_) bytes += heap_bytes(of.spec);
  return bytes;
}

void Restate::convert(const Parameter& of, StatePlane plane, const std::vector<Tensor>& into,
                      Places& places) const {
  const int64_t numel = numel_of(of.spec.shape);
  const ScaleBlocks blocks(moment_row(of.spec.shape));
  Window& window = places.window;
  // The begin and the size, in bytes, of the part of a tensor for elements [first, first + n).
  const auto stretch = [&](const Tensor& tensor, int64_t first, int64_t n) {
    if (tensor.slot != kScales) {
      return std::pair(bytes_of(tensor.dtype, first), bytes_of(tensor.dtype, n));
    }
    const int64_t block = blocks.block_of(first);
    return std::pair(bytes_of(DType::f32, block),
                     bytes_of(DType::f32, blocks.block_of(first + n - 1) + 1 - block));
  };
  AdamNumbers numbers = adam_numbers(AdamOptions{}, 1, seed_);
  numbers.step = of.steps;  // random bits of the last step, as in AdamW::import_from
  for (int64_t first = 0; first < numel;) {
    // A window ends where a block of scales ends.
    const int64_t end = first + kElements >= numel ? numel : blocks.begin_of(first + kElements);
    const int64_t n = end - first;
    const auto at = [&](AdamSpan span) {
      // The same row as in a shard of AdamW, since random bits depend on it.
      span.row = row_of(span.format).has_scales() ? moment_row(of.spec.shape) : 0;
      span.parameter = name_hash(of.spec.fqn);
      span.first = first;
      span.n = n;
      return span;
    };
    for (const Tensor& tensor : tensors_of(of, of.from, of.is_master_from, plane)) {
      if (tensor.slot == kOut) continue;
      const Checkpoint& from = tensor.is_weight ? weights_ : state_;
      const uint32_t s = (tensor.is_weight ? weight_of_ : plane_of_).at(tensor.name);
      const Extent& extent = from.manifest.tensors[s].at;
      const auto [begin, bytes] = stretch(tensor, first, n);
      (tensor.is_weight ? places.weights : places.state)
          .read(extent.file, extent.begin + begin, window.from.slots[tensor.slot].first(bytes));
    }
    export_state(at(window.from.span(of.from, plane)), plane, window.values.data());
    import_state(numbers, at(window.to.span(of.to, plane)), plane, window.values.data());
    cast(reinterpret_cast<const std::byte*>(window.values.data()), DType::f32,
         window.to.slots[kOut].data(), DType::bf16, n);
    for (const Tensor& tensor : into) {
      const uint32_t s = places.written.at(tensor.name);
      const auto [begin, bytes] = stretch(tensor, first, n);
      const Extent& extent = places.of.manifest.tensors[s].at;
      const std::span<const std::byte> written = window.to.slots[tensor.slot].first(bytes);
      places.writer.write(places.of.manifest.files[extent.file].name, extent.begin + begin,
                          written);
      places.of.sums.add(s, begin, written);
      places.of.beat(bytes);
    }
    first = end;
  }
}

FileOutcome Restate::write(const FileToComplete& of) const {
  Places places(*this, of);
  for (const Parameter& parameter : parameters_) {
    for (const StatePlane plane : kPlanesOf) {
      if (!changes(parameter, plane)) continue;
      std::vector<Tensor> into = tensors_of(parameter, parameter.to, parameter.is_master_to, plane);
      std::erase_if(into,
                    [&](const Tensor& tensor) { return !places.written.contains(tensor.name); });
      if (!into.empty()) convert(parameter, plane, into, places);
    }
  }
  places.writer.finish();
  places.weights.finish();
  places.state.finish();
  return {places.weights.bytes_read() + places.state.bytes_read(), places.writer.bytes_written()};
}

}  // namespace modicum
