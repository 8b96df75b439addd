#include "modicum/spec/scale_grid.h"

#include <algorithm>
#include <bit>

#include "modicum/base/base.h"

namespace modicum {
namespace {

// The last two dims; a vector is one row, a 0-d tensor one element.
MatrixSize matrix_of(const std::vector<int64_t>& shape) noexcept {
  const size_t rank = shape.size();
  return {rank < 2 ? 1 : shape[rank - 2], rank < 1 ? 1 : shape[rank - 1]};
}

bool have_equal_outer_dims(const std::vector<int64_t>& a, const std::vector<int64_t>& b) noexcept {
  if (a.size() != b.size()) return false;
  return a.size() < 3 || std::equal(a.begin(), a.end() - 2, b.begin());
}

// The block sizes with which `count` scales cover one dim; empty if there is none.
struct BlockSizes {
  int64_t least = 1, most = 0;
  bool is_one() const noexcept { return least == most; }
};

BlockSizes block_sizes(int64_t size, int64_t count) noexcept {
  if (size == 0) return {1, count == 0 ? 1 : 0};
  if (count == 1) return {size, size};  // larger blocks divide the dim in the same way
  if (count < 1 || count > size) return {};
  return {ceil_div(size, count), ceil_div(size, count - 1) - 1};
}

// block_of for one dim, without a configured size.
std::optional<int64_t> certain_size(int64_t size, int64_t count) noexcept {
  const BlockSizes sizes = block_sizes(size, count);
  return sizes.is_one() ? std::optional(sizes.least) : std::nullopt;
}

// likely_block for one dim.
std::optional<int64_t> likely_size(int64_t size, int64_t count) noexcept {
  const BlockSizes sizes = block_sizes(size, count);
  if (sizes.is_one()) return sizes.least;
  if (sizes.least > sizes.most || size % count != 0) return std::nullopt;
  const uint64_t power = std::bit_ceil(static_cast<uint64_t>(sizes.least));
  const bool is_rivalled =
      power != static_cast<uint64_t>(sizes.least) && power <= static_cast<uint64_t>(sizes.most);
  return is_rivalled ? std::nullopt : std::optional(sizes.least);
}

std::optional<MatrixSize> both(const std::optional<int64_t>& rows,
                               const std::optional<int64_t>& columns) noexcept {
  if (!rows || !columns) return std::nullopt;
  return MatrixSize{*rows, *columns};
}

}  // namespace

ScaleGrid scale_grid(const Manifest& manifest, const StoredTensor& codes) {
  MODICUM_ASSERT(codes.scale.has_value());
  MODICUM_ASSERT(codes.scale->fits());
  const std::vector<int64_t>& scales = manifest.tensors[codes.scale->tensor].spec.shape;
  ScaleGrid grid{matrix_of(codes.spec.shape), codes.scale->block, matrix_of(scales)};
  if (numel_of(scales) == 1) {  // all matrices, one below the other, are one block
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
  // The last block of a dim may be smaller.
  if (configured && ceil_div(size[0], (*configured)[0]) == count[0] &&
      ceil_div(size[1], (*configured)[1]) == count[1]) {
    return configured;
  }
  return both(certain_size(size[0], count[0]), certain_size(size[1], count[1]));
}

std::optional<MatrixSize> likely_block(const std::vector<int64_t>& codes,
                                       const std::vector<int64_t>& scales) {
  if (!have_equal_outer_dims(codes, scales)) return std::nullopt;
  const MatrixSize size = matrix_of(codes);
  const MatrixSize count = matrix_of(scales);
  return both(likely_size(size[0], count[0]), likely_size(size[1], count[1]));
}

}  // namespace modicum
