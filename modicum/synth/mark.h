// The mark of a synthesised file, and the values that its elements must have. A check needs neither
// a reference copy nor the architecture.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "modicum/spec/spec.h"

namespace modicum {

// In `__metadata__`, "modicum.synth" is "1", or "sparse" if most of the file is a hole. Then
// "modicum.synth.edges" may list world sizes: "2,4".
//
// In a sparse file these bytes of each tensor are written: the first 4096 and, for each world size
// W, 2048 on each side of every boundary between shards of Shard(0), which have ceil(rows / W)
// rows. Ranges are rounded to whole elements. All other bytes read as zeros.
//
//   rows 10, world size 4:   0  1  2 | 3  4  5 | 6  7  8 | 9
//   written                  ####   ###       ###       ###
struct SynthMark {
  bool is_sparse = false;
  std::vector<int64_t> edges;  // sparse only

  bool operator==(const SynthMark&) const = default;
};

std::map<std::string, std::string> synth_metadata(const SynthMark& mark);
// Empty if there is no mark, or one of an unknown form.
std::optional<SynthMark> synth_mark(const std::map<std::string, std::string>& metadata);

// Half-open range of a tensor's elements.
struct ElementRange {
  int64_t begin = 0;
  int64_t end = 0;

  bool operator==(const ElementRange&) const = default;
};

// The written ranges among elements [first, first + n): sorted, with gaps between them.
std::vector<ElementRange> synth_written(const SynthMark& mark, const TensorSpec& stored,
                                        int64_t first, int64_t n);

// Fills `out` with the bytes that elements [first, first + n) of the stored tensor must have.
// `first` and `n` are multiples of synth_granule.
void synth_expected(const SynthMark& mark, const TensorSpec& stored, int64_t first, int64_t n,
                    std::byte* out);

// The fewest elements that fill whole bytes: 1, 2 (F4) or 4 (F6).
int64_t synth_granule(DType dtype) noexcept;

}  // namespace modicum
