#include "modicum/spec/footprint.h"

#include <gtest/gtest.h>

#include "modicum/base/base.h"

namespace modicum {
namespace {

Footprint footprint_of(uint64_t process, uint64_t shards, uint64_t staging) {
  Footprint footprint;
  footprint[Purpose::process] = process;
  footprint[Purpose::shards] = shards;
  footprint[Purpose::staging] = staging;
  return footprint;
}

TEST(Footprint, TheLedgersTotalExcludesTheProcess) {
  Footprint footprint = footprint_of(10, 2, 3);
  footprint[Purpose::page_tables] = 100;
  EXPECT_EQ(footprint.total(), 115u);
  EXPECT_EQ(footprint.ledger_total(), 5u);
}

// Rank 0 peaks while loading, rank 1 while holding; rank 2 is on another node.
Promise two_nodes() {
  return {
      .phases = {{"load", {footprint_of(1, 20, 5), footprint_of(1, 10, 0), footprint_of(1, 7, 0)}},
                 {"hold", {footprint_of(1, 20, 0), footprint_of(1, 30, 0), footprint_of(1, 7, 0)}}},
      .node_of_rank = {0, 0, 1},
      .launcher_bytes = 1000};
}

TEST(Promise, ANodesPeakIsTheSumOfEachRanksOwnPeakAndTheLauncher) {
  const Promise promise = two_nodes();
  EXPECT_EQ(promise.ranks(), 3);
  EXPECT_EQ(promise.nodes(), 2);
  EXPECT_EQ(promise.node_peak_bytes(0), 1000u + 26 + 31);
  EXPECT_EQ(promise.node_peak_bytes(1), 1000u + 8);
  EXPECT_EQ(promise.on_node(0), footprint_of(1002, 50, 5));
  EXPECT_EQ(promise.on_node(0, &promise.phases[1]), footprint_of(1002, 50, 0));
}

TEST(Promise, PeakPhaseHasTheHighestTotal) {
  const Promise promise = two_nodes();
  EXPECT_EQ(promise.peak_phase(0).name, "load");
  EXPECT_EQ(promise.peak_phase(1).name, "hold");
  EXPECT_EQ(promise.peak_phase(2).name, "load") << "the first of equal phases";
  EXPECT_EQ(promise.rank_peak_bytes(1), 31u);
}

TEST(PageTables, AreEightBytesPerPageInWholePagesAndAPagePerGiB) {
  EXPECT_EQ(page_table_bytes(0), 0U);
  EXPECT_EQ(page_table_bytes(1), kPageBytes);
  EXPECT_EQ(page_table_bytes(2 * kMiB), 2 * kPageBytes);
  EXPECT_EQ(page_table_bytes(kGiB), 512 * kPageBytes + kPageBytes);
  EXPECT_EQ(page_table_bytes(4 * kGiB), 4 * (512 * kPageBytes + kPageBytes));
  EXPECT_EQ(page_table_bytes(kGiB + 2 * kMiB), 513 * kPageBytes + 2 * kPageBytes);
}

}  // namespace
}  // namespace modicum
