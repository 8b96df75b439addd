// Index sets, and parts of tensors as products of index sets over a view. Internal to `recipe`: for
// inverse.cc and pull_back.cc.
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

// A set of indices, as sorted, non-empty intervals with gaps between them.
using Set = std::vector<Interval>;

// Appends [lo, hi), which must not begin before the set's end. UNSUPPORTED beyond four million
// intervals, which only a recipe that shuffles single elements of a large tensor can reach.
void append(Set& set, int64_t lo, int64_t hi);
int64_t count_of(const Set& set);
bool is_whole(const Set& set, int64_t size);
// The position of each element of `some` within `all`, a superset of it, counted from 0:
//
//   all         2 3 4 . . . 8 9      {[2,5) [8,10)}
//   some          3 4 . . . . 9      {[3,5) [9,10)}
//   positions     1 2         4      {[1,3) [4,5)}
Set positions(const Set& some, const Set& all);
Set within(const Set& set, int64_t lo, int64_t hi);  // the intersection with [lo, hi)
Set shifted(Set set, int64_t by);
std::vector<int64_t> listed(const Set& set);  // every index

// A part of a tensor: the elements whose index along each dim of a view is in that dim's set. A
// view is any shape with the tensor's row-major order. `made` is the node of the inverse recipe
// that has these elements; its dims are the counts of the sets.
struct ViewDim {
  int64_t size;
  Set set;
};
struct Part {
  uint32_t made = 0;
  std::vector<ViewDim> view;

  bool is_whole() const;
  std::vector<int64_t> shape() const;  // of `made`: the count of each set
  std::vector<int64_t> sizes() const;  // of the view's dims
};
Part whole_part(uint32_t made, const std::vector<int64_t>& shape);

int64_t product_of(std::span<const int64_t> sizes);

// The linear indices of the elements of a product.
Set flattened(std::span<const ViewDim> dims);

// Some elements of a set of linear indices: a product of one set per dim, and the positions of the
// product's elements within the set.
struct Product {
  std::vector<Set> sets;
  Set positions;
};
// Splits a set of linear indices over dims of `sizes` into disjoint products. Outer indices with
// the same inner indices share a product.
std::vector<Product> as_products(const Set& set, std::span<const int64_t> sizes);

// Neighbouring dims of one shape, and neighbouring dims of another shape with the same product. A
// reshape moves indices only within such a group:
//
//   from  [4, 6 | 5]
//   to    [8, 3 | 5]      two groups: 4 x 6 = 8 x 3, and 5 = 5
struct Group {
  size_t from_begin, from_end, to_begin, to_end;
};
// Calls `fn` for each group of two shapes of equal numel > 0, from the outermost dims inward.
// Groups are as short as possible.
void for_each_group(std::span<const int64_t> from, std::span<const int64_t> to,
                    FunctionRef<void(const Group&)> fn);

// One view of a tensor of `numel` elements for all `parts`. Each stride of it is a stride of some
// part's view, and divides the next larger stride.
std::vector<int64_t> common_view(const std::vector<Part>& parts, int64_t numel);

// Partitions the indices along `dim` by the parts that hold them. An atom is a set of indices with
// the list of the parts that hold them; `atoms` are sorted by first index. All parts must have the
// same view. Returns false if some index is in no part.
using Atom = std::pair<Set, std::vector<size_t>>;
bool find_atoms(const std::vector<Part>& parts, size_t dim, std::vector<Atom>& atoms);

}  // namespace modicum::views
