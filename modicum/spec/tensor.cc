#include "modicum/spec/tensor.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "modicum/spec/footprint.h"

namespace modicum {

int64_t numel_of(const std::vector<int64_t>& shape) noexcept {
  int64_t numel = 1;
  for (const int64_t size : shape) numel *= size;
  return numel;
}

uint64_t bytes_of(DType dtype, int64_t numel) noexcept {
  const auto bits = static_cast<uint64_t>(bits_per_element(dtype));
  const auto count = static_cast<uint64_t>(numel);
  return bits % 8 == 0 ? count * (bits / 8) : (count * bits + 7) / 8;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

uint64_t Manifest::data_bytes() const noexcept {
  uint64_t bytes = 0;
  for (const Stored& stored : tensors) bytes += stored.at.bytes();
  return bytes;
}

uint64_t Manifest::held_bytes() const noexcept {
  uint64_t bytes = files.size() * sizeof(DataFile) + tensors.size() * sizeof(Stored);
  for (const DataFile& file : files) bytes += heap_bytes(file.name);
  for (const Stored& stored : tensors) bytes += heap_bytes(stored.spec);
  return bytes;
}

}  // namespace modicum
