// The empty files of a save. Internal to `stream`.
#pragma once

#include <cstdint>

#include "modicum/checkpoint/checkpoint.h"
#include "modicum/ranks/ranks.h"
#include "modicum/stream/save.h"

namespace modicum {

// Creates this rank's share of the files of `manifest`, with their headers, and reserves their
// space, so that a full disk fails here. Returns the bytes written. CONFLICT if a file exists;
// NOSPACE, IO.
struct RankOfMany {
  int rank = 0;
  int ranks = 1;
};
uint64_t create_files(const Manifest& manifest, const SaveFiles& to, Board& board,
                      const RankOfMany& which);

}  // namespace modicum
