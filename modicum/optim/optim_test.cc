// Tests of the memory of the state. Catches: scales, buckets or max_exp_avg_sq that are held and
// not promised; a budget check after the first page; memory that a forked child copies; memory
// allocated by a step; an arena that is pinned twice, at another size or not at all.
#include "modicum/optim/optim.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "modicum/base/sanitizers_double.h"
#include "modicum/optim/tiny_model_doubles.h"

namespace modicum {
namespace {

// A column shard of tensor parallelism: many short runs that end inside blocks and buckets.
ShardSpec columns(int64_t rows, int64_t width, int64_t first, int64_t n) {
  ShardSpec shard{.fqn = "columns.weight"};
  for (int64_t row = 0; row < rows; ++row) shard.runs.push_back({row * width + first, n});
  return shard;
}

TEST(AdamWFootprint, EqualsTheChargeToTheByte) {
  for (const StateFormat format : kFormats) {
    for (const bool amsgrad : {false, true}) {
      for (const int rank : {0, 1, 2}) {
        AdamWSpec spec = tiny_spec(format, rank, 3);
        spec.groups[0].amsgrad = amsgrad;
        spec.shards.push_back(columns(37, 1000, 333, 334));
        const Footprint promised = adamw_footprint(spec);
        Ledger ledger;
        {
          const AdamW state(spec, ledger, 2);
          EXPECT_EQ(ledger.footprint(), promised) << format_name(format);
          EXPECT_EQ(ledger.peak_bytes(), promised.total());
        }
        EXPECT_EQ(ledger.footprint(), Footprint{});
      }
    }
  }
}

// Master, gradient, exp_avg and exp_avg_sq, with an fp32 scale per 128 elements for each 8-bit
// moment: 4 + 4 + 4 + 4, 4 + 2 + 4 + 4, 4 + 2 + 2 + 2, 4 + 2 + 2 (1 + 4/128) and so on.
TEST(AdamWFootprint, IsTheFormatsBytesPerParameter) {
  const std::vector<double> expected = {16, 14, 10, 8.0625, 7.0625, 12, 10.0625};
  const int64_t n = int64_t{1} << 32;
  for (size_t f = 0; f < kFormats.size(); ++f) {
    AdamWSpec spec{.format = kFormats[f], .shards = {{.fqn = "w", .runs = {{0, n}}}}};
    const auto bytes = static_cast<double>(adamw_footprint(spec).total());
    EXPECT_NEAR(bytes / static_cast<double>(n), expected[f], expected[f] * 1e-4);
    spec.groups[0].amsgrad = true;
    EXPECT_GT(static_cast<double>(adamw_footprint(spec).total()), bytes + static_cast<double>(n));
  }
}

// Every plane is read and written, except the gradient, which is read: in fp32, 2 (4 + 4 + 4) + 4,
// and 2 for `out`.
TEST(AdamWFootprint, BytesMovedAreAsDocumented) {
  EXPECT_EQ(bytes_moved_per_parameter(StateFormat::fp32, true), 30);
  EXPECT_EQ(bytes_moved_per_parameter(StateFormat::fp32_split, false), 26);
  EXPECT_EQ(bytes_moved_per_parameter(StateFormat::bf16_moments, false), 18);
  EXPECT_EQ(bytes_moved_per_parameter(StateFormat::int8_moments, false), 14.125);
  EXPECT_EQ(bytes_moved_per_parameter(StateFormat::int8_moments_24, false), 12.125);
}

TEST(AdamW, OnePercentBelowThePromiseIsRefusedBeforeAnyAllocation) {
  for (const StateFormat format : kFormats) {
    const AdamWSpec spec = tiny_spec(format);
    const uint64_t promised = adamw_footprint(spec).total();
    const uint64_t limit = promised * 99 / 100;
    Ledger ledger(limit);
    const auto met = error_of([&] { AdamW state(spec, ledger, 1); });
    ASSERT_TRUE(met) << format_name(format);
    EXPECT_EQ(met->category(), Category::budget);
    EXPECT_EQ(met->facts().shortfall_bytes, promised - limit);
    EXPECT_FALSE(met->facts().owners.empty());
    EXPECT_EQ(ledger.peak_bytes(), 0U) << "nothing was charged, not even for a moment";
    Ledger enough(promised);
    EXPECT_NO_THROW(AdamW(spec, enough, 1));
  }
}

TEST(AdamW, CallerOwnedMastersAreUsedAndNotCharged) {
  AdamWSpec spec = tiny_spec(StateFormat::fp32);
  const uint64_t whole = adamw_footprint(spec)[Purpose::master];
  std::vector<float> master = tiny_values(spec.shards[0], 3);
  const std::vector<float> before = master;
  spec.shards[0].master = reinterpret_cast<std::byte*>(master.data());
  Ledger ledger;
  AdamW state(spec, ledger, 1);
  EXPECT_NEAR(static_cast<double>(whole - ledger.footprint()[Purpose::master]),
              static_cast<double>(master.size() * sizeof(float)), 2.0 * kPageBytes);
  deliver_tiny(state, 1);
  state.step();
  EXPECT_NE(master, before);
  std::vector<float> exported(master.size());
  state.export_to(0, StatePlane::master, 0, exported);
  EXPECT_EQ(exported, master);
}

TEST(AdamW, SharedMemoryIsRefusedNamingBothParameters) {
  std::vector<std::byte> memory(1 << 20);
  for (const StateFormat format : kFormats) {
    const uint64_t width = bytes_of(row_of(format).master, 1);
    const auto met = [&](uint64_t first, uint64_t second, bool out) {
      AdamWSpec spec{
          .format = format,
          .shards = {
              {.fqn = "a", .runs = {{0, 100}}}, {.fqn = "b", .runs = {{0, 7}}}, {.fqn = "none"}}};
      spec.shards[0].master = memory.data() + first;
      (out ? spec.shards[1].out : spec.shards[1].master) = memory.data() + second;
      spec.shards[2].master = memory.data() + first;
      Ledger ledger;
      return error_of([&] { AdamW(spec, ledger, 1); });
    };
    for (const bool out : {false, true}) {
      const uint64_t element_bytes = out ? 2 : width;
      EXPECT_FALSE(met(0, 100 * width, out));
      EXPECT_FALSE(met(7 * element_bytes, 0, out));
      for (const auto& [first, second] : {std::pair<uint64_t, uint64_t>{0, 0},
                                          {0, 100 * width - 2},
                                          {7 * element_bytes - 2, 0},
                                          {0, 50 * width}}) {
        const auto refused = met(first, second, out);
        ASSERT_TRUE(refused) << format_name(format) << " " << first << " " << second;
        EXPECT_EQ(refused->category(), Category::mismatch);
        EXPECT_EQ(refused->facts().tensor, "b");
        EXPECT_NE(refused->what_happened().find("'a'"), std::string::npos);
      }
    }
  }
}

TEST(AdamW, AMasterThatOverlapsItsOwnOutIsRefused) {
  std::vector<std::byte> memory(1 << 10);
  AdamWSpec spec{.shards = {{.fqn = "a", .runs = {{0, 100}}}}};
  spec.shards[0].master = memory.data();
  spec.shards[0].out = memory.data() + 398;  // the master has 100 * 4 bytes
  Ledger ledger;
  const auto met = error_of([&] { AdamW(spec, ledger, 1); });
  ASSERT_TRUE(met);
  EXPECT_EQ(met->category(), Category::mismatch);
  EXPECT_EQ(met->facts().tensor, "a");
  EXPECT_EQ(met->what_happened(), "master and out of parameter 'a' share memory");
  spec.shards[0].out = memory.data() + 400;
  EXPECT_NO_THROW(AdamW(spec, ledger, 1));
}

TEST(AdamW, OptionsOutOfRangeAreRefusedWithTheirValue) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  struct InvalidOptions {
    AdamOptions options;
    const char* name;
    const char* got;
  };
  const InvalidOptions kWrong[] = {
      {{.lr = -1e-3}, "lr", "-0.001"},
      {{.lr = kNan}, "lr", "nan"},
      {{.lr = 1e300}, "lr and beta1", "1e+300 and 0.9"},
      {{.beta1 = 1}, "beta1", "1"},
      {{.beta1 = kNan}, "beta1", "nan"},
      {{.beta2 = -0.5}, "beta2", "-0.5"},
      {{.semantics = AdamSemantics::deepspeed, .beta1 = 1 - 1e-9},
       "lr and beta1",
       "0.001 and 0.999999999"},
      {{.semantics = AdamSemantics::deepspeed, .beta2 = 1 - 1e-9}, "beta2", "0.999999999"},
      {{.eps = kNan}, "eps", "nan"},
      {{.eps = 1e39}, "eps", "1e+39"},
      {{.weight_decay = INFINITY}, "weight_decay", "inf"},
      {{.lr = 1, .weight_decay = 1e39}, "weight_decay", "1e+39"},
  };
  Ledger ledger;
  AdamW state(tiny_spec(StateFormat::fp32), ledger, 1);
  for (const InvalidOptions& wrong : kWrong) {
    AdamWSpec spec = tiny_spec(StateFormat::fp32);
    spec.groups[1] = wrong.options;
    for (const auto& met : {error_of([&] { AdamW(spec, ledger, 1); }),
                            error_of([&] { state.set_options(1, wrong.options); })}) {
      ASSERT_TRUE(met) << wrong.name << " " << wrong.got;
      EXPECT_EQ(met->category(), Category::usage);
      EXPECT_EQ(met->what_happened(), std::string("AdamW can't step with this ") + wrong.name);
      EXPECT_EQ(met->facts().got, wrong.got);
    }
  }
  EXPECT_NO_THROW(state.set_options(1, {.lr = 0, .beta1 = 0, .beta2 = 0, .eps = 0}));
}

// Replicas are stepped on every rank and counted on one.
TEST(AdamW, ASecondaryReplicaIsInNeitherNormNorDigest) {
  AdamWSpec spec = tiny_spec(StateFormat::fp32);
  Ledger ledger;
  AdamW all(spec, ledger, 2);
  spec.shards[0].counts = false;
  AdamW some(spec, ledger, 2);
  spec.shards = {spec.shards[0]};
  spec.shards[0].counts = true;
  AdamW rest(spec, ledger, 2);
  for (AdamW* state : {&all, &some, &rest}) {
    import_tiny_masters(*state);
    deliver_tiny(*state, 1);
  }
  EXPECT_GT(some.norm().sum_of_squares, 0);
  EXPECT_DOUBLE_EQ(some.norm().sum_of_squares + rest.norm().sum_of_squares,
                   all.norm().sum_of_squares);
  for (AdamW* state : {&all, &some, &rest}) state->step();
  StateDigest sum = some.digest();
  sum += rest.digest();
  EXPECT_EQ(sum, all.digest());
  EXPECT_EQ(bytes_of_state(some), bytes_of_state(all));
}

// ---- memory over the process tree

uint64_t pss_anon(pid_t pid) {
  std::ifstream rollup("/proc/" + std::to_string(pid) + "/smaps_rollup");
  for (std::string line; std::getline(rollup, line);) {
    if (line.starts_with("Pss_Anon:")) return std::stoull(line.substr(9)) * kKiB;
  }
  return 0;
}

// A forked child that sleeps until it is killed, as an idle worker of a DataLoader does.
class Child {
 public:
  Child() : pid_(fork()) {
    while (pid_ == 0) pause();
  }
  ~Child() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_;
};

TEST(AdamW, StepsAllocateNothingNextToForkedChildren) {
  if (kIsSanitized) GTEST_SKIP() << "sanitizers hold shadow memory";
  if (pss_anon(getpid()) == 0) GTEST_SKIP() << "this kernel has no Pss_Anon";
  for (const StateFormat format : {StateFormat::fp32, StateFormat::int8_moments}) {
    Ledger ledger;
    constexpr int64_t kPieces = 64;
    AdamW state(
        {.format = format, .shards = {{.fqn = "w", .runs = {{0, kPieces * kBucketElements}}}}},
        ledger, 2);
    const uint64_t promised = ledger.footprint().total();
    const std::vector<float> gradient(kBucketElements, 1.0F);
    const Child first, second;
    const auto step = [&] {
      for (int64_t i = 0; i < kPieces; ++i) {
        state.arrive(piece_of(0, i * kBucketElements, gradient));
      }
      state.step();
    };
    const auto tree = [&] {
      return pss_anon(getpid()) + pss_anon(first.pid()) + pss_anon(second.pid());
    };
    step();
    const uint64_t after_one = tree();
    ledger.mark();
    step();
    const Child again;  // like a DataLoader's worker in the next epoch
    step();
    step();
    EXPECT_LT(tree() + pss_anon(again.pid()), after_one + promised / 20) << format_name(format);
    EXPECT_EQ(ledger.peak_since_mark(), promised);
  }
}

// ---- pinning

struct CountingPinner {
  std::vector<std::span<std::byte>> pinned;
  int unpinned = 0;
  int fail_at = -1;

