// Putting elements that stand in host memory into a sink: cast, place or compare, tick off.
#pragma once

#include <span>

#include "modicum/plan/plan.h"
#include "modicum/stream/coverage.h"
#include "modicum/stream/scales.h"
#include "modicum/stream/sink.h"
#include "modicum/stream/stream.h"
#include "modicum/stream/ties.h"

namespace modicum {

// One worker's. `slot` is its staging: where the sink takes only copies, what is cast goes through
// the part of it behind the tile that was read.
class Writer {
 public:
  struct Proofs {
    Coverage& coverage;
    Ties& ties;
  };
  Writer(const Plan& plan, Sink& sink, const Proofs& proofs, const LoadOptions& options,
         std::span<std::byte> slot) noexcept;

  // `from` is where element `transfer.runs.first` of the source stands, `scales` are those that its
  // dequantisation needs.
  void put(const Transfer& transfer, const std::byte* from, const ScalesAtHand& scales = {});
  // A transfer that needs no reading: zero, init, caller.
  void make(const Transfer& transfer);
  // The bytes were read straight into the sink's host memory.
  void placed(const Transfer& transfer) noexcept;
  // Where a direct read of `transfer` goes.
  std::span<std::byte> place_of(const Transfer& transfer) noexcept;

  uint64_t bytes_loaded() const noexcept { return bytes_loaded_; }

 private:
  void put_into_host(const Transfer& transfer, const std::byte* from, const Conversion& how,
                     std::span<std::byte> host) noexcept;
  // Through `room`, to the sink's copy or, of what is compared, no further.
  void put_by_copies(const Transfer& transfer, const std::byte* from, const Conversion& how,
                     std::span<std::byte> room);
  void done(const Transfer& transfer) noexcept;

  const Plan& plan_;
  Sink& sink_;
  Coverage& coverage_;
  Ties& ties_;
  const LoadOptions& options_;
  const std::span<std::byte> cast_room_;
  uint64_t bytes_loaded_ = 0;
};

}  // namespace modicum
