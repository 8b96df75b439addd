#include "modicum/ranks/own_report.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string>

namespace modicum {
namespace {

// Catches: memory of another program is written to; the baseline is read without a watcher.

class Variable {
 public:
  explicit Variable(const std::string& value) { setenv(kWatchVariable, value.c_str(), 1); }
  ~Variable() { unsetenv(kWatchVariable); }
  Variable(const Variable&) = delete;
};

uint64_t no_baseline() {
  ADD_FAILURE() << "the baseline is read without a watcher";
  return 0;
}

TEST(OwnReport, IsWrittenToTheMemoryOfTheWatcher) {
  const SharedPages pages = SharedPages::make(sizeof(SelfReports));
  const SelfReports& table = SelfReports::make_in(pages.bytes());
  const Variable variable(pages.path());
  OwnReport report;
  report.begin([] { return kGiB; });
  report.reporter().add(Purpose::staging, 77);
  EXPECT_EQ(table.pids[0].load(), getpid());
  EXPECT_EQ(table.reports[0].held_bytes[static_cast<size_t>(Purpose::staging)].load(), 77U);
  EXPECT_EQ(table.reports[0].baseline_bytes + table.reports[0].retained_heap_bytes, kGiB);
}

TEST(OwnReport, WithoutAWatcherNothingIsReadOrReported) {
  unsetenv(kWatchVariable);
  OwnReport report;
  report.begin(no_baseline);
  report.reporter().add(Purpose::staging, 77);
}

TEST(OwnReport, MemoryWithoutATableIsLeftAlone) {
  const SharedPages pages = SharedPages::make(sizeof(SelfReports));
  const Variable variable(pages.path());
  OwnReport report;
  report.begin(no_baseline);
  report.reporter().add(Purpose::staging, 77);
  const auto bytes = pages.bytes();
  EXPECT_TRUE(
      std::all_of(bytes.begin(), bytes.end(), [](std::byte byte) { return byte == std::byte{0}; }));
}

TEST(OwnReport, AnyOtherPathIsIgnored) {
  for (const char* const path : {"", "/dev/null", "/proc/self/fd/999", "relative/x"}) {
    const Variable variable(path);
    OwnReport report;
    report.begin(no_baseline);
    report.reporter().add(Purpose::staging, 77);
  }
}

}  // namespace
}  // namespace modicum
