#include "modicum/spec/scale_grid.h"

#include <algorithm>

#include "modicum/base/base.h"

namespace modicum {
namespace {

// The last two dims; a vector is one row, and a tensor without dims one element.
MatrixSize matrix_of(const std::vector<int64_t>& shape) noexcept {
  const size_t rank = shape.size();
  return {rank < 2 ? 1 : shape[rank - 2], rank < 1 ? 1 : shape[rank - 1]};
}

bool have_equal_outer_dims(const std::vector<int64_t>& a, const std::vector<int64_t>& b) noexcept {
  if (a.size() != b.size()) return false;
  return a.size() < 3 || std::equal(a.begin(), a.end() - 2, b.begin());
}

// One dim of a grid whose last block may be ragged. Not ceil_div: both sizes are a file's.
bool covers(int64_t size, int64_t block, int64_t count) noexcept {
  return size / block + (size % block != 0 ? 1 : 0) == count;
}

bool divides(int64_t size, int64_t count) noexcept {
  return size == 0 ? count == 0 : count > 0 && size % count == 0;
}

}  // namespace

ScaleGrid scale_grid(const Manifest& manifest, const Stored& codes) {
  MODICUM_ASSERT(codes.scale.has_value());
  MODICUM_ASSERT(codes.scale->fits());
  const std::vector<int64_t>& scales = manifest.tensors[codes.scale->tensor].spec.shape;
  ScaleGrid grid{matrix_of(codes.spec.shape), codes.scale->block, matrix_of(scales)};
  if (numel_of(scales) == 1) {
    const int64_t all = numel_of(codes.spec.shape);
    grid.codes[0] = grid.block[0] = std::max<int64_t>(1, all / std::max<int64_t>(1, grid.codes[1]));
  }
  return grid;
}

std::optional<MatrixSize> block_of(const std::vector<int64_t>& codes,
                                   const std::vector<int64_t>& scales,
                                   const std::optional<MatrixSize>& configured) {
  const MatrixSize size = matrix_of(codes);
  const auto at_least_one = [](int64_t n) { return std::max<int64_t>(1, n); };
  if (numel_of(scales) == 1) return MatrixSize{at_least_one(size[0]), at_least_one(size[1])};
  if (!have_equal_outer_dims(codes, scales)) return std::nullopt;
  const MatrixSize count = matrix_of(scales);
  if (configured && covers(size[0], (*configured)[0], count[0]) &&
      covers(size[1], (*configured)[1], count[1])) {
    return configured;
  }
  if (!divides(size[0], count[0]) || !divides(size[1], count[1])) return std::nullopt;
  return MatrixSize{at_least_one(size[0] / at_least_one(count[0])),
                    at_least_one(size[1] / at_least_one(count[1]))};
}

}  // namespace modicum
