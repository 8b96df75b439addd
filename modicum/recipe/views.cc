#include "modicum/recipe/views.h"

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
    fail(Category::unsupported, "a recipe shuffles too many single elements to be turned around");
  }
  set.push_back({lo, hi});
}

int64_t count_of(const Set& set) {
  return std::accumulate(set.begin(), set.end(), int64_t{0},
                         [](int64_t n, const Interval& i) { return n + i.hi - i.lo; });
}

bool is_whole(const Set& set, int64_t size) { return set == Set{{0, size}}; }

Set positions(const Set& some, const Set& all) {
  Set found;
  int64_t before = 0;
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

std::vector<Product> as_products(const Set& set, std::span<const int64_t> sizes) {
  if (sizes.empty()) return {{{}, {{0, 1}}}};
  if (sizes.size() == 1) return {{{set}, {{0, count_of(set)}}}};
  const auto inner_sizes = sizes.subspan(1);
  const int64_t inner = product_of(inner_sizes);
  struct Rows {
    Set rows;
    std::vector<int64_t> begins;  // of each row's elements among the set's
  };
  std::map<Set, Rows> alike;
  int64_t row = -1;
  int64_t before = 0;
  Set of_row;
  const auto close = [&] {
    if (of_row.empty()) return;
    Rows& rows = alike[of_row];
    append(rows.rows, row, row + 1);
    rows.begins.push_back(before);
    before += count_of(of_row);
    of_row.clear();
  };
  for (const Interval& interval : set) {
    for (int64_t lo = interval.lo; lo < interval.hi;) {
      if (lo / inner != row) close();
      row = lo / inner;
      const int64_t hi = std::min(interval.hi, (row + 1) * inner);
      append(of_row, lo - row * inner, hi - row * inner);
      lo = hi;
    }
  }
  close();
  std::vector<Product> products;
  for (const auto& [inner_set, rows] : alike) {
    for (Product& of_inner : as_products(inner_set, inner_sizes)) {
      Product product{{rows.rows}, {}};
      for (Set& s : of_inner.sets) product.sets.push_back(std::move(s));
      for (const int64_t begin : rows.begins) {
        for (const Interval& i : of_inner.positions) {
          append(product.positions, begin + i.lo, begin + i.hi);
        }
      }
      products.push_back(std::move(product));
    }
  }
  return products;
}

std::vector<Group> groups_of(const std::vector<int64_t>& from, const std::vector<int64_t>& to) {
  std::vector<Group> groups;
  size_t i = 0;
  size_t j = 0;
  while (i < from.size() || j < to.size()) {
    Group group{i, i, j, j};
    int64_t a = i < from.size() ? from[i++] : 1;
    int64_t b = j < to.size() ? to[j++] : 1;
    while (a != b) (a < b ? a : b) *= a < b ? from[i++] : to[j++];
    group.from_end = i;
    group.to_end = j;
    groups.push_back(group);
  }
  return groups;
}

std::vector<int64_t> common_view(const std::vector<Part>& parts, int64_t numel) {
  std::set<int64_t> inner_sizes;
  for (const Part& part : parts) {
    int64_t inner = 1;
    for (size_t d = part.view.size(); d-- > 1;) inner_sizes.insert(inner *= part.view[d].size);
  }
  std::vector<int64_t> view;
  int64_t last = 1;
  for (const int64_t inner : inner_sizes) {
    if (inner % last != 0 || inner == last || inner == numel) continue;
    view.insert(view.begin(), inner / last);
    last = inner;
  }
  view.insert(view.begin(), numel / last);
  return view;
}

bool find_atoms(const std::vector<Part>& parts, size_t dim, std::vector<Atom>& atoms) {
  std::map<int64_t, std::vector<std::pair<size_t, bool>>> edges;  // part, whether it begins here
  for (size_t p = 0; p < parts.size(); ++p) {
    for (const Interval& i : parts[p].view[dim].set) {
      edges[i.lo].emplace_back(p, true);
      edges[i.hi].emplace_back(p, false);
    }
  }
  std::map<std::vector<size_t>, Set> alike;
  std::set<size_t> open;
  int64_t from = 0;
  for (const auto& [index, of] : edges) {
    if (from < index && open.empty()) return false;
    if (from < index) append(alike[{open.begin(), open.end()}], from, index);
    for (const auto& [part, begins] : of) {
      if (begins) open.insert(part);
    }
    for (const auto& [part, begins] : of) {
      if (!begins) open.erase(part);
    }
    from = index;
  }
  if (from != parts[0].view[dim].size) return false;
  for (auto& [of, set] : alike) atoms.emplace_back(std::move(set), of);
  std::sort(atoms.begin(), atoms.end());
  return true;
}

}  // namespace modicum::views
