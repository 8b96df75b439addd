#include "modicum/stream/fake_device_double.h"

#include <cstring>

namespace modicum {

FakeDeviceSink::FakeDeviceSink(const Plan& plan, int rank) {
  for (uint32_t b = 0; b < buffer_count(plan); ++b) {
    dtypes_.push_back(buffer_of(plan, b, rank).dtype);
    buffers_.emplace_back(buffer_of(plan, b, rank).bytes());
  }
}

void FakeDeviceSink::copy(uint32_t buffer, int64_t at, std::span<const std::byte> elements) {
  const auto begin = static_cast<size_t>(at * bytes_per_element(dtypes_[buffer]));
  MODICUM_ASSERT(begin + elements.size() <= buffers_[buffer].size());
  std::memcpy(buffers_[buffer].data() + begin, elements.data(), elements.size());
}

void FakeDeviceSink::fetch(uint32_t buffer, int64_t at, std::span<std::byte> elements) {
  const auto begin = static_cast<size_t>(at * bytes_per_element(dtypes_[buffer]));
  MODICUM_ASSERT(begin + elements.size() <= buffers_[buffer].size());
  std::memcpy(elements.data(), buffers_[buffer].data() + begin, elements.size());
}

}  // namespace modicum
