// Maps FP8 codes to their scales.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "modicum/spec/tensor.h"

namespace modicum {

// The rows and columns of a matrix.
using MatrixSize = std::array<int64_t, 2>;

// Views a tensor of codes as matrices over its last two dims, stacked one below the other, and its
// scales likewise. If a tensor has a single scale, all its matrices are one block.
//
//   codes [200, 300], block [128, 128]       scales [2, 3]
//        128    128   44
//      +------+------+--+                    | 0 | 1 | 2 |
//  128 |      |      |  |                    | 3 | 4 | 5 |
//      +------+------+--+
//   72 |      |      |  |
//      +------+------+--+
struct ScaleGrid {
  MatrixSize codes{1, 1};   // size of one matrix of codes
  MatrixSize block{1, 1};   // codes that share a scale; the last block of a dim may be smaller
  MatrixSize scales{1, 1};  // size of one matrix of scales

  // For element `element` of the codes: row_of returns its row of scales, counted through all
  // matrices; index_of returns the element of the scale tensor that scales it.
  int64_t row_of(int64_t element) const noexcept {
    const int64_t row = element / codes[1];
    return row / codes[0] * scales[0] + row % codes[0] / block[0];
  }
  int64_t index_of(int64_t element) const noexcept {
    return row_of(element) * scales[1] + element % codes[1] / block[1];
  }
};

// The grid of codes whose scale fits (BlockScale::fits).
ScaleGrid scale_grid(const Manifest& manifest, const StoredTensor& codes);

// The block size with which scales of shape `scales` cover codes of shape `codes`, if it is
// certain:
//   - the whole matrix, for a single scale;
//   - `configured`, if it gives exactly this grid (the last blocks may be smaller);
//   - the only size that gives this grid. Sizes that give the same blocks count as one.
// Empty if no size gives the grid, or several do.
std::optional<MatrixSize> block_of(const std::vector<int64_t>& codes,
                                   const std::vector<int64_t>& scales,
                                   const std::optional<MatrixSize>& configured);

// The likely block size if several sizes give this grid and none is configured: the one that
// divides the codes evenly. Empty if a power of two gives the same grid with a smaller last block:
// 192 rows in two blocks may be 96 + 96 or 128 + 64.
std::optional<MatrixSize> likely_block(const std::vector<int64_t>& codes,
                                       const std::vector<int64_t>& scales);

}  // namespace modicum
