// Puts elements from host memory into a sink: casts them, writes or compares them, and counts them.
// Internal to `stream`.
#pragma once

#include <span>

#include "modicum/plan/plan.h"
#include "modicum/stream/compared.h"
#include "modicum/stream/coverage.h"
#include "modicum/stream/scales.h"
#include "modicum/stream/sink.h"
#include "modicum/stream/stream.h"
#include "modicum/stream/ties.h"

namespace modicum {

// Belongs to one worker, whose staging is `slot`. Elements for Sink::copy are cast into the part of
// the slot after the tile (see Staging).
class Writer {
 public:
  struct Proofs {
    Coverage& coverage;
    Ties& ties;
    ComparedChunks* compared = nullptr;
  };
  Writer(const Plan& plan, Sink& sink, const Proofs& proofs, const LoadOptions& options,
         std::span<std::byte> slot) noexcept;

  // Carries out a transfer. `from` points to element `transfer.runs.first` of its source. `scales`
  // are required if the transfer dequantises.
  void put(const Transfer& transfer, const std::byte* from, const ScalesAtHand& scales = {});
  // Carries out a transfer that reads no file: zero, init or caller.
  void make(const Transfer& transfer);
  // Counts a transfer whose bytes were read straight into the sink's host memory.
  void placed(const Transfer& transfer);
  // The host memory into which a direct read of `transfer` puts its bytes.
  std::span<std::byte> place_of(const Transfer& transfer) noexcept;

  uint64_t bytes_loaded() const noexcept { return bytes_loaded_; }

 private:
  // Contiguous elements of a transfer's source, from element `first` of it on, and their place:
  // memory with `step` elements from one to the next, and elements at + i * step of the buffer.
  struct Piece {
    const std::byte* from = nullptr;
    int64_t first = 0;
    std::byte* to = nullptr;
    int64_t at = 0;
    int64_t n = 1;
    int64_t step = 1;
  };
  void convert(const Transfer& transfer, const Conversion& conversion, const Piece& piece) noexcept;
  void put_into_host(const Transfer& transfer, const std::byte* from, const Conversion& conversion,
                     std::span<std::byte> host) noexcept;
  // Casts into `room`, then copies to the sink. A compared transfer is not copied, only hashed.
  void put_by_copies(const Transfer& transfer, const std::byte* from, const Conversion& conversion,
                     std::span<std::byte> room);
  // The same for runs that are contiguous in the buffer and are not cast: they need no room.
  void put_unchanged(const Transfer& transfer, const std::byte* from);
  void done(const Transfer& transfer) noexcept;

  const Plan& plan_;
  Sink& sink_;
  Coverage& coverage_;
  Ties& ties_;
  ComparedChunks* const compared_;
  const LoadOptions& options_;
  const std::span<std::byte> cast_room_;
  uint64_t bytes_loaded_ = 0;
};

}  // namespace modicum
