// Tests of the arrival of gradients. Catches: a norm that depends on the order or the pieces of
// arrival, or is computed too early or over the wrong elements; elements that arrive twice or never
// and cause no error.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "modicum/optim/arriving.h"
#include "modicum/optim/optim.h"
#include "modicum/optim/tiny_model_doubles.h"

namespace modicum {
namespace {

TEST(ArrivedRanges, AgreesWithASetOfIndices) {
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    ArrivedRanges arrived;
    std::vector<bool> there(60);
    for (int i = 0; i < 40; ++i) {
      const int64_t begin = random() % 60;
      const int64_t end = std::min<int64_t>(60, begin + 1 + random() % 9);
      const bool is_new = std::none_of(there.begin() + begin, there.begin() + end, std::identity());
      ASSERT_EQ(arrived.add(begin, end), is_new);
      if (is_new) std::fill(there.begin() + begin, there.begin() + end, true);
      ASSERT_EQ(arrived.count(), std::count(there.begin(), there.end(), true));
    }
  }
}

// The gradients of all shards, in pieces of random length and in random order.
std::vector<Piece> shuffled(const std::vector<std::vector<float>>& gradients, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<Piece> pieces;
  for (size_t shard = 0; shard < gradients.size(); ++shard) {
    const auto numel = static_cast<int64_t>(gradients[shard].size());
    for (int64_t at = 0; at < numel;) {
      const int64_t n = std::min<int64_t>(numel - at, 1 + random() % 50000);
      pieces.push_back({shard, at, n, reinterpret_cast<const std::byte*>(&gradients[shard][at])});
      at += n;
    }
  }
  std::shuffle(pieces.begin(), pieces.end(), random);
  return pieces;
}

std::vector<std::vector<float>> gradients_of(const AdamW& state, uint64_t step) {
  std::vector<std::vector<float>> gradients;
  for (size_t shard = 0; shard < state.shards(); ++shard) {
    gradients.push_back(tiny_values(state.shard(shard), step));
  }
  return gradients;
}

TEST(Arrival, IsBitEqualForAnyOrderPiecesAndThreads) {
  for (const StateFormat format : {StateFormat::fp32, StateFormat::int8_moments}) {
    Ledger ledger;
    AdamW whole(tiny_spec(format), ledger, 1);
    AdamW pieces(tiny_spec(format), ledger, 1);
    for (uint64_t step = 1; step <= 3; ++step) {
      deliver_tiny(whole, step);
      const auto gradients = gradients_of(pieces, step);
      const std::vector<Piece> order = shuffled(gradients, static_cast<uint32_t>(step));
      run_workers(3, [&](int worker) {
        for (size_t i = static_cast<size_t>(worker); i < order.size(); i += 3) {
          pieces.arrive(order[i]);
        }
      });
      const GradNorm norm = whole.norm();
      EXPECT_EQ(pieces.norm().sum_of_squares, norm.sum_of_squares) << format_name(format);
      GradNorm by_shard;
      for (const GradNorm& part : pieces.norms()) by_shard += part;
      EXPECT_NEAR(by_shard.sum_of_squares, norm.sum_of_squares, norm.sum_of_squares * 1e-12);
      const float clip = clip_factor(norm.norm(), 1.0);
      whole.step({.clip = clip});
      pieces.step({.clip = clip_factor(pieces.norm().norm(), 1.0)});
    }
    EXPECT_EQ(bytes_of_state(pieces), bytes_of_state(whole)) << format_name(format);
  }
}

TEST(Arrival, TheNormIsTheFp64Sum) {
  for (const int ranks : {1, 3}) {
    Ledger ledger;
    GradNorm sum;
    long double reference = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      AdamWSpec spec = tiny_spec(StateFormat::fp32, rank, ranks);
      spec.shards.push_back({.fqn = "columns", .runs = {{70, 60000}, {65536, 9}, {200000, 300}}});
      AdamW state(std::move(spec), ledger, 1);
      deliver_tiny(state, 1);
      sum += state.norm();
      for (const auto& gradient : gradients_of(state, 1)) {
        for (const float g : gradient) reference += static_cast<long double>(g) * g;
      }
    }
    EXPECT_NEAR(sum.sum_of_squares / static_cast<double>(reference), 1, 1e-12);
  }
}

