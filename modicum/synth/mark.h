// The mark in the metadata of a generated file, and the values that its elements must have. So a
// check needs neither a reference copy nor the architecture.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "modicum/spec/spec.h"

namespace modicum {

// In `__metadata__`, "modicum.synth" is "1", or "sparse" if most of the file is a hole. A sparse
// file may also have "modicum.synth.edges", a list of world sizes such as "2,4".
//
// In a sparse file the first 4096 bytes of each tensor are written. For each world size W of the
// list, 2048 bytes are also written on each side of every boundary between shards of Shard(0),
// which have ceil(rows / W) rows. The ranges are widened to multiples of synth_granule(). All other
// bytes read as zeros.
//
//   rows 10, world size 4:   0  1  2 | 3  4  5 | 6  7  8 | 9
//   written                  ####   ###       ###       ###
struct SynthMark {
  bool is_sparse = false;
  std::vector<int64_t> edges;  // world sizes; only if is_sparse

  bool operator==(const SynthMark&) const = default;
};

std::map<std::string, std::string> synth_metadata(const SynthMark& mark);
// The mark in `metadata`; nullopt if there is none, or an unknown one.
std::optional<SynthMark> synth_mark(const std::map<std::string, std::string>& metadata);

// Half-open range of a tensor's elements.
struct ElementRange {
  int64_t begin = 0;
  int64_t end = 0;

  bool operator==(const ElementRange&) const = default;
};

// The parts of elements [first, first + n) that are written: sorted, with gaps between them.
std::vector<ElementRange> synth_written(const SynthMark& mark, const TensorSpec& stored,
                                        int64_t first, int64_t n);

// Fills `out` with the bytes that elements [first, first + n) of the stored tensor must have.
// `first` and `n` must be multiples of synth_granule(stored.dtype).
void synth_expected(const SynthMark& mark, const TensorSpec& stored, int64_t first, int64_t n,
                    std::byte* out);

// The least number of elements that fill whole bytes: 2 for F4, 4 for F6, 1 for other dtypes.
int64_t synth_granule(DType dtype) noexcept;

}  // namespace modicum
