#include "modicum/recipe/views.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <set>

#include "modicum/base/base.h"

namespace modicum::views {
namespace {

constexpr size_t kMostIntervals = size_t{1} << 22;

}  // namespace

void append(Set& set, int64_t lo, int64_t hi) {
  if (lo == hi) return;
  if (!set.empty() && set.back().hi == lo) {
    set.back().hi = hi;
    return;
  }
  if (set.size() == kMostIntervals) {
    fail(Category::unsupported, "a recipe shuffles too many single elements to be inverted",
         {.expected = fmt::format("at most {} intervals of a tensor", kMostIntervals)});
  }
  set.push_back({lo, hi});
}

int64_t count_of(const Set& set) {
  return std::accumulate(set.begin(), set.end(), int64_t{0},
                         [](int64_t n, const Interval& i) { return n + i.hi - i.lo; });
}

bool is_whole(const Set& set, int64_t size) { return set == Set{{0, size}}; }

// Each interval of `some` lies within one interval of `all`, because intervals of `all` have gaps
// between them.
Set positions(const Set& some, const Set& all) {
  Set found;
  int64_t before = 0;  // elements of `all` in its intervals before k
  size_t k = 0;
  for (const Interval& i : some) {
    while (all[k].hi < i.hi) {
      before += all[k].hi - all[k].lo;
      ++k;
    }
    append(found, before + i.lo - all[k].lo, before + i.hi - all[k].lo);
  }
  return found;
}

Set within(const Set& set, int64_t lo, int64_t hi) {
  Set found;
  for (const Interval& i : set) {
    if (i.hi > lo && i.lo < hi) append(found, std::max(i.lo, lo), std::min(i.hi, hi));
  }
  return found;
}

Set shifted(Set set, int64_t by) {
  for (Interval& i : set) i = {i.lo + by, i.hi + by};
  return set;
}

std::vector<int64_t> listed(const Set& set) {
  std::vector<int64_t> list;
  for (const Interval& i : set) {
    for (int64_t k = i.lo; k < i.hi; ++k) list.push_back(k);
  }
  return list;
}

int64_t product_of(std::span<const int64_t> sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

// --- parts ---

bool Part::is_whole() const {
  return std::all_of(view.begin(), view.end(),
                     [](const ViewDim& d) { return views::is_whole(d.set, d.size); });
}

std::vector<int64_t> Part::shape() const {
  std::vector<int64_t> counts;
  for (const ViewDim& d : view) counts.push_back(count_of(d.set));
  return counts;
}

std::vector<int64_t> Part::sizes() const {
  std::vector<int64_t> all;
  for (const ViewDim& d : view) all.push_back(d.size);
  return all;
}

Part whole_part(uint32_t made, const std::vector<int64_t>& shape) {
  Part part{made, {}};
  for (const int64_t size : shape) part.view.push_back({size, {{0, size}}});
  return part;
}

// --- from one view to another ---

// Handles one dim at a time, outermost first: each index so far is replaced by a row of the next
// dim.
//
//   dims          size 3, set {[0,1) [2,3)}    size 4, set {[1,3)}
//   after dim 0   {[0,1) [2,3)}                rows 0 and 2 of a 3 x 4 matrix
//   after dim 1   {[1,3) [9,11)}               their columns 1 and 2
//
// If the set is the whole dim, each interval remains one interval, scaled by the dim's size.
Set flattened(std::span<const ViewDim> dims) {
  Set flat = {{0, 1}};
  for (const ViewDim& dim : dims) {
    Set next;
    if (is_whole(dim.set, dim.size)) {
      for (const Interval& i : flat) append(next, i.lo * dim.size, i.hi * dim.size);
    } else {
      for (const int64_t outer : listed(flat)) {
        for (const Interval& i : dim.set) {
          append(next, outer * dim.size + i.lo, outer * dim.size + i.hi);
        }
      }
    }
    flat = std::move(next);
  }
  return flat;
}

namespace {

// `set` has linear indices into a matrix of this width. For each row with elements of the set, in
// order, calls `fn` with the row and the columns of these elements.
void for_each_row(const Set& set, int64_t width,
                  FunctionRef<void(int64_t row, const Set& columns)> fn) {
  int64_t row = 0;
  Set columns;  // of `row`, so far
  for (const Interval& interval : set) {
    for (int64_t lo = interval.lo; lo < interval.hi;) {
      if (lo / width != row) {
        if (!columns.empty()) fn(row, columns);
        columns.clear();
        row = lo / width;
      }
      const int64_t hi = std::min(interval.hi, (row + 1) * width);
      append(columns, lo - row * width, hi - row * width);
      lo = hi;
    }
  }
  if (!columns.empty()) fn(row, columns);
}

// Rows with the same columns.
struct Rows {
  Set rows;
  std::vector<int64_t> begins;  // of each row: its first element's position within the set
};

// The product of `rows` and a product over their columns. Positions in `of_columns` count from the
// first element of a row.
Product times(const Rows& rows, const Product& of_columns) {
  Product product{{rows.rows}, {}};
  product.sets.insert(product.sets.end(), of_columns.sets.begin(), of_columns.sets.end());
  for (const int64_t begin : rows.begins) {
    for (const Interval& i : of_columns.positions) {
      append(product.positions, begin + i.lo, begin + i.hi);
    }
  }
  return product;
}

}  // namespace

// Treats the first dim as the rows of a matrix and the other dims as its columns, which recursion
// splits further. {[1,3) [4,8) [9,11)} over 3 x 4, each element shown as its position in the set:
//
//            column  0 1 2 3
//   row 0            . 0 1 .
//   row 1            2 3 4 5
//   row 2            . 6 7 .
//
// Rows 0 and 2 have the same columns, so there are two products:
//
//   rows {[0,1) [2,3)} x columns {[1,3)}    at positions {[0,2) [6,8)}
//   rows {[1,2)}       x columns {[0,4)}    at positions {[2,6)}
std::vector<Product> as_products(const Set& set, std::span<const int64_t> sizes) {
  if (sizes.empty()) return {{{}, {{0, 1}}}};
  if (sizes.size() == 1) return {{{set}, {{0, count_of(set)}}}};
  const auto inner_sizes = sizes.subspan(1);
  std::map<Set, Rows> by_columns;
  int64_t before = 0;
  for_each_row(set, product_of(inner_sizes), [&](int64_t row, const Set& columns) {
    Rows& alike = by_columns[columns];
    append(alike.rows, row, row + 1);
    alike.begins.push_back(before);
    before += count_of(columns);
  });
  std::vector<Product> products;
  for (const auto& [columns, rows] : by_columns) {
    for (const Product& of_columns : as_products(columns, inner_sizes)) {
      products.push_back(times(rows, of_columns));
    }
  }
  return products;
}

// A group begins with one dim of each shape. The side with the smaller product takes one more dim
// until the products are equal.
void for_each_group(std::span<const int64_t> from, std::span<const int64_t> to,
                    FunctionRef<void(const Group&)> fn) {
  size_t i = 0;
  size_t j = 0;
  while (i < from.size() || j < to.size()) {
    Group group{i, i, j, j};
    // Past its last dim, a shape continues with dims of size 1.
    int64_t of_from = i < from.size() ? from[i++] : 1;
    int64_t of_to = j < to.size() ? to[j++] : 1;
    while (of_from != of_to) {
      if (of_from < of_to) {
        MODICUM_ASSERT(i < from.size());
        of_from *= from[i++];
      } else {
        MODICUM_ASSERT(j < to.size());
        of_to *= to[j++];
      }
    }
    group.from_end = i;
    group.to_end = j;
    fn(group);
  }
}

// Keeps, in ascending order, every stride that is a multiple of the last one kept:
//
//   views of 24 elements     strides        kept: 6, 12        common view
//   [4, 6] [2, 12] [3, 8]    6, 12, 8       8 is no multiple   [2, 2, 6]
//                                           of 6
//
// A part over [3, 8] becomes several products over [2, 2, 6].
std::vector<int64_t> common_view(const std::vector<Part>& parts, int64_t numel) {
  std::set<int64_t> strides;
  for (const Part& part : parts) {
    int64_t stride = 1;
    for (size_t d = part.view.size(); d-- > 1;) {
      stride *= part.view[d].size;
      strides.insert(stride);
    }
  }
  std::vector<int64_t> view;  // from the innermost dim on
  int64_t kept = 1;
  for (const int64_t stride : strides) {
    if (stride % kept != 0 || stride == kept || stride == numel) continue;
    view.push_back(stride / kept);
    kept = stride;
  }
  view.push_back(numel / kept);
  std::reverse(view.begin(), view.end());
  return view;
}

// Visits the indices at which an interval of some part begins or ends (stops), in order.
//
//   index     0 1 2 3 4 5
//   part 0    x x . . x x
//   part 1    . . x x x x      atoms {[0,2)}: 0    {[2,4)}: 1    {[4,6)}: 0 and 1
//
// Intervals of one set have gaps between them, so at every stop a part either begins or ends, but
// not both.
bool find_atoms(const std::vector<Part>& parts, size_t dim, std::vector<Atom>& atoms) {
  std::map<int64_t, std::vector<size_t>> stops;  // the parts that begin or end at an index
  for (size_t p = 0; p < parts.size(); ++p) {
    for (const Interval& i : parts[p].view[dim].set) {
      stops[i.lo].push_back(p);
      stops[i.hi].push_back(p);
    }
  }
  std::map<std::vector<size_t>, Set> by_parts;
  std::set<size_t> here;  // the parts that have the indices between `from` and the next stop
  int64_t from = 0;
  for (const auto& [index, changing] : stops) {
    if (from < index && here.empty()) return false;
    if (from < index) append(by_parts[{here.begin(), here.end()}], from, index);
    for (const size_t part : changing) {
      if (here.erase(part) == 0) here.insert(part);
    }
    from = index;
  }
  if (from != parts[0].view[dim].size) return false;
  for (auto& [of, set] : by_parts) atoms.emplace_back(std::move(set), of);
  std::sort(atoms.begin(), atoms.end());
  return true;
}

}  // namespace modicum::views
