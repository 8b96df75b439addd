#include "modicum/stream/fake_device_double.h"

#include <cstring>

namespace modicum {

FakeDeviceSink::FakeDeviceSink(const Plan& plan, int rank) : plan_(plan) {
  for (size_t t = 0; t < plan.recipe->targets.size(); ++t) {
    const TensorSpec& spec = plan.recipe->targets[t].spec;
    const bool alias = plan.recipe->is_alias(t);
    buffers_.emplace_back(alias ? 0 : local_buffer(plan.layout, spec, rank).bytes());
  }
}

void FakeDeviceSink::copy(uint32_t buffer, int64_t at, std::span<const std::byte> elements) {
  const DType dtype = plan_.recipe->targets[buffer].spec.dtype;
  const auto begin = static_cast<size_t>(at * bytes_per_element(dtype));
  MODICUM_ASSERT(begin + elements.size() <= buffers_[buffer].size());
  std::memcpy(buffers_[buffer].data() + begin, elements.data(), elements.size());
}

}  // namespace modicum