TEST(Arrival, ANonFiniteGradientIsFlaggedAtAnyPlace) {
  Ledger ledger;
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    for (const int64_t at : {int64_t{0}, kBucketElements, kTinyModel[0].numel - 1}) {
      AdamW state(tiny_spec(StateFormat::fp32), ledger, 1);
      auto gradients = gradients_of(state, 1);
      gradients[0][static_cast<size_t>(at)] = bad;
      for (size_t shard = 0; shard < state.shards(); ++shard) {
        state.arrive(piece_of(shard, 0, gradients[shard]));
      }
      EXPECT_FALSE(state.norm().finite);
      EXPECT_EQ(state.norm().sum_of_squares, 0);
      const auto met = error_of([&] { state.step(); });
      ASSERT_TRUE(met);
      EXPECT_EQ(met->category(), Category::usage);
      EXPECT_EQ(met->facts().tensor, "embed.weight");
    }
  }
}

TEST(Arrival, EveryDTypeIsRoundedToThePlanesDType) {
  const std::vector<float> values = {1.0F, -0.33333334F, 65504.0F, 1e-3F, 3.1415927F};
  for (const StateFormat format : {StateFormat::fp32, StateFormat::fp32_split}) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      std::vector<std::byte> arriving(values.size() * 4);
      std::vector<float> expected(values.size());
      const auto n = static_cast<int64_t>(values.size());
      const auto* const from = reinterpret_cast<const std::byte*>(values.data());
      auto* const to = reinterpret_cast<std::byte*>(expected.data());
      cast(from, DType::f32, arriving.data(), dtype, n);
      cast(arriving.data(), dtype, to, DType::f32, n);
      std::vector<std::byte> in_plane(values.size() * 4);
      cast(to, DType::f32, in_plane.data(), row_of(format).grad, n);
      Ledger ledger;
      AdamW state({.format = format, .shards = {{.fqn = "w", .runs = {{3, n}}}}}, ledger, 1);
      state.arrive({0, 0, n, arriving.data(), dtype});
      const std::span<std::byte> plane = state.plane(0, Plane::grad);
      EXPECT_TRUE(std::equal(plane.begin(), plane.end(), in_plane.begin()));
    }
  }
}

// ---- duplicate and missing elements

// Expects a MISMATCH error about parameter `fqn`.
void expect_about(const std::optional<Error>& met, const std::string& fqn) {
  ASSERT_TRUE(met);
  EXPECT_EQ(met->category(), Category::mismatch) << met->what();
  EXPECT_EQ(met->facts().tensor, fqn);
}

TEST(Arrival, ErrorsNameTheParameter) {
  Ledger ledger;
  AdamW state(tiny_spec(StateFormat::fp32), ledger, 1);
  const auto gradients = gradients_of(state, 1);
  const std::vector<float> gradient = {1.0F};
  expect_about(error_of([&] { state.norm(); }), "embed.weight");
  state.arrive(piece_of(0, 0, gradients[0]));
  expect_about(error_of([&] { state.arrive(piece_of(0, 12345, gradient)); }), "embed.weight");
  state.arrive(piece_of(1, 50, {1, 2, 3}));
  expect_about(error_of([&] { state.arrive(piece_of(1, 48, {1, 2, 3})); }), "norm.weight");
  expect_about(error_of([&] { state.arrive(piece_of(1, 100, gradient)); }), "norm.weight");
  expect_about(error_of([&] { state.arrive(piece_of(1, -1, gradient)); }), "norm.weight");
  expect_about(error_of([&] { state.step(); }), "norm.weight");
  state.arrive(piece_of(1, 0, std::vector<float>(50, 1.0F)));
  state.arrive(piece_of(1, 53, std::vector<float>(47, 1.0F)));
  expect_about(error_of([&] { state.step(); }), "head.weight");
  state.arrive(piece_of(2, 0, gradients[2]));
  EXPECT_NO_THROW(state.step());
  expect_about(error_of([&] { state.step(); }), "embed.weight");
}

