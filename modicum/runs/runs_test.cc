#include "modicum/runs/runs.h"

#include <gtest/gtest.h>

#include <functional>

#include "modicum/io/file_doubles.h"

namespace modicum {
namespace {

// Two tensors of bf16 in one file: 12 rows of 16, and one element.
void put_checkpoint(FileSystem& files) {
  files.make_directory("/model");
  const std::vector<TensorSpec> tensors = {{.fqn = "w", .dtype = DType::bf16, .shape = {12, 16}},
                                           {.fqn = "s", .dtype = DType::bf16, .shape = {1}}};
  SafetensorsWriter(files, "/model/model.safetensors", tensors).finish();
}

RunFlags flags_of(const std::function<void(RunFlags&)>& change) {
  RunFlags flags{.directory = "/model"};
  change(flags);
  return flags;
}

std::optional<Category> failure(FileSystem& files, const RunFlags& flags) {
  try {
    open_run(files, flags);
  } catch (const Error& error) {
    return error.category();
  }
  return std::nullopt;
}

TEST(Runs, WhatMakesNoSenseIsRefusedBeforeAnyFileIsTouched) {
  MemoryFileSystem memory;
  put_checkpoint(memory);
  RecordingFileSystem files(memory);
  const std::vector<std::function<void(RunFlags&)>> senseless = {
      [](RunFlags& f) { f.ranks = 0; },
      [](RunFlags& f) { f.ranks = kMaxRanks + 1; },
      [](RunFlags& f) { f.ranks_per_node = 0; },
      [](RunFlags& f) { f.ranks_per_node = -1; },
      [](RunFlags& f) { f.shard_dim = -1; },
      [](RunFlags& f) { f.shard_dim = kMaxShardDim + 1; },
      [](RunFlags& f) { f.strategy = "own-shards"; },
      [](RunFlags& f) { f.layout = "fsdp3"; },
      [](RunFlags& f) { f.dtype = "int8"; },
      [](RunFlags& f) { f.destination = "gpu"; },
      [](RunFlags& f) { f.staging = "much"; },
      [](RunFlags& f) { f.baseline = "-1"; }};
  for (const auto& change : senseless) {
    EXPECT_EQ(failure(files, flags_of(change)), Category::usage);
  }
  EXPECT_TRUE(files.calls().empty());
  EXPECT_EQ(failure(files, flags_of([](RunFlags&) {})), std::nullopt);
}

TEST(Runs, TheLastNodeMayHaveFewerRanks) {
  EXPECT_EQ(nodes_of({.ranks = 8}), 1);
  EXPECT_EQ(nodes_of({.ranks = 8, .ranks_per_node = 4}), 2);
  EXPECT_EQ(nodes_of({.ranks = 9, .ranks_per_node = 4}), 3);
  EXPECT_EQ(nodes_of({.ranks = 2, .ranks_per_node = 4}), 1);
}

TEST(Runs, TheVerdictIsAboutTheStrategyThatWasAskedFor) {
  MemoryFileSystem files;
  put_checkpoint(files);
  RunFlags flags{.directory = "/model", .ranks = 4, .staging = "1MiB"};
  const PlanReport without = plan_report(files, flags, "");
  EXPECT_FALSE(without.fits.has_value());
  EXPECT_FALSE(plan_report(files, flags, "none").fits.has_value());
  for (const StrategyReport& of : without.strategies) {
    flags.strategy = of.strategy;
    const uint64_t peak = of.promise.node_peak_bytes(0);
    EXPECT_EQ(plan_report(files, flags, std::to_string(peak)).fits, true) << of.strategy;
    EXPECT_EQ(plan_report(files, flags, std::to_string(peak - 1)).fits, false) << of.strategy;
  }
}

TEST(Runs, OnlyTheDefaultStagingShrinksToFit) {
  MemoryFileSystem files;
  put_checkpoint(files);
  const auto peak = [&](const std::string& staging, const std::string& budget) {
    // The cast is what needs staging here.
    const RunFlags flags{.directory = "/model", .dtype = "float32", .staging = staging};
    const modicum::Run run = open_run(files, flags);
    const auto allowed = budget.empty() ? std::nullopt : budget_of(budget, 1);
    return plan_run(run, *run.options.strategy, allowed).promise.node_peak_bytes(0);
  };
  EXPECT_LT(peak("", "14MiB"), peak("", ""));
  EXPECT_EQ(peak("8MiB", "14MiB"), peak("8MiB", ""));
}

// house: how much more than what is needed is read. Contiguous cuts read next to nothing else;
// columns of a narrow matrix can't be had without the bytes between them.
TEST(Runs, ThePlanSaysHowMuchIsOverread) {
  MemoryFileSystem files;
  files.make_directory("/model");
  std::vector<TensorSpec> tensors;
  for (int64_t i = 0; i < 40; ++i) {
    tensors.push_back({.fqn = "w" + std::to_string(i), .dtype = DType::bf16, .shape = {i, 64}});
  }
  SafetensorsWriter(files, "/model/model.safetensors", tensors).finish();
  RunFlags flags{.directory = "/model", .ranks = 4};
  const auto ratio_of = [&](std::string_view strategy) {
    for (const StrategyReport& of : plan_report(files, flags, "").strategies) {
      if (of.strategy == strategy) return of.overread_ratio();
    }
    return 0.0;
  };
  EXPECT_GE(ratio_of("own-shard"), 1);
  EXPECT_LE(ratio_of("own-shard"), 1.02);
  EXPECT_DOUBLE_EQ(ratio_of("rank0-broadcast"), 1);
  EXPECT_DOUBLE_EQ(ratio_of("full-per-rank"), 4);
  flags.shard_dim = 1;  // runs of 32 bytes, 128 apart
  EXPECT_GT(ratio_of("own-shard"), 3);
  EXPECT_LT(ratio_of("own-shard"), 4);
  EXPECT_DOUBLE_EQ(ratio_of("full-per-rank"), 4);
}

}  // namespace
}  // namespace modicum
