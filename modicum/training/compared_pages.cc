#include "modicum/training/compared_pages.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace modicum {

ComparedPages::ComparedPages(const Manifest& manifest, int ranks, std::string folder)
    : manifest_(manifest), ranks_(ranks), folder_(std::move(folder)) {
  if (manifest.recorded.empty()) return;
  part_bytes_ = round_up(manifest.handed_over_bytes(), kPageBytes);
  mapping_ = Mapping::shared(part_bytes_ * static_cast<uint64_t>(ranks));
}

// A part begins with the number of its bytes.
std::span<std::byte> ComparedPages::part_of(int rank) const noexcept {
  return mapping_.bytes().subspan(static_cast<uint64_t>(rank) * part_bytes_, part_bytes_);
}

void ComparedPages::give(int rank, const ComparedChunks& compared) const {
  if (part_bytes_ == 0) return;
  const std::vector<std::byte> all = compared.bytes();
  const std::span<std::byte> part = part_of(rank);
  const uint64_t size = all.size();
  MODICUM_ASSERT(sizeof size + size <= part.size());
  std::memcpy(part.data(), &size, sizeof size);
  std::copy(all.begin(), all.end(), part.begin() + sizeof size);
}

ComparedValues ComparedPages::merged() const {
  ComparedChunks all(manifest_, folder_);
  for (int rank = 0; rank < ranks_ && part_bytes_ > 0; ++rank) {
    const std::span<const std::byte> part = part_of(rank);
    uint64_t size = 0;
    std::memcpy(&size, part.data(), sizeof size);
    all.merge(part.subspan(sizeof size, size));
  }
  return all.finish();
}

}  // namespace modicum
