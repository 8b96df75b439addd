// The sink of a conversion, which is a load that writes its elements into the files of a new
// checkpoint. Part of the public header of `stream`.
#pragma once

#include <mutex>
#include <vector>

#include "modicum/plan/plan.h"
#include "modicum/stream/data_writer.h"
#include "modicum/stream/save.h"
#include "modicum/stream/sink.h"

namespace modicum {

// Writes targets to their extents in the files of `saved`, which must exist (create_file). The plan
// must have Destination::copy, and one rank, which holds every target unsharded (whole_layout).
class FileSink final : public Sink {
 public:
  // places[t] is the tensor of `saved` that target t is written to; UINT32_MAX for aliases, which
  // have no elements. `keeps_holes`: pages of zeros are not written and take no space. All
  // arguments must outlive the sink.
  FileSink(const Plan& plan, const Manifest& saved, std::span<const uint32_t> places,
           const SaveFiles& to, bool keeps_holes);
  FileSink(const Plan&&, const Manifest&, std::span<const uint32_t>, const SaveFiles&,
           bool) = delete;

  std::span<std::byte> host(uint32_t) noexcept override { return {}; }
  // Throws NOSPACE or IO. May be called by any thread; a lock admits one write at a time.
  void copy(uint32_t target, int64_t at, std::span<const std::byte> elements) override;
  // Always throws UNSUPPORTED: a conversion does not read back.
  void fetch(uint32_t target, int64_t at, std::span<std::byte> elements) override;

  // Call after the load: makes the written bytes durable. Throws NOSPACE or IO.
  void finish() { writer_.finish(); }
  uint64_t bytes_written() const noexcept { return writer_.bytes_written(); }
  uint64_t digest() const noexcept { return digested_.value(); }  // the model's digest (DigestSum)

 private:
  const Plan& plan_;
  const Manifest& saved_;
  const std::span<const uint32_t> places_;
  const bool keeps_holes_;
  DigestSum digested_;
  std::mutex mutex_;
  DataWriter writer_;
};

}  // namespace modicum
