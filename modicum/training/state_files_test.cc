#include "modicum/training/state_files.h"

#include <gtest/gtest.h>

#include <tuple>

namespace modicum {
namespace {

// The parameters are not sorted by name. Catches: spans are in the order of the parameters or
// planes, so that ranks write to shared pages at different times.
TEST(StateFiles, SpansAreInTheOrderOfTheFiles) {
  const std::vector<std::string> names = {"layers.2.w", "embed", "layers.10.w"};
  for (const StateFormatRow& row : state_formats()) {
    AdamWSpec spec{.format = row.format};
    std::vector<StateOf> parameters;
    for (const std::string& name : names) {
      const TensorSpec parameter{name, Role::param, DType::bf16, {4, 256}};
      parameters.push_back({parameter, row.format, false});
      // Half of each row.
      std::vector<ShardRun> runs;
      for (int64_t r = 0; r < 4; ++r) runs.push_back({256 * r, 128});
      spec.shards.push_back({.fqn = name, .runs = runs, .row = 256});
    }
    Ledger ledger;
    AdamW state(spec, ledger, 1);
    const StateFiles files(parameters);
    const auto shards = [&](FunctionRef<void(const HeldShard&)> fn) {
      for (size_t i = 0; i < names.size(); ++i) fn({state, i, names[i]});
    };
    std::tuple<uint32_t, uint64_t> reached{};
    size_t spans = 0;
    files.for_each_span(shards, [&](const StoredSpan& span) {
      const Extent& at = files.manifest().tensors[span.stored].at;
      const std::tuple begin(at.file, at.begin + span.at);
      EXPECT_TRUE(spans++ == 0 || begin > reached) << row.name;
      reached = begin;
    });
    EXPECT_GE(spans, names.size() * 2 * 4) << row.name;  // two moments, four runs
  }
}

}  // namespace
}  // namespace modicum
