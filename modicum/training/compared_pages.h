// Shared memory through which rank processes give the launcher what they have compared. Internal to
// `training`.
#pragma once

#include <cstdint>
#include <string>

#include "modicum/memory/memory.h"
#include "modicum/stream/stream.h"

namespace modicum {

// Construct it before the fork. Each rank gives its ComparedChunks; after all ranks have ended, the
// launcher merges them. Manifest::held_bytes counts a rank's part.
class ComparedPages {
 public:
  // `manifest` must outlive the object; `folder` is as for ComparedChunks.
  ComparedPages(const Manifest& manifest, int ranks, std::string folder = "");
  ComparedPages(const Manifest&&, int, std::string = "") = delete;

  void give(int rank, const ComparedChunks& compared) const;
  // Throws INTEGRITY if a value that was divided among ranks is not the saved one.
  ComparedValues merged() const;

 private:
  std::span<std::byte> part_of(int rank) const noexcept;

  const Manifest& manifest_;
  const int ranks_;
  const std::string folder_;
  uint64_t part_bytes_ = 0;
  Mapping mapping_;
};

}  // namespace modicum
