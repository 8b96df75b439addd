// Tests of a step: it is bit-equal for every sharding, changes nothing when skipped, and sends the
// parameters that it computed. Catches: random bits or blocks that depend on the shard or the
// thread; a resume that loses the step count; a skip that writes; a ring slot that is overwritten
// while it is read; a failed step_all that has stepped some of its states.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <ctime>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "modicum/base/sanitizers_double.h"
#include "modicum/base/threads_double.h"
#include "modicum/optim/optim.h"
#include "modicum/optim/tiny_model_doubles.h"

namespace modicum {
namespace {

// The states of all ranks, in one process.
struct World {
  Ledger ledger;
  std::vector<std::unique_ptr<AdamW>> ranks;

  World(StateFormat format, int n, int threads, bool amsgrad = false) {
    for (int rank = 0; rank < n; ++rank) {
      AdamWSpec spec = tiny_spec(format, rank, n);
      spec.groups[0].amsgrad = amsgrad;
      ranks.push_back(std::make_unique<AdamW>(std::move(spec), ledger, threads));
      import_tiny_masters(*ranks.back());
    }
  }
  void step(uint64_t t) {
    GradNorm norm;
    for (auto& rank : ranks) {
      deliver_tiny(*rank, t);
      norm += rank->norm();
      AdamOptions options = rank->options(0);
      options.lr = 1e-2 / static_cast<double>(t);
      rank->set_options(0, options);
    }
    for (auto& rank : ranks) rank->step({.clip = clip_factor(norm.norm(), 1.0)});
  }
  StateDigest digest() const {
    StateDigest sum;
    for (const auto& rank : ranks) sum += rank->digest();
    return sum;
  }
};

// Must fail if a step overwrites memory, in any format, before it is announced.
TEST(Step, AnnouncesWhatItOverwrites) {
  for (const StateFormat format : kFormats) {
    for (const int threads : {1, 2}) {
      SCOPED_TRACE(format_name(format));
      Ledger ledger;
      AdamWSpec spec = tiny_spec(format);
      std::vector<std::vector<std::byte>> outs;
      if (!row_of(format).is_split()) {
        for (ShardSpec& shard : spec.shards) {
          shard.out = outs.emplace_back(static_cast<size_t>(2 * shard.numel())).data();
        }
      }
      AdamW state(std::move(spec), ledger, threads);
      import_tiny_masters(state);
      std::vector<std::span<std::byte>> memory(outs.begin(), outs.end());
      for (size_t shard = 0; shard < state.shards(); ++shard) {
        for (const Plane plane :
             {Plane::master, Plane::master_low, Plane::exp_avg, Plane::exp_avg_sq}) {
          memory.push_back(state.plane(shard, plane));
          memory.push_back(std::as_writable_bytes(state.scales(shard, plane)));
        }
      }
      for (uint64_t t = 1; t <= 2; ++t) {
        std::vector<std::vector<std::byte>> before, announced;
        for (const auto region : memory) before.emplace_back(region.begin(), region.end());
        for (const auto region : memory) announced.emplace_back(region.size());
        std::mutex mutex;
        const BeforeOverwrite note = [&](std::span<const std::byte> part) {
          const std::lock_guard lock(mutex);
          for (size_t m = 0; m < memory.size(); ++m) {
            const std::byte* const begin = memory[m].data();
            if (part.data() < begin || part.data() >= begin + memory[m].size()) continue;
            const auto at = static_cast<size_t>(part.data() - begin);
            ASSERT_LE(at + part.size(), memory[m].size());
            ASSERT_EQ(std::memcmp(part.data(), before[m].data() + at, part.size()), 0)
                << "overwritten before it was announced";
            std::memset(announced[m].data() + at, 1, part.size());
          }
        };
        deliver_tiny(state, t);
        ASSERT_TRUE(state.norm().finite);
        state.step({.before_overwrite = &note});
        for (size_t m = 0; m < memory.size(); ++m) {
          size_t silent = 0;
          for (size_t i = 0; i < memory[m].size(); ++i) {
            silent += memory[m][i] != before[m][i] && announced[m][i] == std::byte{0} ? 1 : 0;
          }
          EXPECT_EQ(silent, 0U) << m;
        }
      }
    }
  }
}

TEST(Step, IsBitEqualForAnyNumberOfShardsAndThreads) {
  for (const StateFormat format : kFormats) {
    World reference(format, 1, 1, true);
    const StateDigest before = reference.digest();
    for (uint64_t t = 1; t <= 3; ++t) reference.step(t);
    const StateDigest expected = reference.digest();
    EXPECT_NE(expected.master, before.master);
    for (const int ranks : {1, 2, 3}) {
      for (const int threads : {1, 2, 4}) {
        World world(format, ranks, threads, true);
        EXPECT_EQ(world.digest(), before);
        for (uint64_t t = 1; t <= 3; ++t) world.step(t);
        EXPECT_EQ(world.digest(), expected)
            << format_name(format) << ", " << ranks << " ranks, " << threads << " threads";
      }
    }
  }
}

TEST(Step, TheTwoExactFormatsAgreeOnBf16Gradients) {
  World whole(StateFormat::fp32, 1, 2);
  World split(StateFormat::fp32_split, 2, 1);
  for (uint64_t t = 1; t <= 5; ++t) {
    for (World* world : {&whole, &split}) {
      GradNorm norm;
      for (auto& rank : world->ranks) {
        for (size_t shard = 0; shard < rank->shards(); ++shard) {
          const std::vector<float> gradient = tiny_values(rank->shard(shard), t);
          std::vector<std::byte> rounded(gradient.size() * 2);
          const auto n = static_cast<int64_t>(gradient.size());
          cast(reinterpret_cast<const std::byte*>(gradient.data()), DType::f32, rounded.data(),
               DType::bf16, n);
          rank->arrive({shard, 0, n, rounded.data(), DType::bf16});
        }
        norm += rank->norm();
      }
      for (auto& rank : world->ranks) {
        rank->step({.unscale = 0.25F, .clip = clip_factor(norm.norm(0.25), 1.0)});
      }
    }
  }
  EXPECT_EQ(whole.digest(), split.digest());
}

TEST(Step, InvalidFactorsAreRefusedAndNothingIsStepped) {
  World world(StateFormat::bf16_moments, 1, 2);
  deliver_tiny(*world.ranks[0], 1);
  const std::vector<std::byte> before = bytes_of_state(*world.ranks[0]);
  const StepOptions wrong[] = {{.unscale = NAN},  {.unscale = INFINITY}, {.unscale = 0},
                               {.unscale = -1},   {.clip = NAN},         {.clip = -0.5F},
                               {.clip = INFINITY}};
  for (const StepOptions& options : wrong) {
    const auto met = error_of([&] { world.ranks[0]->step(options); });
    ASSERT_TRUE(met) << options.unscale << " " << options.clip;
    EXPECT_EQ(met->category(), Category::usage);
    EXPECT_FALSE(met->facts().got.empty());
    EXPECT_EQ(bytes_of_state(*world.ranks[0]), before);
  }
  EXPECT_NO_THROW(world.ranks[0]->step({.clip = 0}));
}

// A repeated call has the result that the failed call would have had.
TEST(Step, IsAllOrNothingIfAThreadCannotBeStarted) {
  if (kIsSanitized) GTEST_SKIP() << "sanitizers replace pthread_create";
  for (const StateFormat format : kFormats) {
    World straight(format, 1, 4), hindered(format, 1, 4);
    for (World* world : {&straight, &hindered}) deliver_tiny(*world->ranks[0], 1);
    straight.ranks[0]->step();
    AdamW& state = *hindered.ranks[0];
    const std::vector<std::byte> before = bytes_of_state(state);
    for (const int can_start : {0, 1, 2}) {
      const ThreadLimit limit(can_start);
      const auto met = error_of([&] { state.step(); });
      ASSERT_TRUE(met);
      EXPECT_EQ(met->category(), Category::no_memory);
      EXPECT_EQ(bytes_of_state(state), before) << format_name(format) << ", " << can_start;
    }
    state.step();
    EXPECT_EQ(bytes_of_state(state), bytes_of_state(*straight.ranks[0]));
  }
}

// If vectors and matrices have different formats, a model has one state per format.
TEST(Step, OfSeveralStatesIsAllOrNothing) {
  if (kIsSanitized) GTEST_SKIP() << "sanitizers replace pthread_create";
  World straight(StateFormat::int8_moments, 2, 2), hindered(StateFormat::int8_moments, 2, 2);
  const auto steps_of = [](World& world) {
    for (const auto& rank : world.ranks) deliver_tiny(*rank, 1);
    return std::array{StateStep{world.ranks[0].get(), {}}, StateStep{world.ranks[1].get(), {}}};
  };
  for (const StateStep& each : steps_of(straight)) each.state->step();
  std::array<StateStep, 2> steps = steps_of(hindered);
  const auto bytes = [](const World& world) {
    std::vector<std::byte> both = bytes_of_state(*world.ranks[0]);
    const std::vector<std::byte> second = bytes_of_state(*world.ranks[1]);
    both.insert(both.end(), second.begin(), second.end());
    return both;
  };
  const std::vector<std::byte> before = bytes(hindered);
  const auto refused = [&] {
    const auto met = error_of([&] { AdamW::step_all(steps); });
    EXPECT_EQ(bytes(hindered), before);
    return met ? met->category() : Category::count;
  };
  {
    const ThreadLimit limit(0);
    EXPECT_EQ(refused(), Category::no_memory);
  }
  steps[1].options.unscale = 0;
  EXPECT_EQ(refused(), Category::usage) << "found out before the first state is stepped";
  steps[1].options.unscale = 1;
  AdamW::step_all(steps);
  EXPECT_EQ(bytes(hindered), bytes(straight));
  // A state with fewer threads follows one with more.
  AdamW other(tiny_spec(StateFormat::fp32), hindered.ledger, 5),
      alone(tiny_spec(StateFormat::fp32), hindered.ledger, 1);
  for (AdamW* state : {&other, &alone}) deliver_tiny(*state, 1);
  steps_of(hindered);
  AdamW::step_all(std::array{StateStep{&other, {}}, StateStep{hindered.ranks[0].get(), {}}});
  alone.step();
  EXPECT_EQ(bytes_of_state(other), bytes_of_state(alone));
  EXPECT_EQ(hindered.ranks[0]->steps(0), 2);
}

// Copies the state as a checkpoint of fp32 values would.
void copy_values(const AdamW& from, AdamW& to) {
  constexpr int64_t kChunk = 10 * kScaleBlock;
  for (size_t shard = 0; shard < from.shards(); ++shard) {
    to.set_steps(shard, from.steps(shard));
    const int64_t numel = from.shard(shard).numel();
    for (const StatePlane plane :
         {StatePlane::master, StatePlane::exp_avg, StatePlane::exp_avg_sq}) {
      for (int64_t at = 0; at < numel; at += kChunk) {
        std::vector<float> values(static_cast<size_t>(std::min(kChunk, numel - at)));
        from.export_to(shard, plane, at, values);
        to.import_from(shard, plane, at, values);
      }
    }
  }
}

TEST(Step, ResumesFromFp32ValuesBitForBit) {
  for (const StateFormat format : {StateFormat::fp32, StateFormat::fp32_split}) {
    World straight(format, 1, 1), before(format, 1, 1), after(format, 1, 2);
    for (uint64_t t = 1; t <= 4; ++t) straight.step(t);
    for (uint64_t t = 1; t <= 2; ++t) before.step(t);
    copy_values(*before.ranks[0], *after.ranks[0]);
    EXPECT_EQ(bytes_of_state(*after.ranks[0]), bytes_of_state(*before.ranks[0]));
    for (uint64_t t = 3; t <= 4; ++t) after.step(t);
    EXPECT_EQ(bytes_of_state(*after.ranks[0]), bytes_of_state(*straight.ranks[0]));
  }
}

TEST(Step, ResumesFromItsOwnCodesBitForBitInEveryFormat) {
  for (const StateFormat format : kFormats) {
    World straight(format, 1, 1), before(format, 1, 1), after(format, 1, 2);
    for (uint64_t t = 1; t <= 4; ++t) straight.step(t);
    for (uint64_t t = 1; t <= 2; ++t) before.step(t);
    for (size_t shard = 0; shard < before.ranks[0]->shards(); ++shard) {
      after.ranks[0]->set_steps(shard, 2);
      for (size_t p = 0; p < kPlanes; ++p) {
        const auto plane = static_cast<Plane>(p);
        const auto copy = [](auto from, auto to) {
          std::copy(from.begin(), from.end(), to.begin());
        };
        copy(before.ranks[0]->plane(shard, plane), after.ranks[0]->plane(shard, plane));
        copy(before.ranks[0]->scales(shard, plane), after.ranks[0]->scales(shard, plane));
      }
    }
    for (uint64_t t = 3; t <= 4; ++t) after.step(t);
    EXPECT_EQ(bytes_of_state(*after.ranks[0]), bytes_of_state(*straight.ranks[0]))
        << format_name(format);
  }
}

TEST(Step, ImportsAreCloseInEveryFormatAndRefuseToCutABlock) {
  for (const StateFormat format : kFormats) {
    Ledger ledger;
    AdamW state(tiny_spec(format), ledger, 1);
    const std::vector<float> values = tiny_values(state.shard(0), 11);
    std::vector<float> squares(values.size());
    for (size_t i = 0; i < values.size(); ++i) squares[i] = values[i] * values[i];
    state.import_from(0, StatePlane::exp_avg, 0, values);
    state.import_from(0, StatePlane::exp_avg_sq, 0, squares);
    std::vector<float> read(values.size());
    state.export_to(0, StatePlane::exp_avg, 0, read);
    for (size_t i = 0; i < values.size(); ++i) ASSERT_NEAR(read[i], values[i], 0.02);
    state.export_to(0, StatePlane::exp_avg_sq, 0, read);
    for (size_t i = 0; i < values.size(); ++i) ASSERT_NEAR(read[i], squares[i], 0.02);
    const auto met = error_of(
        [&] { state.import_from(0, StatePlane::exp_avg, 5, std::span(values).first(128)); });
    EXPECT_EQ(met.has_value(), row_of(format).has_scales());
    EXPECT_FALSE(
        error_of([&] { state.import_from(0, StatePlane::master, 5, std::span(values).first(9)); }));
  }
}

// One group's shards have step counts that differ, jump, and pause while a shard is left out; a
// beta changes. Each shard must step as in a new state that holds nothing else.
TEST(Step, DeepSpeedsPowersBelongToEachShardsOwnCount) {
  AdamWSpec spec = tiny_spec(StateFormat::fp32);
  for (AdamOptions& group : spec.groups) group.semantics = AdamSemantics::deepspeed;
  Ledger ledger;
  AdamW state(spec, ledger, 2);
  import_tiny_masters(state);
  state.set_steps(2, 5000);
  for (uint64_t t = 1; t <= 6; ++t) {
    if (t == 3) state.set_steps(0, 20'000);
    if (t == 4) state.set_steps(0, 1);
    if (t == 5) spec.groups[0].beta2 = 0.95;
    state.set_options(0, spec.groups[0]);
    std::vector<std::vector<float>> expected;
    for (size_t shard = 0; shard < state.shards(); ++shard) {
      AdamWSpec alone = spec;
      alone.shards = {spec.shards[shard]};
      AdamW optimizer(alone, ledger, 1);
      std::vector<float>& values = expected.emplace_back(spec.shards[shard].numel());
      for (const StatePlane plane :
           {StatePlane::exp_avg, StatePlane::exp_avg_sq, StatePlane::master}) {
        state.export_to(shard, plane, 0, values);
        optimizer.import_from(0, plane, 0, values);
      }
      optimizer.set_steps(0, state.steps(shard));
      const std::vector<float> gradient = tiny_values(spec.shards[shard], t);
      if (shard == 2 && t % 2 == 0) {
        state.leave_out(shard);
        continue;
      }
      state.arrive(piece_of(shard, 0, gradient));
      optimizer.arrive(piece_of(0, 0, gradient));
      optimizer.step();
      optimizer.export_to(0, StatePlane::master, 0, values);
    }
    state.step();
    for (size_t shard = 0; shard < state.shards(); ++shard) {
      std::vector<float> values(expected[shard].size());
      state.export_to(shard, StatePlane::master, 0, values);
      ASSERT_EQ(values, expected[shard]) << "shard " << shard << ", step " << t;
    }
  }
  EXPECT_EQ(state.steps(2), 5003);
}

// Measures CPU time, with betas whose powers change in every step: the first step multiplies
// 2,000,000 times per beta, a later one once.
TEST(Step, DeepSpeedsPowersAreNotComputedAnewInEachStep) {
  const double beta = std::nextafter(1.0F, 0.0F);
  Ledger ledger;
  AdamW state({.groups = {{.semantics = AdamSemantics::deepspeed, .beta1 = beta, .beta2 = beta}},
               .shards = {{.fqn = "w", .runs = {{0, 1}}}}},
              ledger, 1);
  state.set_steps(0, 2'000'000);
  const auto seconds_of = [&](int steps) {
    const std::clock_t begin = std::clock();
    for (int step = 0; step < steps; ++step) {
      state.arrive(piece_of(0, 0, {1.0F}));
      state.step();
    }
    return static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  };
  const double first = seconds_of(1);
  EXPECT_LT(seconds_of(100), 2 * first);
}

// ---- skipped steps

TEST(Step, ASkippedStepChangesNoByteAndNoCount) {
  for (const StateFormat format : kFormats) {
    World world(format, 2, 2);
    for (uint64_t t = 1; t <= 2; ++t) world.step(t);
    const auto before = bytes_of_state(*world.ranks[0]);
    const auto other = bytes_of_state(*world.ranks[1]);
    GradNorm norm;
    deliver_tiny(*world.ranks[0], 3);
    for (size_t shard = 0; shard < 3; ++shard) {
      std::vector<float> gradient = tiny_values(world.ranks[1]->shard(shard), 3);
      if (shard == 2) gradient.back() = NAN;
      world.ranks[1]->arrive(piece_of(shard, 0, gradient));
    }
    for (auto& rank : world.ranks) norm += rank->norm();
    EXPECT_TRUE(world.ranks[0]->norm().finite);
    EXPECT_FALSE(norm.finite) << "one element of one rank";
    for (auto& rank : world.ranks) rank->skip();
    EXPECT_EQ(bytes_of_state(*world.ranks[0]), before);
    EXPECT_EQ(bytes_of_state(*world.ranks[1]), other);
    World clean(format, 2, 1);
    for (uint64_t t = 1; t <= 3; ++t) clean.step(t);
    world.step(3);
    EXPECT_EQ(world.digest(), clean.digest()) << "the next step is not affected by the skipped one";
  }
}

// ---- outlet

TEST(Outlet, SendsEveryNewParameterOnceThroughAFixedRing) {
  constexpr int kThreads = 2;
  for (const size_t slots : {kThreads, 3 * kThreads}) {
    World world(StateFormat::fp32, 1, kThreads);
    AdamW& state = *world.ranks[0];
    std::vector<std::byte> ring(slots * kRingSlotBytes);
    std::vector<std::vector<std::byte>> sent;
    for (size_t s = 0; s < state.shards(); ++s) sent.emplace_back(state.shard(s).numel() * 2);
    std::mutex mutex;
    std::vector<ReadyChunk> in_flight(slots, ReadyChunk{.n = 0});
    const auto land = [&](int slot) {  // reads the slot at the last moment that `wait` allows
      ReadyChunk& chunk = in_flight[static_cast<size_t>(slot)];
      std::memcpy(sent[chunk.shard].data() + chunk.at * 2, chunk.elements,
                  static_cast<size_t>(chunk.n) * 2);
      chunk.n = 0;
    };
    const Outlet outlet{.ring = ring,
                        .send =
                            [&](const ReadyChunk& chunk) {
                              const std::lock_guard lock(mutex);
                              EXPECT_EQ(in_flight[static_cast<size_t>(chunk.slot)].n, 0);
                              in_flight[static_cast<size_t>(chunk.slot)] = chunk;
                            },
                        .wait =
                            [&](int slot) {
                              const std::lock_guard lock(mutex);
                              land(slot);
                            }};
    deliver_tiny(state, 1);
    state.step({.outlet = &outlet});
    for (size_t shard = 0; shard < state.shards(); ++shard) {
      const auto n = state.shard(shard).numel();
      std::vector<std::byte> expected(static_cast<size_t>(n) * 2);
      cast(state.plane(shard, Plane::master).data(), DType::f32, expected.data(), DType::bf16, n);
      EXPECT_EQ(sent[shard], expected) << shard;
    }
  }
}

TEST(Outlet, SendsASplitMasterInPlace) {
  World world(StateFormat::bf16_moments, 1, 2);
  AdamW& state = *world.ranks[0];
  std::mutex mutex;
  int64_t elements = 0;
  const Outlet outlet{.send = [&](const ReadyChunk& chunk) {
    const std::lock_guard lock(mutex);
    EXPECT_EQ(chunk.elements, state.plane(chunk.shard, Plane::master).data() + chunk.at * 2);
    EXPECT_EQ(chunk.slot, -1);
    elements += chunk.n;
  }};
  deliver_tiny(state, 1);
  state.step({.outlet = &outlet});
  EXPECT_EQ(elements, kTinyModel[0].numel + kTinyModel[1].numel + kTinyModel[2].numel);
}

TEST(Outlet, RefusesARingWithoutASlotForEachThread) {
  World world(StateFormat::fp32, 1, 2);
  std::vector<std::byte> ring(kRingSlotBytes);
  const Outlet outlet{.ring = ring, .send = [](const ReadyChunk&) {}};
  deliver_tiny(*world.ranks[0], 1);
  const auto before = bytes_of_state(*world.ranks[0]);
  EXPECT_EQ(error_of([&] { world.ranks[0]->step({.outlet = &outlet}); })->category(),
            Category::usage);
  EXPECT_EQ(bytes_of_state(*world.ranks[0]), before);
}

TEST(Outlet, TheCallersOwnArrayGetsTheNewParameters) {
  AdamWSpec spec = tiny_spec(StateFormat::fp32);
  std::vector<std::byte> out(static_cast<size_t>(kTinyModel[0].numel) * 2);
  spec.shards[0].out = out.data();
  spec.shards[0].out_dtype = DType::f16;
  Ledger ledger;
  AdamW state(std::move(spec), ledger, 2);
  import_tiny_masters(state);
  deliver_tiny(state, 1);
  state.step();
  std::vector<std::byte> expected(out.size());
  cast(state.plane(0, Plane::master).data(), DType::f32, expected.data(), DType::f16,
       kTinyModel[0].numel);
  EXPECT_EQ(out, expected);
}

// Without refresh_masters the second step would overwrite the caller's value.
TEST(Outlet, AValueWrittenToTheCallersArrayBecomesTheMaster) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const bool in_step : {false, true}) {
      AdamWSpec spec = tiny_spec(StateFormat::fp32);
      const int64_t numel = kTinyModel[0].numel;
      std::vector<std::byte> out(static_cast<size_t>(numel) * 2);
      spec.shards[0].out = out.data();
      spec.shards[0].out_dtype = dtype;
      spec.groups[0].lr = 0;
      Ledger ledger;
      AdamW state(std::move(spec), ledger, 2);
      import_tiny_masters(state);
      std::vector<float> before(static_cast<size_t>(numel));
      state.export_to(0, StatePlane::master, 0, before);
      deliver_tiny(state, 1);
      state.step();
      const float value = 0.75F;
      const int64_t written = numel - 1;
      cast(reinterpret_cast<const std::byte*>(&value), DType::f32, out.data() + written * 2, dtype,
           1);
      if (!in_step) state.refresh_masters();
      deliver_tiny(state, 2);
      state.step({.refresh_masters = in_step});
      std::vector<float> after(before.size());
      state.export_to(0, StatePlane::master, 0, after);
      before[static_cast<size_t>(written)] = value;
      EXPECT_EQ(after, before);  // lr is 0: all other masters keep every bit
    }
  }
}

// ---- the digest

TEST(StateDigest, ChangesWithEveryBitPlaneAndIndex) {
  World world(StateFormat::fp32, 1, 1);
  world.step(1);
  AdamW& state = *world.ranks[0];
  const StateDigest before = state.digest();
  for (const Plane plane : {Plane::master, Plane::exp_avg, Plane::exp_avg_sq}) {
    const std::span<std::byte> bytes = state.plane(2, plane);
    bytes[4] ^= std::byte{1};
    EXPECT_NE(state.digest().state, before.state);
    EXPECT_EQ(state.digest().master != before.master, plane == Plane::master);
    bytes[4] ^= std::byte{1};
    std::swap_ranges(bytes.begin(), bytes.begin() + 4, bytes.begin() + 4);
    EXPECT_NE(state.digest().state, before.state);
    std::swap_ranges(bytes.begin(), bytes.begin() + 4, bytes.begin() + 4);
  }
  EXPECT_EQ(state.digest(), before);
}

}  // namespace
}  // namespace modicum
