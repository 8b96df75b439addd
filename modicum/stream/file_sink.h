// The sink of a conversion: a load whose elements go straight into the files of a checkpoint. Part
// of the door of `stream`.
#pragma once

#include <mutex>
#include <vector>

#include "modicum/plan/plan.h"
#include "modicum/stream/data_writer.h"
#include "modicum/stream/save.h"
#include "modicum/stream/sink.h"

namespace modicum {

// Writes whole targets at their places in the files of `saved`, which exist. For plans of one rank
// that holds every target whole (whole_layout), with Destination::copy.
class FileSink final : public Sink {
 public:
  struct Options {
    bool keeps_holes = false;  // pages of zeros are not written, so that they take no space
  };
  // By target of the plan, `places` is its tensor in `saved`; UINT32_MAX for aliases, which take no
  // elements. All must outlive the sink.
  FileSink(const Plan& plan, const Manifest& saved, std::span<const uint32_t> places,
           const SaveFiles& to, Options options);
  FileSink(const Plan&&, const Manifest&, std::span<const uint32_t>, const SaveFiles&,
           Options) = delete;

  std::span<std::byte> host(uint32_t) noexcept override { return {}; }
  // NOSPACE, IO. One thread writes at a time.
  void copy(uint32_t target, int64_t at, std::span<const std::byte> elements) override;
  // UNSUPPORTED: a conversion does not read back.
  void fetch(uint32_t target, int64_t at, std::span<std::byte> elements) override;

  // After the load: makes the written bytes durable. NOSPACE, IO.
  void finish() { writer_.finish(); }
  uint64_t bytes_written() const noexcept { return writer_.bytes_written(); }
  uint64_t digest() const noexcept { return digested_.value(); }  // of all targets, as DigestSum's

 private:
  const Plan& plan_;
  const Manifest& saved_;
  const std::span<const uint32_t> places_;
  const Options options_;
  DigestSum digested_;
  std::mutex mutex_;
  DataWriter writer_;
};

}  // namespace modicum