  Pinner pinner() {
    return {.pin =
                [this](std::span<std::byte> arena) {
                  if (static_cast<int>(pinned.size()) == fail_at) {
                    fail(Category::no_memory, "the driver refused");
                  }
                  pinned.push_back(arena);
                },
            .unpin =
                [this](std::span<std::byte> arena) {
                  ++unpinned;
                  arena[0] = arena[0];  // still mapped
                }};
  }
};

TEST(AdamWPinning, PinsEachDeviceArenaOnceAtItsExactSize) {
  for (const StateFormat format : kFormats) {
    const bool is_split = row_of(format).is_split();
    CountingPinner counting;
    Ledger ledger;
    {
      const AdamW state(tiny_spec(format), ledger, 1, counting.pinner());
      ASSERT_EQ(counting.pinned.size(), is_split ? 2U : 1U);
      EXPECT_EQ(counting.pinned.back().size(), ledger.footprint()[Purpose::grad]);
      // A plane begins within the first page of its arena (bytes_before).
      const auto grad = state.plane(0, Plane::grad).data() - counting.pinned.back().data();
      EXPECT_GE(grad, 0);
      EXPECT_LT(grad, static_cast<int64_t>(kPageBytes));
      if (is_split) {
        EXPECT_EQ(counting.pinned.front().data(), state.plane(0, Plane::master).data());
        EXPECT_LT(counting.pinned.front().size(), ledger.footprint()[Purpose::master]);
      }
      EXPECT_EQ(counting.unpinned, 0);
    }
    EXPECT_EQ(counting.unpinned, is_split ? 2 : 1);
  }
}

TEST(AdamWPinning, AFailedPinUndoesTheEarlierOnes) {
  CountingPinner counting;
  counting.fail_at = 1;
  Ledger ledger;
  const auto met =
      error_of([&] { AdamW(tiny_spec(StateFormat::fp32_split), ledger, 1, counting.pinner()); });
  ASSERT_TRUE(met);
  EXPECT_EQ(met->category(), Category::no_memory);
  EXPECT_EQ(counting.unpinned, 1);
  EXPECT_EQ(ledger.footprint(), Footprint{});
}

TEST(AdamWPinning, OverTheLockLimitIsRefusedBeforeAnyAllocation) {
  CountingPinner counting;
  Ledger ledger;
  Pinner pinner = counting.pinner();
  pinner.limit_bytes = 64 * kKiB;
  const auto met =
      error_of([&] { AdamW(tiny_spec(StateFormat::fp32), ledger, 1, std::move(pinner)); });
  ASSERT_TRUE(met);
  EXPECT_EQ(met->category(), Category::budget);
  EXPECT_NE(met->what_happened().find("RLIMIT_MEMLOCK"), std::string::npos);
  EXPECT_TRUE(counting.pinned.empty());
  EXPECT_EQ(ledger.peak_bytes(), 0U);
}

// ---- invalid specs

TEST(AdamW, RefusesInvalidSpecs) {
  Ledger ledger;
  const auto category = [&](const auto& change) {
    AdamWSpec spec = tiny_spec(StateFormat::fp32);
    change(spec);
    const auto met = error_of([&] { AdamW(spec, ledger, 1); });
    return met ? met->category() : Category::count;
  };
  EXPECT_EQ(category([](AdamWSpec&) {}), Category::count);
  EXPECT_EQ(category([](AdamWSpec& s) { s.groups[0].lr = -1; }), Category::usage);
  EXPECT_EQ(category([](AdamWSpec& s) { s.groups[1].beta2 = 1; }), Category::usage);
  EXPECT_EQ(category([](AdamWSpec& s) { s.shards[1].group = 2; }), Category::mismatch);
  EXPECT_EQ(category([](AdamWSpec& s) {
              s.shards[1].runs = {{5, 10}, {14, 2}};
            }),
            Category::mismatch);
  EXPECT_EQ(category([](AdamWSpec& s) { s.shards[1].runs = {{5, 0}}; }), Category::mismatch);
  const auto facts = [&](const auto& change) {
    AdamWSpec spec = tiny_spec(StateFormat::fp32);
    change(spec.shards[1]);
    const auto met = error_of([&] { AdamW(spec, ledger, 1); });
    return met ? met->facts().expected + ", got " + met->facts().got : "";
  };
  EXPECT_EQ(facts([](ShardSpec& s) {
              s.runs = {{5, 0}};
            }),
            "1 element or more within [0, 2^63), got 0 elements from 5");
  EXPECT_EQ(facts([](ShardSpec& s) {
              s.runs = {{5, 10}, {14, 2}};
            }),
            "1 element or more within [15, 2^63), got 2 elements from 14");
  EXPECT_EQ(facts([](ShardSpec& s) { s.group = -1; }), "an index within [0, 2), got -1");
  EXPECT_EQ(category([](AdamWSpec& s) {
              s.groups[0].semantics = AdamSemantics::deepspeed;
              s.groups[0].amsgrad = true;
            }),
            Category::unsupported);
  AdamW state(tiny_spec(StateFormat::fp32), ledger, 1);
  AdamOptions options = state.options(0);
  options.amsgrad = true;
  EXPECT_EQ(error_of([&] { state.set_options(0, options); })->category(), Category::usage);
}

}  // namespace
}  // namespace modicum
