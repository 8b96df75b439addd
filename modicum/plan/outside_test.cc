// Catches: a rank or an index outside the plan that reads memory outside a list.
#include <gtest/gtest.h>

#include <functional>

#include "modicum/base/error_double.h"
#include "modicum/plan/plan.h"

namespace modicum {
namespace {

class OutsideThePlan : public testing::Test {
 protected:
  OutsideThePlan() {
    for (uint32_t t = 0; t < 3; ++t) {
      const TensorSpec spec{std::to_string(t), Role::param, DType::f32, {4, 2}};
      manifest_.tensors.push_back({spec, {0, t * 32, t * 32 + 32}});
    }
    recipe_ = identity_recipe(manifest_);
    plan_ =
        make_plan(manifest_, recipe_, fsdp2_layout(2), {.strategy = &strategy_named("own-shard")});
  }

  Manifest manifest_{.files = {{"model.safetensors"}}};
  Recipe recipe_;
  Plan plan_;
};

TEST_F(OutsideThePlan, AnIndexIsAUsageError) {
  const auto target = [](uint32_t, const Box&) {};
  const auto transfer = [](const Transfer&) {};
  const std::vector<std::function<void(uint32_t)>> calls = {
      [&](uint32_t i) { buffer_of(plan_, i, 0); },
      [&](uint32_t i) { holder_of(plan_, i); },
      [&](uint32_t i) { destination_of(plan_, i); },
      [&](uint32_t i) { buffer_name(plan_, i); },
      [&](uint32_t i) {
        for_each_held_run(plan_, i, 0, {0, 1}, [](auto...) {});
      },
      [&](uint32_t i) { for_each_piece(recipe_, plan_.layout, i, 0, target); },
      [&](uint32_t i) { is_primary(recipe_, plan_.layout, i, 0); },
      [&](uint32_t i) { for_each_transfer_of(plan_, 0, i, transfer); },
      [&](uint32_t i) { for_each_transfer_from(plan_, 0, i, transfer); },
      [&](uint32_t i) { RankWindow(plan_, 0).tensor(i); },
  };
  for (size_t c = 0; c < calls.size(); ++c) {
    EXPECT_NO_THROW(calls[c](2)) << c;
    const auto error = error_of([&] { calls[c](3); });
    ASSERT_TRUE(error) << c;
    EXPECT_EQ(error->category(), Category::usage) << c;
    EXPECT_EQ(error->facts().expected, "< 3") << c;
    EXPECT_EQ(error->facts().got, "3") << c;
  }
}

TEST_F(OutsideThePlan, ARankIsAUsageError) {
  const auto target = [](uint32_t, const Box&) {};
  const auto transfer = [](const Transfer&) {};
  std::vector<Transfer> table(kReadTableRows);
  const std::vector<std::function<void(int)>> calls = {
      [&](int r) { buffer_of(plan_, 0, r); },
      [&](int r) { arena_begins(plan_, r); },
      [&](int r) {
        for_each_held_run(plan_, 0, r, {0, 1}, [](auto...) {});
      },
      [&](int r) { for_each_piece(recipe_, plan_.layout, 0, r, target); },
      [&](int r) { is_primary(recipe_, plan_.layout, 0, r); },
      [&](int r) { for_each_stored_transfer(plan_, r, transfer); },
      [&](int r) { for_each_made_transfer(plan_, r, transfer); },
      [&](int r) { for_each_read(plan_, r, table, [](const Read&) {}); },
      [&](int r) { for_each_write(plan_, r, Rows::whole, table, [](const Write&) {}); },
      [&](int r) { for_each_node_read(plan_, r, [](const NodeRead&) {}); },
      [&](int r) { node_of(plan_, r); },
      [&](int r) { exchange_group(plan_, r); },
      [&](int r) { reads_alone(plan_, r); },
      [&](int r) { reads_storage(plan_, r); },
      [&](int r) { RankWindow(plan_, r); },
      [&](int r) { plan_.promise.rank_peak_bytes(r); },
      [&](int r) { plan_.promise.ledger_limit_bytes(r); },
      [&](int r) { plan_.promise.peak_phase(r); },
      [&](int r) { plan_.promise.is_on(0, r); },
  };
  for (size_t c = 0; c < calls.size(); ++c) {
    EXPECT_NO_THROW(calls[c](1)) << c;
    for (const int rank : {-1, 2, 1000}) {
      const auto error = error_of([&] { calls[c](rank); });
      ASSERT_TRUE(error) << c;
      EXPECT_EQ(error->category(), Category::usage) << c;
      EXPECT_EQ(error->facts().expected, "0 to 1") << c;
    }
  }
}

}  // namespace
}  // namespace modicum
