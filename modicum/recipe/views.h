// Sets of indices, and parts of tensors over views of them: what inverse.cc walks with. Inner to
// the room.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

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
// Where the elements of `some` stand among those of `all`, which has them.
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

// The linear set of a product over dims.
Set flattened(std::span<const ViewDim> dims);

// Part of a set over the linear indices of some dims: a product over these dims, and where its
// elements stand among the set's.
struct Product {
  std::vector<Set> sets;
  Set positions;
};
// A linear set as disjoint products over dims of `sizes`: outer indices that have the same inner
// set go together.
std::vector<Product> as_products(const Set& set, std::span<const int64_t> sizes);

// Stretches of dims of two shapes with equal products, in order.
struct Group {
  size_t from_begin, from_end, to_begin, to_end;
};
std::vector<Group> groups_of(const std::vector<int64_t>& from, const std::vector<int64_t>& to);

// The view that all parts can be laid over: of the places where theirs are divided, those that
// divide each other.
std::vector<int64_t> common_view(const std::vector<Part>& parts, int64_t numel);

// Indices along `dim` that the same parts have, and these parts, in order of the first index; false
// where some index is in no part.
using Atom = std::pair<Set, std::vector<size_t>>;
bool find_atoms(const std::vector<Part>& parts, size_t dim, std::vector<Atom>& atoms);

}  // namespace modicum::views
