// Sets of indices, and parts of tensors over views of them: what inverse.cc and pull_back.cc walk
// with. Inner to the room.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "modicum/base/base.h"

namespace modicum::views {

struct Interval {
  int64_t lo, hi;
  auto operator<=>(const Interval&) const = default;
};

// Indices: sorted intervals, neither touching nor empty.
using Set = std::vector<Interval>;

// Adds [lo, hi), which lies behind all that is there. UNSUPPORTED where a set would have millions
// of intervals: a recipe that shuffles single elements of a large tensor.
void append(Set& set, int64_t lo, int64_t hi);
int64_t count_of(const Set& set);
bool is_whole(const Set& set, int64_t size);
// The positions that the elements of `some` have among those of `all`, a superset, counted from 0:
// {[3,5) [9,10)} has the positions {[1,3) [4,5)} in {[2,5) [8,10)}.
Set positions(const Set& some, const Set& all);
Set within(const Set& set, int64_t lo, int64_t hi);
Set shifted(Set set, int64_t by);
std::vector<int64_t> listed(const Set& set);

// A product of sets over a view of a tensor (any shape with the same row-major order), and the node
// of the new recipe that makes it: its shape is the counts of the sets.
struct ViewDim {
  int64_t size;
  Set set;
};
struct Part {
  uint32_t made = 0;
  std::vector<ViewDim> view;

  bool is_whole() const;
  std::vector<int64_t> shape() const;
  std::vector<int64_t> sizes() const;
};
Part whole_part(uint32_t made, const std::vector<int64_t>& shape);

int64_t product_of(std::span<const int64_t> sizes);

// The linear indices of the elements of a product over dims.
Set flattened(std::span<const ViewDim> dims);

// Some elements of a set of linear indices: a product over the dims that these indices run over,
// and the positions of its elements among those of the set.
struct Product {
  std::vector<Set> sets;
  Set positions;
};
// A set of linear indices as disjoint products over dims of `sizes`, as few as make each outer
// index that has the same inner indices part of one product.
std::vector<Product> as_products(const Set& set, std::span<const int64_t> sizes);

// A stretch of dims of one shape and a stretch of another with equal products. What a reshape does
// inside a group doesn't touch the rest:
//
//   from  [4, 6 | 5]
//   to    [8, 3 | 5]      two groups: 4 x 6 = 8 x 3, and 5
struct Group {
  size_t from_begin, from_end, to_begin, to_end;
};
// The groups of two shapes of equal numel, not zero, from the outermost on and each as short as
// can be.
void for_each_group(std::span<const int64_t> from, std::span<const int64_t> to,
                    FunctionRef<void(const Group&)> fn);

// One view for all parts of a tensor of `numel` elements: of the strides at which theirs divide it,
// those that divide each other.
std::vector<int64_t> common_view(const std::vector<Part>& parts, int64_t numel);

// The indices along `dim` that the same parts have, and these parts; in order of the first index.
// All parts have the same view. False where some index is in no part.
using Atom = std::pair<Set, std::vector<size_t>>;
bool find_atoms(const std::vector<Part>& parts, size_t dim, std::vector<Atom>& atoms);

}  // namespace modicum::views
