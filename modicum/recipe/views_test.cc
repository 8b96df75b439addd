// The examples in the comments of views.h and views.cc, and edge cases.
#include "modicum/recipe/views.h"

#include <gtest/gtest.h>

namespace modicum::views {
namespace {

using Dims = std::vector<int64_t>;

TEST(Views, PositionsCountFromTheSupersetsFirstElement) {
  EXPECT_EQ(positions({{3, 5}, {9, 10}}, {{2, 5}, {8, 10}}), (Set{{1, 3}, {4, 5}}));
  EXPECT_EQ(positions({}, {{2, 5}}), Set{});
}

TEST(Views, FlattenedSetsAreLinear) {
  const std::vector<ViewDim> dims = {{3, {{0, 1}, {2, 3}}}, {4, {{1, 3}}}};
  EXPECT_EQ(flattened(dims), (Set{{1, 3}, {9, 11}}));
  EXPECT_EQ(flattened({}), (Set{{0, 1}}));
}

TEST(Views, RowsWithTheSameColumnsAreOneProduct) {
  const Dims sizes = {3, 4};
  const std::vector<Product> products = as_products({{1, 3}, {4, 8}, {9, 11}}, sizes);
  ASSERT_EQ(products.size(), 2U);
  EXPECT_EQ(products[0].sets, (std::vector<Set>{{{1, 2}}, {{0, 4}}}));
  EXPECT_EQ(products[0].positions, (Set{{2, 6}}));
  EXPECT_EQ(products[1].sets, (std::vector<Set>{{{0, 1}, {2, 3}}, {{1, 3}}}));
  EXPECT_EQ(products[1].positions, (Set{{0, 2}, {6, 8}}));
}

TEST(Views, GroupsAreAsShortAsPossible) {
  const auto groups_of = [](const Dims& from, const Dims& to) {
    std::vector<std::vector<size_t>> groups;
    for_each_group(from, to, [&](const Group& g) {
      groups.push_back({g.from_begin, g.from_end, g.to_begin, g.to_end});
    });
    return groups;
  };
  using Groups = std::vector<std::vector<size_t>>;
  EXPECT_EQ(groups_of({4, 6, 5}, {8, 3, 5}), (Groups{{0, 2, 0, 2}, {2, 3, 2, 3}}));
  EXPECT_EQ(groups_of({6}, {2, 3, 1}), (Groups{{0, 1, 0, 2}, {1, 1, 2, 3}}));
  EXPECT_EQ(groups_of({}, {}), Groups{});
  EXPECT_THROW(groups_of({4}, {3}), Error);
}

TEST(Views, TheCommonViewKeepsStridesThatDivideEachOther) {
  const std::vector<Part> parts = {whole_part(0, {4, 6}), whole_part(1, {2, 12}),
                                   whole_part(2, {3, 8})};
  EXPECT_EQ(common_view(parts, 24), (Dims{2, 2, 6}));
  EXPECT_EQ(common_view({whole_part(0, {24})}, 24), Dims{24});
}

TEST(Views, AtomsAreIndicesHeldByTheSameParts) {
  std::vector<Part> parts = {{0, {{6, {{0, 2}, {4, 6}}}}}, {1, {{6, {{2, 6}}}}}};
  std::vector<Atom> atoms;
  ASSERT_TRUE(find_atoms(parts, 0, atoms));
  EXPECT_EQ(atoms, (std::vector<Atom>{{{{0, 2}}, {0}}, {{{2, 4}}, {1}}, {{{4, 6}}, {0, 1}}}));
  for (const Set& gap : {Set{{3, 6}}, Set{{2, 3}, {4, 6}}, Set{{2, 4}}}) {
    parts[0].view[0].set = {{0, 2}};
    parts[1].view[0].set = gap;
    EXPECT_FALSE(find_atoms(parts, 0, atoms));
  }
}

}  // namespace
}  // namespace modicum::views
