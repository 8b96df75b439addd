// The state of a checkpoint is read into states of any format, which hold their masters in the
// parameters or in memory of their own, as for parameters on a device.
//
// The oracle is AdamW::import_from. Catches: an upper half that is taken from the parameter
// although the state has its own; a block of scales that a shard begins within; windows that divide
// a block.
#include "modicum/training/state_load.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>

#include "modicum/io/file_doubles.h"
#include "modicum/kernels/kernels.h"
#include "modicum/ranks/board_double.h"

namespace modicum {
namespace {

const std::string kName = "w";
const std::vector<int64_t> kShape = {700, 129};  // several windows; blocks end with the rows
constexpr int64_t kNumel = 700 * 129;
constexpr int64_t kSteps = 3;

// Runs that end at blocks of 8-bit moments, and runs that divide them.
const std::vector<ShardRun> kWhole = {{0, kNumel}};
const std::vector<ShardRun> kRows = {{129 * 10, 129 * 400}, {129 * 500, 129 * 200}};
const std::vector<ShardRun> kCut = {{1000, 70001}, {kNumel - 300, 7}};

// A state of one shard of a bf16 parameter.
struct ShardState {
  ShardState(StateFormat format, bool is_callers, std::vector<ShardRun> runs)
      : is_own(is_callers), parameter(static_cast<size_t>(kNumel)) {
    AdamWSpec spec{.format = format, .seed = 5};
    const bool is_master = is_callers && row_of(format).is_split();
    auto* const memory = reinterpret_cast<std::byte*>(parameter.data());
    spec.shards.push_back({.fqn = kName,
                           .runs = std::move(runs),
                           .row = row_of(format).has_scales() ? moment_row(kShape) : 0,
                           .master = is_master ? memory : nullptr,
                           .out = is_callers && !is_master ? memory : nullptr});
    state = std::make_unique<AdamW>(std::move(spec), ledger, 1);
    state->set_steps(0, kSteps);
    for (const ShardRun& run : state->shard(0).runs) numel += run.n;
  }

  StateForm form() const { return {state->format(), state->shard(0).master != nullptr}; }
  std::vector<float> values(StatePlane plane) const {
    std::vector<float> all(static_cast<size_t>(numel));
    state->export_to(0, plane, 0, all);
    return all;
  }
  // Sets the master, and the parameter from it, as a load of the state does.
  void set_master(const std::vector<float>& values) {
    state->import_from(0, StatePlane::master, 0, values);
    if (!is_own || row_of(state->format()).is_split()) return;
    cast(reinterpret_cast<const std::byte*>(values.data()), DType::f32,
         reinterpret_cast<std::byte*>(parameter.data()), DType::bf16, numel);
  }

