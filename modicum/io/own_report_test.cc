#include "modicum/io/own_report.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

namespace modicum {
namespace {

// House test. It catches these mutations: a file of the user's that is written to; memory that can
// be truncated under its writers; a variable that is not followed.

size_t at(Purpose purpose) { return static_cast<size_t>(purpose); }

class Variable {
 public:
  explicit Variable(const std::string& value) { setenv(kWatchVariable, value.c_str(), 1); }
  ~Variable() { unsetenv(kWatchVariable); }
  Variable(const Variable&) = delete;
};

TEST(OwnReport, IsWrittenToTheMemoryOfTheWatcher) {
  const ReportPages made = ReportPages::make();
  const Variable variable(made.path());
  OwnReport own;
  own.begin([] { return uint64_t{5}; });
  own.reporter().add(Purpose::staging, 77);
  EXPECT_EQ(made.table().pids[0].load(), getpid());
  EXPECT_EQ(made.table().reports[0].held[at(Purpose::staging)].load(), 77U);
  EXPECT_EQ(made.table().reports[0].baseline_bytes.load(), 5U);
}

TEST(OwnReport, WithoutAWatcherNothingIsReadOrReported) {
  unsetenv(kWatchVariable);
  OwnReport own;
  own.begin([]() -> uint64_t {
    ADD_FAILURE() << "the baseline costs time";
    return 0;
  });
  own.reporter().add(Purpose::staging, 77);
}

TEST(ReportPages, CannotBeTruncated) {
  const ReportPages made = ReportPages::make();
  EXPECT_NE(::truncate(made.path().c_str(), 4096), 0);
}

// A file of the right size, even with a table in it, is neither accepted nor changed.
TEST(ReportPages, OtherFilesAreLeftAlone) {
  const std::string path = testing::TempDir() + "modicum-not-reports";
  std::vector<char> content(sizeof(SelfReports), 0);
  const ReportPages made = ReportPages::make();
  std::memcpy(content.data(), &made.table(), kPageBytes);
  std::ofstream(path, std::ios::binary).write(content.data(), std::ssize(content));
  EXPECT_FALSE(ReportPages::open(path).has_value());
  std::ifstream read(path, std::ios::binary);
  EXPECT_EQ(std::vector<char>(std::istreambuf_iterator<char>(read), {}), content);
  ::unlink(path.c_str());
  EXPECT_FALSE(ReportPages::open(path).has_value()) << "no such file";
  EXPECT_FALSE(ReportPages::open("").has_value());
  EXPECT_FALSE(ReportPages::open("/dev/zero").has_value());
  EXPECT_FALSE(ReportPages::open("/tmp").has_value());
}

TEST(ReportPages, AFifoIsNotWaitedFor) {
  const std::string path = testing::TempDir() + "modicum-fifo";
  ::unlink(path.c_str());
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  EXPECT_FALSE(ReportPages::open(path).has_value());
  ::unlink(path.c_str());
}

// Sealed memory of another program, of the same size.
TEST(ReportPages, MemoryWithoutATableIsLeftAlone) {
  const int fd = memfd_create("other", MFD_ALLOW_SEALING);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(::ftruncate(fd, sizeof(SelfReports)), 0);
  ASSERT_EQ(::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  EXPECT_FALSE(ReportPages::open(path).has_value());
  ::close(fd);
}

}  // namespace
}  // namespace modicum
