#include "modicum/stream/coverage.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <vector>

namespace modicum {
namespace {

using Places = std::vector<Runs>;

// A plan for one rank with one target of `numel` elements, and so with one local buffer.
class OneBuffer {
 public:
  explicit OneBuffer(int64_t numel) {
    manifest_.files.push_back({"model.safetensors"});
    const auto bytes = static_cast<uint64_t>(numel);
    manifest_.tensors.push_back({{"weight", Role::param, DType::u8, {numel}}, {0, 8, 8 + bytes}});
    recipe_ = identity_recipe(manifest_);
    plan_ =
        make_plan(manifest_, recipe_, fsdp2_layout(1), {.strategy = &strategy_named("own-shard")});
  }
  OneBuffer(const OneBuffer&) = delete;
  OneBuffer& operator=(const OneBuffer&) = delete;

  // The error of Coverage::prove after these transfers; empty if it succeeds.
  std::optional<Error> failure_of(const Places& places,
                                  uint64_t point = Coverage::random_point()) const {
    Coverage coverage(plan_, 0, point);
    for (const Runs& runs : places) {
      Transfer done;
      done.runs = runs;
      coverage.tick(done);
    }
    try {
      coverage.prove();
    } catch (const Error& error) {
      return error;
    }
    return std::nullopt;
  }
  bool proves(const Places& places) const { return !failure_of(places).has_value(); }