  const bool is_own;
  std::vector<uint16_t> parameter;
  Ledger ledger;
  std::unique_ptr<AdamW> state;
  int64_t numel = 0;
};

// The elements of `whole` that are in the runs of `shard_state`.
template <typename T>
std::vector<T> part_of(const std::vector<T>& whole, const ShardState& shard_state) {
  std::vector<T> part;
  for (const ShardRun& run : shard_state.state->shard(0).runs) {
    part.insert(part.end(), whole.begin() + run.first, whole.begin() + run.first + run.n);
  }
  return part;
}

// The parameter as a checkpoint has it: rounded as the format rounds.
std::vector<uint16_t> weights_of(const ShardState& saved) {
  if (saved.is_own) return saved.parameter;
  std::vector<uint16_t> weights(static_cast<size_t>(kNumel));
  if (row_of(saved.state->format()).is_split()) {
    std::memcpy(weights.data(), saved.state->plane(0, Plane::master).data(), weights.size() * 2);
  } else {
    const std::vector<float> values = saved.values(StatePlane::master);
    cast(reinterpret_cast<const std::byte*>(values.data()), DType::f32,
         reinterpret_cast<std::byte*>(weights.data()), DType::bf16, kNumel);
  }
  return weights;
}

// The saved state of `shard_state`, in the files of a checkpoint.
Checkpoint saved_in(MemoryFileSystem& files, const ShardState& saved) {
  const std::vector<StateOf> parameters = {
      {{kName, Role::param, DType::bf16, kShape}, saved.form().format, saved.form().is_master}};
  const StateFiles state(parameters);
  std::string file = output_header(state.manifest(), 0);
  file.resize(state.manifest().files[0].identity.size_bytes);
  const auto shards = [&](FunctionRef<void(const HeldShard&)> fn) { fn({*saved.state, 0, kName}); };
  state.for_each_span(shards, [&](const StoredSpan& span) {
    const uint64_t begin = state.manifest().tensors[span.stored].at.begin + span.at;
    std::memcpy(file.data() + begin, span.bytes.data(), span.bytes.size());
  });
  files.put("/state/model.safetensors", file);
  return open_checkpoint(files, "/state");
}

// Loads the state of `saved` into `loaded`, whose parameter has the saved weights.
void load(const ShardState& saved, ShardState& loaded) {
  MemoryFileSystem files;
  const Checkpoint checkpoint = saved_in(files, saved);
  const StateFiles state(checkpoint.manifest);
  const std::vector<uint16_t> weights = part_of(weights_of(saved), loaded);
  std::copy(weights.begin(), weights.end(), loaded.parameter.begin());
  if (!loaded.is_own) {  // a program has set the masters from the parameters on the device
    std::vector<float> values(weights.size());
    cast(reinterpret_cast<const std::byte*>(weights.data()), DType::bf16,
         reinterpret_cast<std::byte*>(values.data()), DType::f32, loaded.numel);
    loaded.state->import_from(0, StatePlane::master, 0, values);
  }
  const std::vector<StateOf> parameters = {
      {{kName, Role::param, DType::bf16, kShape}, loaded.form().format, loaded.form().is_master}};
  state.require_of(parameters);
  ScriptedBoard board(1);
  ComparedChunks compared(checkpoint.manifest);
  StateFacts facts;
  facts.steps = kSteps;
  const auto shards = [&](FunctionRef<void(const HeldShard&)> fn) {
    fn({*loaded.state, 0, kName});
  };
  load_state({checkpoint, state, facts}, shards, {0, &board, nullptr, &loaded.ledger}, compared);
}

void expect_equal(const ShardState& got, const ShardState& expected) {
  for (const Plane plane : {Plane::master, Plane::master_low, Plane::exp_avg, Plane::exp_avg_sq}) {
    const auto a = got.state->plane(0, plane), b = expected.state->plane(0, plane);
    ASSERT_EQ(a.size(), b.size());
    EXPECT_TRUE(std::equal(a.begin(), a.end(), b.begin())) << static_cast<int>(plane);
    const auto c = got.state->scales(0, plane), d = expected.state->scales(0, plane);
    EXPECT_TRUE(std::equal(c.begin(), c.end(), d.begin(), d.end())) << static_cast<int>(plane);
  }
  EXPECT_TRUE(!got.is_own || got.parameter == expected.parameter);
  EXPECT_EQ(got.state->steps(0), kSteps);
}

class StateLoads : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Masters, StateLoads, testing::Bool());

TEST_P(StateLoads, GiveTheBitsOfAnImport) {
  for (const StateFormatRow& from : state_formats()) {
    ShardState saved(from.format, GetParam(), kWhole);
    std::vector<float> master(kNumel), exp_avg(kNumel), exp_avg_sq(kNumel);
    for (size_t i = 0; i < master.size(); ++i) {
      master[i] = std::sin(static_cast<float>(i)) * (i % 7 == 0 ? 1e-3F : 1.0F);
      exp_avg[i] = std::cos(static_cast<float>(i)) * 1e-2F;
      exp_avg_sq[i] = exp_avg[i] * exp_avg[i];
    }
    master[1] = 1.00390625F;  // a tie between two bf16
    saved.set_master(master);
    saved.state->import_from(0, StatePlane::exp_avg, 0, exp_avg);
    saved.state->import_from(0, StatePlane::exp_avg_sq, 0, exp_avg_sq);
    for (const StateFormatRow& to : state_formats()) {
      for (const bool is_own : {false, true}) {
        for (const auto& runs : {kWhole, kRows, kCut}) {
          if (to.has_scales() && runs.front().first == kCut.front().first) continue;
          SCOPED_TRACE(testing::Message() << from.name << " to " << to.name << " own " << is_own
                                          << " from " << runs.front().first);
          ShardState got(to.format, is_own, runs), expected(to.format, is_own, runs);
          load(saved, got);
          expected.set_master(part_of(saved.values(StatePlane::master), expected));
          for (const StatePlane plane : {StatePlane::exp_avg, StatePlane::exp_avg_sq}) {
            expected.state->import_from(0, plane, 0, part_of(saved.values(plane), expected));
          }
          expect_equal(got, expected);
          if (HasFailure()) return;
        }
      }
    }
  }
}

}  // namespace
}  // namespace modicum
