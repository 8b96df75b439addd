#include "modicum/stream/writer.h"

#include <algorithm>
#include <array>
#include <bit>

#include "modicum/kernels/kernels.h"

namespace modicum {
namespace {

// Elements to compare are cast on the stack, since a plan for host memory has no cast room in its
// staging.
constexpr size_t kCompareRoomBytes = 4096;

int64_t bytes_at(DType dtype, int64_t elements) noexcept {
  return elements * bits_per_element(dtype) / 8;
}

}  // namespace

Writer::Writer(const Plan& plan, Sink& sink, const Proofs& proofs, const LoadOptions& options,
               std::span<std::byte> slot) noexcept
    : plan_(plan),
      sink_(sink),
      coverage_(proofs.coverage),
      ties_(proofs.ties),
      compared_(proofs.compared),
      options_(options),
      cast_room_(slot.subspan(std::min<size_t>(slot.size(), plan.staging.tile_bytes))) {}

void Writer::done(const Transfer& transfer) noexcept {
  coverage_.tick(transfer);
  if (transfer.source != Transfer::Source::zero && !transfer.compared) {
    bytes_loaded_ += bytes_of(transfer.to_dtype, transfer.numel());
  }
}

std::span<std::byte> Writer::place_of(const Transfer& transfer) noexcept {
  return sink_.host(transfer.buffer)
      .subspan(static_cast<size_t>(bytes_at(transfer.to_dtype, transfer.runs.at)),
               bytes_of(transfer.to_dtype, transfer.runs.length));
}

void Writer::placed(const Transfer& transfer) {
  if (compared_ != nullptr) compared_->add(transfer, place_of(transfer).data());
  ties_.add(transfer, sink_.host(transfer.buffer));
  done(transfer);
}

void Writer::put(const Transfer& transfer, const std::byte* from, const ScalesAtHand& scales) {
  MODICUM_ASSERT(!transfer.dequantises() || scales.bytes != nullptr);
  if (compared_ != nullptr && transfer.source == Transfer::Source::stored) {
    compared_->add(transfer, from);
  }
  const Conversion conversion(plan_, transfer, scales);
  if (transfer.compared) {
    std::array<std::byte, kCompareRoomBytes> room;
    put_by_copies(transfer, from, conversion, room);
  } else if (const std::span<std::byte> host = sink_.host(transfer.buffer); !host.empty()) {
    put_into_host(transfer, from, conversion, host);
    ties_.add(transfer, host);
  } else {
    put_by_copies(transfer, from, conversion, cast_room_);
  }
  done(transfer);
}

void Writer::convert(const Transfer& t, const Conversion& conversion, const Piece& piece) noexcept {
  conversion.run(piece.from, piece.first, piece.to, piece.n, piece.step);
  if (options_.losses == nullptr || t.compared) return;
  RangeLoss loss = conversion.loss(piece.from, piece.first, piece.to, piece.n, piece.step);
  if (loss.empty()) return;
  loss.first_index = piece.at + loss.first_index * piece.step;
  if (t.source == Transfer::Source::stored) loss.first_stored = t.from;
  options_.losses->add(t.target, loss);
}

void Writer::put_into_host(const Transfer& t, const std::byte* from, const Conversion& conversion,
                           std::span<std::byte> host) noexcept {
  for (int64_t k = 0; k < t.runs.count; ++k) {
    const std::byte* run = from + bytes_at(t.from_dtype, k * t.runs.stride);
    const int64_t at = t.runs.at + k * t.runs.at_stride;
    std::byte* to = host.data() + bytes_at(t.to_dtype, at);
    // A run of one element takes the contiguous path.
    const int64_t step = t.runs.length == 1 ? 1 : t.runs.at_step;
    convert(t, conversion, {run, t.runs.first + k * t.runs.stride, to, at, t.runs.length, step});
  }
}

// Passes the elements to Sink::copy in lines. If the elements of a run are contiguous in the
// destination, the run is a line. Otherwise (a transpose) a line has one element of each run; these
// are collected in `room`. A line that is cast or collected is copied in parts if it is longer than
// the room. If its elements are not contiguous in the destination either, each is copied alone.
// Each part but the last has a multiple of 8 elements, so that it ends at the end of a byte.
//
//   source, 2 runs of 3        destination, transposed: at_step 2, at_stride 1
//     a b c                      a d b e c f
//     d e f                      lines: [a d] [b e] [c f]
void Writer::put_by_copies(const Transfer& t, const std::byte* from, const Conversion& conversion,
                           std::span<std::byte> room) {
  const bool runs_are_lines = t.runs.at_step == 1 || t.runs.length == 1;
  if (runs_are_lines && !t.casts()) return put_unchanged(t, from);
  const int64_t lines = runs_are_lines ? t.runs.count : t.runs.length;
  const int64_t length = runs_are_lines ? t.runs.length : t.runs.count;
  const int64_t line_at = runs_are_lines ? t.runs.at_stride : t.runs.at_step;
  const bool neighbours = runs_are_lines || t.runs.at_stride == 1 || t.runs.count == 1;
  const auto most =
      neighbours ? static_cast<int64_t>(room.size() * 8) / bits_per_element(t.to_dtype) / 8 * 8 : 1;
  for (int64_t line = 0; line < lines; ++line) {
    for (int64_t i = 0; i < length; i += most) {
      const int64_t n = std::min(most, length - i);
      const int64_t first = runs_are_lines ? line * t.runs.stride + i : i * t.runs.stride + line;
      const int64_t at = t.runs.at + line * line_at + i * (runs_are_lines ? 1 : t.runs.at_stride);
      if (runs_are_lines) {
        convert(t, conversion,
                {from + bytes_at(t.from_dtype, first), t.runs.first + first, room.data(), at, n});
      } else {
        for (int64_t j = 0; j < n; ++j) {
          const int64_t element = first + j * t.runs.stride;
          convert(t, conversion,
                  {from + bytes_at(t.from_dtype, element), t.runs.first + element,
                   room.data() + bytes_at(t.to_dtype, j), at + j * t.runs.at_stride});
        }
      }
      const std::span<const std::byte> elements = room.first(bytes_of(t.to_dtype, n));
      if (!t.compared) sink_.copy(t.buffer, at, elements);
      ties_.add(t, at, elements);
    }
  }
}

void Writer::put_unchanged(const Transfer& t, const std::byte* from) {
  for (int64_t k = 0; k < t.runs.count; ++k) {
    const int64_t at = t.runs.at + k * t.runs.at_stride;
    const std::span<const std::byte> elements(from + bytes_at(t.from_dtype, k * t.runs.stride),
                                              bytes_of(t.to_dtype, t.runs.length));
    if (!t.compared) sink_.copy(t.buffer, at, elements);
    ties_.add(t, at, elements);
  }
}

void Writer::make(const Transfer& transfer) {
  if (transfer.source == Transfer::Source::caller) {
    MODICUM_ASSERT(options_.caller != nullptr);
    const std::byte* whole = options_.caller(transfer.from).data();
    return put(transfer, whole + bytes_at(transfer.from_dtype, transfer.runs.first));
  }
  // Zeros and initial values are generated on the stack, in parts.
  std::array<std::byte, 4096> buffer{};
  const int64_t most =
      static_cast<int64_t>(buffer.size()) * 8 / bits_per_element(transfer.from_dtype);
  for (int64_t k = 0; k < transfer.runs.count; ++k) {
    for (int64_t i = 0; i < transfer.runs.length; i += most) {
      const int64_t n = std::min(most, transfer.runs.length - i);
      const Transfer part = transfer.part(k, 1, i, n);
      if (transfer.source == Transfer::Source::init) {
        const Node& node = plan_.recipe->nodes[transfer.from];
        const std::string& fqn = plan_.recipe->targets[transfer.target].spec.fqn;
        init_fill({static_cast<InitKind>(node.arg[0]), std::bit_cast<double>(node.arg[1]),
                   options_.init_seed ^ name_hash(fqn), node.dtype},
                  part.runs.first, part.runs.length, buffer.data());
      }
      put(part, buffer.data());
    }
  }
}

}  // namespace modicum