 private:
  Manifest manifest_;
  Recipe recipe_;
  Plan plan_;
};

// Contiguous transfers of pseudo-random lengths, 1 to 9 elements.
Places stretches(int64_t numel) {
  Places places;
  uint64_t state = 7;
  for (int64_t at = 0; at < numel;) {
    state = state * 6364136223846793005ULL + 1;
    const int64_t run = std::min<int64_t>(numel - at, 1 + static_cast<int64_t>(state >> 60) % 9);
    places.push_back({.length = run, .at = at});
    at += run;
  }
  return places;
}

// The transfers of a `rows` x `columns` matrix. The first writes the upper half column by column,
// as for a transpose. The second writes the next row, the third the other rows.
Places turned(int64_t rows, int64_t columns) {
  const int64_t half = rows / 2;
  return {{.count = columns, .length = half, .at = 0, .at_stride = 1, .at_step = columns},
          {.count = 1, .length = columns, .at = half * columns},
          {.count = rows - half - 1,
           .length = columns,
           .at = (half + 1) * columns,
           .at_stride = columns}};
}

std::vector<std::pair<int64_t, Places>> tilings() {
  return {{1, {{.length = 1}}}, {100, {{.length = 100}}},  {300, stretches(300)},
          {97, stretches(97)},  {12 * 10, turned(12, 10)}, {31 * 7, turned(31, 7)}};
}

TEST(Coverage, ATilingIsProvenInAnyOrder) {
  for (auto [numel, places] : tilings()) {
    const OneBuffer buffer(numel);
    EXPECT_TRUE(buffer.proves(places));
    std::reverse(places.begin(), places.end());
    EXPECT_TRUE(buffer.proves(places));
  }
  EXPECT_TRUE(OneBuffer(0).proves({}));
}

// Catches: a proof that always succeeds; a transfer that is omitted, repeated, shifted or of the
// wrong length.
TEST(Coverage, EachMutationOfATilingIsDetected) {
  for (const auto& [numel, tiling] : tilings()) {
    const OneBuffer buffer(numel);
    for (size_t i = 0; i < tiling.size(); ++i) {
      SCOPED_TRACE(testing::Message() << "transfer " << i << " of " << numel << " elements");
      const auto with = [&, t = tiling](const std::function<void(Runs&)>& change) {
        Places places = t;
        change(places[i]);
        return places;
      };
      Places less = tiling;
      less.erase(less.begin() + static_cast<ptrdiff_t>(i));
      EXPECT_FALSE(buffer.proves(less)) << "dropped";
      Places more = tiling;
      more.push_back(tiling[i]);
      EXPECT_FALSE(buffer.proves(more)) << "doubled";
      EXPECT_FALSE(buffer.proves(with([](Runs& r) { ++r.at; }))) << "shifted by one";
      EXPECT_FALSE(buffer.proves(with([](Runs& r) { --r.at; }))) << "shifted back by one";
      EXPECT_FALSE(buffer.proves(with([](Runs& r) { ++r.length; }))) << "one longer";
      EXPECT_FALSE(buffer.proves(with([](Runs& r) { --r.length; }))) << "one shorter";
      if (tiling[i].count > 1) {
        EXPECT_FALSE(buffer.proves(with([](Runs& r) { ++r.at_stride; }))) << "stride";
        EXPECT_FALSE(buffer.proves(with([](Runs& r) { --r.at_stride; }))) << "stride";
        EXPECT_FALSE(buffer.proves(with([](Runs& r) { --r.count; }))) << "one run less";
      }
      if (tiling[i].length > 1) {
        EXPECT_FALSE(buffer.proves(with([](Runs& r) { ++r.at_step; }))) << "step";
      }
    }
  }
}

TEST(Coverage, SwappedLengthsAndPlacesAreDetected) {
  const Places tiling = stretches(200);
  const OneBuffer buffer(200);
  for (size_t i = 0; i < tiling.size(); ++i) {
    for (size_t j = i + 1; j < tiling.size(); ++j) {
      if (tiling[i].length == tiling[j].length) continue;
      Places lengths = tiling;
      std::swap(lengths[i].length, lengths[j].length);
      EXPECT_FALSE(buffer.proves(lengths));
      Places places = tiling;
      std::swap(places[i].at, places[j].at);
      EXPECT_FALSE(buffer.proves(places));
    }
  }
}

// Lists of wrong places whose count and sum are right. In the second and the third list the sum of
// squares is also right, and in the third list the sum of cubes. A proof by such sums would accept
// them.
TEST(Coverage, WrongPlacesWithEqualPowerSumsAreDetected) {
  const auto singles = [](std::vector<int64_t> indices) {
    Places places;
    for (const int64_t at : indices) places.push_back({.length = 1, .at = at});
    return places;
  };
  EXPECT_FALSE(OneBuffer(4).proves(singles({1, 1, 2, 2})));
  EXPECT_FALSE(OneBuffer(7).proves(singles({0, 0, 3, 4, 4, 5, 5})));
  EXPECT_FALSE(
      OneBuffer(16).proves(singles({0, 0, 3, 3, 5, 5, 6, 6, 9, 9, 10, 10, 12, 12, 15, 15})));
}

// With p = Powers::kPrime, x^(p - 1) = 1 = x^0. So place p - 1, which is outside the buffer, adds
// to the fingerprint what place 0 adds.
TEST(Coverage, PlacesOutsideOfTheBufferAreDetected) {
  const auto far = static_cast<int64_t>(Powers::kPrime - 1);
  EXPECT_FALSE(OneBuffer(2).proves({{.length = 1, .at = far}, {.length = 1, .at = 1}}));
  const auto failure = OneBuffer(2).failure_of({{.length = 2, .at = 1}, {.length = 1, .at = 0}});
  ASSERT_TRUE(failure.has_value());
  EXPECT_STREQ(failure->what_happened().c_str(), "a transfer was written outside its local buffer");
  EXPECT_EQ(failure->facts().expected, "elements [0, 2)");
  EXPECT_EQ(failure->facts().got, "an element outside");
  EXPECT_FALSE(
      OneBuffer(4).proves({{.count = 2, .length = 2, .at = 1, .at_stride = 2, .at_step = -1},
                           {.length = 1, .at = -1}}));
}

// A dim that is written backwards.
TEST(Coverage, NegativeStridesAreCounted) {
  EXPECT_TRUE(OneBuffer(6).proves({{.length = 6, .at = 5, .at_step = -1}}));
  EXPECT_TRUE(OneBuffer(6).proves({{.count = 3, .length = 2, .at = 4, .at_stride = -2}}));
  EXPECT_FALSE(OneBuffer(6).proves({{.count = 3, .length = 2, .at = 4, .at_stride = -1}}));
}

TEST(Coverage, TheFailureNamesTheTensorAndTheCounts) {
  const auto failure = OneBuffer(10).failure_of({{.length = 9}});
  ASSERT_TRUE(failure.has_value());
  EXPECT_EQ(failure->category(), Category::integrity);
  EXPECT_EQ(failure->facts().tensor, "weight");
  EXPECT_EQ(failure->facts().rank, 0);
  EXPECT_EQ(failure->facts().expected, "10 elements");
  EXPECT_EQ(failure->facts().got, "9 elements");
  // As many writes as elements: place 8 twice, place 9 never.
  const auto repeated = OneBuffer(10).failure_of({{.length = 9}, {.length = 1, .at = 8}});
  ASSERT_TRUE(repeated.has_value());
  EXPECT_EQ(repeated->facts().got, "10 elements, some of them more than once");
}

// The closed forms agree with adding one element at a time.
TEST(Coverage, ClosedFormsEqualElementwiseSums) {
  for (int64_t numel = 0; numel <= 200; ++numel) {
    Places singles;
    for (int64_t i = 0; i < numel; ++i) singles.push_back({.length = 1, .at = i});
    const OneBuffer buffer(numel);
    EXPECT_TRUE(buffer.proves(singles));
    EXPECT_TRUE(buffer.proves({{.length = numel}}));
    EXPECT_TRUE(buffer.proves({{.count = numel, .length = 1, .at_stride = 1}}));
  }
}

// Buffers up to the limit of 1 EiB. At 2^60 places the error bound of n / 2^61 is large, and some
// lengths divide p - 1, so some random points accept the wrong transfers. The point 37 generates
// the field's multiplicative group: none of its powers below the (p - 1)th is 1.
TEST(Coverage, WideBuffersDoNotOverflow) {
  for (const int64_t numel :
       {(int64_t{1} << 32) - 1, int64_t{1} << 32, (int64_t{1} << 33) + 1, int64_t{6'000'000'007},
        (int64_t{1} << 53) + 2, (int64_t{1} << 60) - 1, int64_t{1} << 60}) {
    const OneBuffer buffer(numel);
    const auto proves = [&](const Places& places) {
      return !buffer.failure_of(places, 37).has_value();
    };
    const int64_t third = numel / 3;
    const int64_t rest = numel - third;
    EXPECT_TRUE(proves({{.length = third}, {.length = rest, .at = third}})) << numel;
    EXPECT_TRUE(proves({{.count = (numel + 1) / 2, .length = 1, .at = 0, .at_stride = 2},
                        {.count = numel / 2, .length = 1, .at = 1, .at_stride = 2}}))
        << numel;
    EXPECT_TRUE(proves({{.count = 1000, .length = third / 1000, .at_stride = third / 1000},
                        {.length = numel - third / 1000 * 1000, .at = third / 1000 * 1000}}))
        << numel;
    EXPECT_FALSE(proves({{.length = third}, {.length = rest, .at = third + 1}})) << numel;
    EXPECT_FALSE(proves({{.length = third + 1}, {.length = rest, .at = third}})) << numel;
    EXPECT_FALSE(proves({{.length = rest}, {.length = third, .at = third}})) << numel;
  }
}

}  // namespace
}  // namespace modicum
