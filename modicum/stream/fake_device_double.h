// Test doubles of Sink.
#pragma once

#include <vector>

#include "modicum/stream/sink.h"

namespace modicum {

// Like the sink of a device, has no host memory to give out. `copy` and `fetch` access private
// buffers, which tests read with `buffer`.
class FakeDeviceSink final : public Sink {
 public:
  FakeDeviceSink(const Plan& plan, int rank);
  std::span<std::byte> host(uint32_t) noexcept override { return {}; }
  // Throws INTERNAL if the copy exceeds the buffer.
  void copy(uint32_t buffer, int64_t at, std::span<const std::byte> elements) override;
  void fetch(uint32_t buffer, int64_t at, std::span<std::byte> elements) override;
  const std::vector<std::byte>& buffer(uint32_t index) const { return buffers_[index]; }

 private:
  std::vector<DType> dtypes_;
  std::vector<std::vector<std::byte>> buffers_;
};

// Digests elements and drops them. Holds no model-sized memory.
class DiscardSink final : public Sink {
 public:
  DiscardSink(const Plan& plan, int rank) : sum_(plan, rank) {}
  std::span<std::byte> host(uint32_t) noexcept override { return {}; }
  void copy(uint32_t buffer, int64_t at, std::span<const std::byte> elements) override {
    sum_.add(buffer, at, elements);
  }
  // Throws INTERNAL: the elements were dropped.
  void fetch(uint32_t, int64_t, std::span<std::byte>) override { MODICUM_ASSERT(false); }
  uint64_t digest() const noexcept { return sum_.value(); }

 private:
  DigestSum sum_;
};

}  // namespace modicum