TEST(Arrival, AShardOrAGroupThatIsMissingIsAUsageError) {
  Ledger ledger;
  AdamW state(tiny_spec(StateFormat::fp32), ledger, 1);
  std::vector<float> values(1);
  const size_t outside = state.shards();
  const std::vector<std::function<void()>> calls = {
      [&] { state.shard(outside); },
      [&] { state.arrive(piece_of(outside, 0, values)); },
      [&] { state.arrived_in_place(outside, 0, 1); },
      [&] { state.leave_out(outside); },
      [&] { state.steps(outside); },
      [&] { state.set_steps(outside, 1); },
      [&] { state.plane(outside, Plane::grad); },
      [&] { state.scales(outside, Plane::exp_avg); },
      [&] { state.export_to(outside, StatePlane::master, 0, values); },
      [&] { state.import_from(outside, StatePlane::master, 0, values); },
      [&] { state.options(9); },
      [&] { state.set_options(-1, {}); },
  };
  for (size_t call = 0; call < calls.size(); ++call) {
    const auto met = error_of(calls[call]);
    ASSERT_TRUE(met) << call;
    EXPECT_EQ(met->category(), Category::usage) << call << met->what();
    EXPECT_NE(std::string(met->what()).find("is out of range (expected < "), std::string::npos);
  }
}

// ---- arrival in place, and parameters without a gradient

TEST(Arrival, InPlaceIsTheSameAsThroughACopy) {
  Ledger ledger;
  AdamW copied(tiny_spec(StateFormat::fp32), ledger, 1);
  AdamW in_place(tiny_spec(StateFormat::fp32), ledger, 1);
  deliver_tiny(copied, 1);
  for (size_t shard = 0; shard < in_place.shards(); ++shard) {
    const std::vector<float> gradient = tiny_values(in_place.shard(shard), 1);
    const std::span<std::byte> plane = in_place.plane(shard, Plane::grad);
    std::memcpy(plane.data(), gradient.data(), plane.size());
    in_place.arrived_in_place(shard, 0, static_cast<int64_t>(gradient.size()));
  }
  EXPECT_EQ(in_place.norm().sum_of_squares, copied.norm().sum_of_squares);
  copied.step();
  in_place.step();
  EXPECT_EQ(in_place.digest(), copied.digest());
}

TEST(Arrival, ALeftOutParameterIsUnchanged) {
  Ledger ledger;
  AdamW state(tiny_spec(StateFormat::fp32), ledger, 1);
  import_tiny_masters(state);
  deliver_tiny(state, 1);
  state.step();
  std::vector<float> before(100), after(100);
  state.export_to(1, StatePlane::master, 0, before);
  const auto gradients = gradients_of(state, 2);
  state.leave_out(1);
  expect_about(error_of([&] { state.arrive(piece_of(1, 0, gradients[1])); }), "norm.weight");
  state.arrive(piece_of(0, 0, gradients[0]));
  state.arrive(piece_of(2, 0, gradients[2]));
  expect_about(error_of([&] { state.leave_out(2); }), "head.weight");
  double reference = 0;
  for (const size_t shard : {0, 2}) {
    for (const float g : gradients[shard]) reference += static_cast<double>(g) * g;
  }
  EXPECT_NEAR(state.norm().sum_of_squares / reference, 1, 1e-12);
  state.step();
  state.export_to(1, StatePlane::master, 0, after);
  EXPECT_EQ(after, before);
  EXPECT_EQ(state.steps(1), 1);
  EXPECT_EQ(state.steps(0), 2);
}

}  // namespace
}  // namespace modicum
