#include "modicum/spec/tensor.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "modicum/base/base.h"
#include "modicum/spec/footprint.h"

namespace modicum {

std::optional<int64_t> checked_numel(const std::vector<int64_t>& shape) noexcept {
  int64_t product = 1;  // of the dims that are not 0
  bool is_empty = false;
  for (const int64_t size : shape) {
    if (size < 0) return std::nullopt;
    is_empty |= size == 0;
    const auto next = size == 0 ? product : checked_mul(product, size);
    if (!next) return std::nullopt;
    product = *next;
  }
  return is_empty ? 0 : product;
}

std::optional<uint64_t> checked_bytes(DType dtype, const std::vector<int64_t>& shape) noexcept {
  const auto numel = checked_numel(shape);
  if (!numel) return std::nullopt;
  const uint64_t bytes = bytes_of(dtype, *numel);
  return bytes <= kMaxModelBytes ? std::optional(bytes) : std::nullopt;
}

int64_t numel_of(const std::vector<int64_t>& shape) noexcept {
  int64_t numel = 1;
  for (const int64_t size : shape) numel *= size;
  return numel;
}

uint64_t bytes_of(DType dtype, int64_t numel) noexcept {
  const auto bits = static_cast<uint64_t>(bits_per_element(dtype));
  const auto count = static_cast<uint64_t>(numel);
  // Eight elements are whole bytes in every dtype. Saturates, since 2^63 elements x 8 overflows.
  const auto whole = checked_mul(count / 8, bits);
  return whole ? saturating_add(*whole, (count % 8 * bits + 7) / 8) : UINT64_MAX;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

std::string tensor_text(DType dtype, const std::vector<int64_t>& shape) {
  return fmt::format("{} {}", torch_name(dtype), shape_text(shape));
}

uint64_t Manifest::data_bytes() const noexcept {
  uint64_t bytes = 0;
  for (const StoredTensor& stored : tensors) bytes = saturating_add(bytes, stored.at.bytes());
  return bytes;
}

uint64_t digest_chunks_of(const StoredTensor& stored) noexcept {
  return (stored.at.bytes() + kDigestChunkBytes - 1) / kDigestChunkBytes;
}

uint64_t Manifest::digest_chunks() const noexcept {
  uint64_t chunks = 0;
  for (const StoredTensor& stored : tensors) chunks += digest_chunks_of(stored);
  return chunks;
}

uint64_t Manifest::held_bytes() const noexcept {
  uint64_t bytes = files.size() * sizeof(DataFile) + tensors.size() * sizeof(StoredTensor);
  for (const DataFile& file : files) bytes += heap_bytes(file.name);
  for (const StoredTensor& stored : tensors) bytes += heap_bytes(stored.spec);
  if (recorded.empty()) return bytes;
  // By chunk: its recorded sum, four sums, a mark, and what a rank hands to the launcher. By
  // tensor: two numbers.
  const uint64_t chunks = recorded.size();
  return bytes + heap_block_bytes(chunks * 8) + heap_block_bytes(chunks * 32) +
         heap_block_bytes(chunks / 8 + 8) + round_up(handed_over_bytes(), kPageBytes) +
         2 * heap_block_bytes((tensors.size() + 1) * 8);
}

uint64_t Manifest::handed_over_bytes() const noexcept { return 48 * (recorded.size() + 1); }

}  // namespace modicum
