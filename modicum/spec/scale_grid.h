// Which scale belongs to which FP8 code.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "modicum/spec/tensor.h"

namespace modicum {

// The rows and columns of a matrix.
using MatrixSize = std::array<int64_t, 2>;

// A tensor of codes as matrices over its last two dims, one below the other, and its scales in the
// same way. A single scale for all of a tensor makes one block of all its matrices.
//
//   codes [200, 300], block [128, 128]       scales [2, 3]
//        128    128   44
//      +------+------+--+                    | 0 | 1 | 2 |
//  128 |      |      |  |                    | 3 | 4 | 5 |
//      +------+------+--+
//   72 |      |      |  |
//      +------+------+--+
struct ScaleGrid {
  MatrixSize codes{1, 1};  // of one matrix
  MatrixSize block{1, 1};  // codes that share a scale; the last ones of a row or column may be less
  MatrixSize scales{1, 1};  // of one matrix

  // Of the code that is element `element` of its tensor: its row of scales, counted over all
  // matrices, and the element of the tensor of scales that is its own.
  int64_t row_of(int64_t element) const noexcept {
    const int64_t row = element / codes[1];
    return row / codes[0] * scales[0] + row % codes[0] / block[0];
  }
  int64_t index_of(int64_t element) const noexcept {
    return row_of(element) * scales[1] + element % codes[1] / block[1];
  }
};

// Of a tensor whose scale fits.
ScaleGrid scale_grid(const Manifest& manifest, const Stored& codes);

// The block size by which scales of shape `scales` cover codes of shape `codes`, where it is
// certain: all of the codes for a single scale; else `configured`, where that makes just this grid
// (its last blocks may be ragged); else the only size that makes it. Sizes that cut the codes in
// the same way count as one. Nothing where no size does, or several do.
std::optional<MatrixSize> block_of(const std::vector<int64_t>& codes,
                                   const std::vector<int64_t>& scales,
                                   const std::optional<MatrixSize>& configured);

// Where several sizes make this grid and nobody has given one: the size that divides the codes
// evenly, unless a power of two makes the same grid with a ragged edge (192 rows in two blocks may
// be 96 + 96 or 128 + 64). Nothing then.
std::optional<MatrixSize> likely_block(const std::vector<int64_t>& codes,
                                       const std::vector<int64_t>& scales);

}  // namespace modicum
