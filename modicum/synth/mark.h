// How a file says that it was synthesised, and what its elements must then be. A checker needs
// nothing else: no reference copy, and not the model's row either.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "modicum/spec/spec.h"

namespace modicum {

// In `__metadata__`: "modicum.synth" is "1", or "sparse" where most of the file is a hole; then
// "modicum.synth.edges" may give worlds, "2,4".
//
// Of each tensor of a sparse file, written are its first 4096 bytes and, per world W, 2048 bytes on
// each side of every cut of Shard(0), with ceil(rows / W) rows a shard; rounded to whole elements.
// All else reads as zeros.
//
//   rows 10, world 4:   0  1  2 | 3  4  5 | 6  7  8 | 9
//   written             ####   ###       ###       ###
struct SynthMark {
  bool is_sparse = false;
  std::vector<int64_t> edges;  // sparse only

  bool operator==(const SynthMark&) const = default;
};

std::map<std::string, std::string> synth_metadata(const SynthMark& mark);
// Nothing where there is no mark, or none that this version understands.
std::optional<SynthMark> synth_mark(const std::map<std::string, std::string>& metadata);

// Half-open range of a tensor's elements.
struct ElementRange {
  int64_t begin = 0;
  int64_t end = 0;

  bool operator==(const ElementRange&) const = default;
};

// What is written of elements first .. first+n-1: sorted, disjoint, not touching.
std::vector<ElementRange> synth_written(const SynthMark& mark, const TensorSpec& stored,
                                        int64_t first, int64_t n);

// Fills `out` with the bytes that elements first .. first+n-1 of the stored tensor must have.
// Types below a byte: `first` and `n` even (multiples of four for 6 bits).
void synth_expected(const SynthMark& mark, const TensorSpec& stored, int64_t first, int64_t n,
                    std::byte* out);

// `first` and `n` of the above are multiples of this: 1, 2 (F4) or 4 (F6).
int64_t synth_granule(DType dtype) noexcept;

}  // namespace modicum
