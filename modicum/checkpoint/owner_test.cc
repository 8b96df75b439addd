// The owners of work in flight, with doubles for boot ids, file systems, locks and the file
// server's clock. Catches: anything of a living owner that is removed or taken over; a dead owner's
// that stays; two owners of one output.
#include "modicum/checkpoint/owner.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "modicum/base/base.h"
#include "modicum/base/clock_double.h"
#include "modicum/checkpoint/checkpoint.h"
#include "modicum/io/file_doubles.h"

namespace modicum {
namespace {

using Names = std::vector<std::string>;

// Processes of one host name. The last number is the start of the container's first process.
const SaveOwner kOwner{"host.boot_a.5", 7, 11};
const SaveOwner kContainer{"host.boot_a.9", 7, 13};  // on the same kernel
const SaveOwner kElsewhere{"host.boot_b.5", 7, 11};  // after a reboot, or another kernel

constexpr int64_t kMinuteNs = 60 * kNsPerSecond;

bool never_asked(const SaveOwner&) {
  ADD_FAILURE() << "an owner with a file was judged by its pid";
  return true;
}

class Owners : public testing::Test {
 protected:
  Owners() { files.make_directory("/root"); }

  // A save in flight.
  void begin() {
    step = begin_checkpoint(files, "/root", 2, kOwner);
    owner = own_checkpoint(files, step);
  }
  // The process of the save is killed.
  void kill() { owner.reset(); }
  // Whether a save by `other` leaves the one in flight, and reports it.
  bool stays(const SaveOwner& other,
             const std::function<bool(const SaveOwner&)>& is_dead = never_asked) {
    const Names warnings = remove_leftovers(files, {.root = "/root", .owner = other}, is_dead);
    const bool is_left = files.exists(step.directory);
    EXPECT_EQ(warnings, is_left ? Names{base_name(step.directory) +
                                        " of another save is left over or in flight"}
                                : Names{});
    EXPECT_EQ(files.list("/root"), is_left ? Names{base_name(step.directory)} : Names{});
    return is_left;
  }
  Category taken_over() {
    try {
      owner->require_ours();
    } catch (const Error& error) {
      return error.category();
    }
    return Category::count;
  }

  MemoryFileSystem files;
  CheckpointInFlight step;
  std::unique_ptr<OwnerFile> owner;
};

// Catches: a transient error that counts as another process that has taken over.
TEST_F(Owners, ARecordThatCantBeReadIsAnIoError) {
  begin();
  EXPECT_EQ(taken_over(), Category::count);
  files.put(join_path(step.directory, kOwnerFile), "");
  EXPECT_EQ(taken_over(), Category::io);
}

TEST_F(Owners, OfThisKernelAreAskedByTheirLock) {
  begin();
  EXPECT_TRUE(stays(kContainer));
  files.advance_ns(60 * kMinuteNs);
  EXPECT_TRUE(stays(kContainer)) << "a lock needs no renewal";
  kill();
  EXPECT_FALSE(stays(kContainer));
}

TEST_F(Owners, OfThisKernelAreAskedByTheirLockOnANetwork) {
  files.be_on_a_network();
  begin();
  files.advance_ns(60 * kMinuteNs);
  EXPECT_TRUE(stays(kContainer));
  kill();
  EXPECT_FALSE(stays(kContainer));
}

TEST_F(Owners, OfAnotherBootAreDeadOnALocalDiskWithoutTheirLock) {
  begin();
  EXPECT_TRUE(stays(kElsewhere)) << "a container with a boot id of its own";
  kill();
  EXPECT_FALSE(stays(kElsewhere));
}

TEST_F(Owners, OfAnotherHostLiveForTenMinutesAfterTheyWereSeen) {
  files.be_on_a_network();
  begin();
  kill();
  EXPECT_TRUE(stays(kElsewhere)) << "its lock can't be seen from another host";
  files.advance_ns(9 * kMinuteNs);
  EXPECT_TRUE(stays(kElsewhere));
  files.advance_ns(2 * kMinuteNs);
  EXPECT_FALSE(stays(kElsewhere));
}

TEST_F(Owners, WithoutLocksHaveALeaseOnAnyDisk) {
  files.have_no_locks();
  begin();
  EXPECT_TRUE(stays(kContainer));
  files.advance_ns(9 * kMinuteNs);
  EXPECT_TRUE(stays(kContainer));
  files.advance_ns(2 * kMinuteNs);
  EXPECT_FALSE(stays(kContainer));
}

TEST_F(Owners, ThatCannotBeAskedLive) {
  begin();
  kill();
  files.have_no_locks();  // since then the kernel can't tell
  files.advance_ns(60 * kMinuteNs);
  EXPECT_TRUE(stays(kContainer));
}

// A save may be killed before it has written the record.
TEST_F(Owners, WithAFileThatIsNoRecordAreJudgedByTheirName) {
  const auto is_dead = [](const SaveOwner&) { return true; };
  const auto is_alive = [](const SaveOwner&) { return false; };
  for (const std::string text : {"", "{", "{}", "[]", R"({"uuid":7})"}) {
    const auto begin_with = [&] {
      step = begin_checkpoint(files, "/root", 2, kOwner);
      files.put(join_path(step.directory, kOwnerFile), text);
    };
    begin_with();
    EXPECT_TRUE(stays(kContainer, is_alive)) << text;
    const auto lock = files.lock(join_path(step.directory, kOwnerFile));
    EXPECT_TRUE(stays(kOwner, is_dead)) << text;
    files.advance_ns(11 * kMinuteNs);
    EXPECT_TRUE(stays(kOwner, is_dead)) << text;
    files.remove_tree(step.directory);
    begin_with();
    EXPECT_FALSE(stays(kOwner, is_dead)) << text;
    begin_with();
    files.advance_ns(11 * kMinuteNs);
    EXPECT_FALSE(stays(kContainer, is_alive)) << text;
  }
}

TEST_F(Owners, AreRenewedWhereALeaseCounts) {
  const auto mtime_of = [&](const std::string& path) { return *files.look_at(path)->mtime_ns; };
  const auto owner_file = [&](const std::string& name) {
    const std::string path = "/root/" + name;
    return std::make_unique<OwnerFile>(files, path, files.lock(path), OwnerRecord{kOwner, name},
                                       kNsPerMs);
  };
  const auto on_disk = owner_file("disk");
  const int64_t made_ns = mtime_of("/root/disk");
  files.be_on_a_network();
  auto on_network = owner_file("network");
  const int64_t first_ns = mtime_of("/root/network");
  SteadyClock clock;
  const int64_t end_ns = clock.now_ns() + 20 * kNsPerSecond;
  while (mtime_of("/root/network") < first_ns + 3 && clock.now_ns() < end_ns) {
    clock.sleep_ns(kNsPerMs);
  }
  EXPECT_GE(mtime_of("/root/network"), first_ns + 3);
  EXPECT_EQ(mtime_of("/root/disk"), made_ns);
  EXPECT_EQ(parse_owner(files.get("/root/network"))->uuid, "network");
  on_network.reset();
  const int64_t last_ns = mtime_of("/root/network");
  clock.sleep_ns(5 * kNsPerMs);
  EXPECT_EQ(mtime_of("/root/network"), last_ns);
}

TEST_F(Owners, ThatWereTakenOverFindOut) {
  begin();
  EXPECT_EQ(taken_over(), Category::count);
  files.put(join_path(step.directory, kOwnerFile), owner_json({kElsewhere, "another"}));
  EXPECT_EQ(taken_over(), Category::conflict);
  owner->remove();
  EXPECT_EQ(files.list(step.directory), Names{kOwnerFile}) << "the file is another owner's";
  files.remove_tree(step.directory);
  EXPECT_EQ(taken_over(), Category::conflict);
}

TEST_F(Owners, WithoutAFileAreJudgedByTheirName) {
  const auto is_dead = [](const SaveOwner& process) { return process.pid == 8; };
  for (const auto& [owner_of, stays_here, stays_on_network] :
       std::vector<std::tuple<SaveOwner, bool, bool>>{
           {kOwner, true, true},
           {{kOwner.host, 8, 11}, false, false},
           {{"of.no.boot_id", 8, 11}, false, true},
           {{"", 7, 11}, true, true},
       }) {
    for (const bool is_network : {false, true}) {
      MemoryFileSystem other;
      if (is_network) other.be_on_a_network();
      other.make_directory("/root");
      const CheckpointInFlight left = begin_checkpoint(other, "/root", 2, owner_of);
      remove_leftovers(other, {.root = "/root", .owner = kOwner}, is_dead);
      EXPECT_EQ(other.exists(left.directory), is_network ? stays_on_network : stays_here)
          << owner_of.host << owner_of.pid << is_network;
    }
  }
}

TEST_F(Owners, ANewLatestIsLeftOverAfterTenMinutes) {
  files.put("/root/.latest-2-host.boot_a.9-7-13-0", "step-2");
  const auto leftovers = [&] {
    EXPECT_EQ(remove_leftovers(files, {.root = "/root", .owner = kOwner},
                               [](const SaveOwner&) { return false; }),
              Names{});
    return files.list("/root").size();
  };
  EXPECT_EQ(leftovers(), 1U);
  files.advance_ns(11 * kMinuteNs);
  EXPECT_EQ(leftovers(), 0U);
}

// ---- the lock of a root

TEST_F(Owners, ASaveWaitsForTheRootsLockAndThenGoesOn) {
  FakeClock clock;
  {
    const RootLock first(files, "/root", kMinuteNs, clock);
    EXPECT_FALSE(first.is_refused());
    EXPECT_EQ(clock.now_ns(), 0);
    const RootLock second(files, "/root", kMinuteNs, clock);
    EXPECT_TRUE(second.is_refused());
    EXPECT_GE(clock.now_ns(), kMinuteNs);
    EXPECT_LT(clock.now_ns(), kMinuteNs + kNsPerSecond);
    EXPECT_EQ(files.list("/root"), Names{".lock"});
  }
  EXPECT_EQ(files.list("/root"), Names{}) << "the owner of the lock removes the file";
  const RootLock third(files, "/root", 0, clock);
  EXPECT_FALSE(third.is_refused());
}

TEST_F(Owners, AStopSignalEndsTheWait) {
  FakeClock clock;
  const RootLock first(files, "/root", kMinuteNs, clock);
  EXPECT_THROW(
      RootLock(files, "/root", kMinuteNs, clock, [] { fail(Category::preempted, "stopped"); }),
      Error);
  EXPECT_EQ(files.list("/root"), Names{".lock"});
}

TEST_F(Owners, WithoutLocksOrWithAForeignFileASaveGoesOn) {
  FakeClock clock;
  files.have_no_locks();
  const RootLock first(files, "/root", kMinuteNs, clock);
  EXPECT_FALSE(first.is_refused());
  RecordingFileSystem failing(files, 1);
  failing.fail_with(EACCES);
  const RootLock second(failing, "/root", kMinuteNs, clock);
  EXPECT_FALSE(second.is_refused());
  EXPECT_EQ(clock.now_ns(), 0);
}

// ---- conversions

class Conversions : public testing::Test {
 protected:
  using Journal = std::unique_ptr<ConversionJournal>;

  static ConversionJournal::Inputs inputs(const SaveOwner& process, bool adopts = false) {
    return {digest_of("inputs"), process, never_asked, false, adopts};
  }
  // A conversion that `process` begins, or the text of its CONFLICT, which changes nothing.
  Journal begin(const SaveOwner& process, bool adopts = false) {
    const Names before = around();
    try {
      return std::make_unique<ConversionJournal>(files, "/a/out", inputs(process, adopts));
    } catch (const Error& error) {
      EXPECT_EQ(error.category(), Category::conflict) << error.what();
      EXPECT_EQ(around(), before);
      refusal = error.what();
      return nullptr;
    }
  }
  Names around() { return files.exists("/a") ? files.list("/a") : Names{}; }
  void finish_file(ConversionJournal& journal, const std::string& name) {
    write_durably(files, join_path(journal.directory(), name), name);
    journal.add({name, name.size(), 1, std::vector<TensorLoss>{}});
  }
  // A conversion that is killed after its first file.
  void begin_and_kill(const SaveOwner& process) {
    Journal killed = begin(process);
    if (killed->finished("first", 5) == nullptr) finish_file(*killed, "first");
    const std::string record = files.get("/a/.out.owner");
    killed.reset();
    files.put("/a/.out.owner", record);
  }
  static Category category_of(const std::function<void()>& call) {
    try {
      call();
    } catch (const Error& error) {
      return error.category();
    }
    return Category::count;
  }

  MemoryFileSystem files;
  std::string refusal;
};

TEST_F(Conversions, OfOneOutputAreRefusedAtOnceWhileOneLives) {
  Journal first = begin(kOwner);
  EXPECT_EQ(begin(kContainer), nullptr);
  EXPECT_NE(refusal.find("--adopt"), std::string::npos) << refusal;
  EXPECT_EQ(begin(kContainer, true), nullptr) << "--adopt took over from a living process";
  finish_file(*first, "first");
  first->publish();
  EXPECT_EQ(files.list("/a/out"), Names{"first"});
  first.reset();
  EXPECT_EQ(around(), Names{"out"});
}

TEST_F(Conversions, ThatWereKilledGoOn) {
  begin_and_kill(kOwner);
  const Journal next = begin(kContainer);
  EXPECT_NE(next->finished("first", 5), nullptr);
}

TEST_F(Conversions, OfALocalDiskGoOnAtOnceAfterAReboot) {
  begin_and_kill(kOwner);
  const Journal next = begin(kElsewhere);
  EXPECT_NE(next->finished("first", 5), nullptr);
}

TEST_F(Conversions, OfAnotherHostGoOnAfterTenMinutesOrIfAdopted) {
  files.be_on_a_network();
  begin_and_kill(kOwner);
  EXPECT_EQ(begin(kElsewhere), nullptr);
  EXPECT_NE(refusal.find("--adopt"), std::string::npos) << refusal;
  EXPECT_NE(begin(kElsewhere, true)->finished("first", 5), nullptr);
  begin_and_kill(kOwner);
  files.advance_ns(11 * kMinuteNs);
  EXPECT_NE(begin(kElsewhere)->finished("first", 5), nullptr);
}

// The other host's process is only cut off, or stopped: the file server still has its lock.
TEST_F(Conversions, ThatWereTakenOverPublishNothing) {
  files.be_on_a_network();
  const Journal first = begin(kOwner);
  finish_file(*first, "first");
  EXPECT_EQ(begin(kElsewhere), nullptr);
  const Journal second = begin(kElsewhere, true);
  ASSERT_NE(second, nullptr);
  EXPECT_NE(second->finished("first", 5), nullptr);
  EXPECT_EQ(category_of([&] { first->add({"more", 4, 1, {}}); }), Category::conflict);
  EXPECT_EQ(category_of([&] { first->publish(); }), Category::conflict);
  EXPECT_FALSE(files.exists("/a/out"));
  EXPECT_EQ(second->recorded().size(), 1U);
  second->publish();
  EXPECT_EQ(files.list("/a/out"), Names{"first"});
}

TEST_F(Conversions, OfVersion01GoOn) {
  begin_and_kill(kOwner);
  files.remove("/a/.out.owner");
  std::string journal = files.get("/a/.out.journal");
  const size_t at = journal.find("\"uuid\"");
  journal.erase(at, journal.find("\"inputs\"") - at);
  const auto is_refused = [&](const SaveOwner& process, bool is_dead, bool adopts) {
    files.put("/a/.out.journal", journal);
    ConversionJournal::Inputs journal_inputs = inputs(process, adopts);
    journal_inputs.is_dead = [is_dead](const SaveOwner& owner) {
      return is_dead && owner.pid == 7;
    };
    return category_of([&] {
             EXPECT_NE(ConversionJournal(files, "/a/out", journal_inputs).finished("first", 5),
                       nullptr);
           }) == Category::conflict;
  };
  EXPECT_TRUE(is_refused(kOwner, false, true)) << "the process lives";
  EXPECT_FALSE(is_refused(kOwner, true, false));
  EXPECT_FALSE(is_refused(kElsewhere, false, false)) << "after a reboot";
  EXPECT_TRUE(is_refused(kContainer, false, false)) << "its container can't be seen";
  EXPECT_FALSE(is_refused(kContainer, false, true));
  files.be_on_a_network();
  EXPECT_TRUE(is_refused(kElsewhere, false, false));
  EXPECT_FALSE(is_refused(kElsewhere, false, true));
  EXPECT_EQ(files.list("/a"), (Names{".out.journal", ".out.partial"}));
}

// A second conversion begins just before each call of the first, and ends at once or goes on: one
// of them gets the output, and its files stay.
TEST_F(Conversions, ThatBeginTogetherHaveOneOwner) {
  int64_t calls = 1;
  const auto begin_in = [](FileSystem& in, const SaveOwner& process, Journal& journal) {
    return category_of([&] {
      journal = std::make_unique<ConversionJournal>(in, "/a/out", inputs(process));
      write_durably(in, join_path(journal->directory(), "file"), "x");
    });
  };
  const auto finish = [](Journal& journal) {
    journal->add({"file", 1, 1, {}});
    journal->publish();
    journal.reset();
  };
  for (const bool ends_at_once : {false, true}) {
    for (int64_t n = 0; n <= calls; ++n) {  // 0: the second never begins
      MemoryFileSystem under;
      under.put("/a/.out.partial/old", "x");
      under.put("/a/.out.journal", R"({"uuid":"u","inputs":"others","files":[]})");
      RecordingFileSystem recorded(under);
      Journal first, second;
      Category of_second = Category::conflict;
      recorded.before_call(n, [&] {
        of_second = begin_in(under, kContainer, second);
        if (second && ends_at_once) finish(second);
      });
      const Category of_first = begin_in(recorded, kOwner, first);
      if (n == 0) calls = static_cast<int64_t>(recorded.calls().size());
      const bool has_first_won = of_first == Category::count;
      EXPECT_EQ(has_first_won ? of_second : of_first, Category::conflict) << n;
      if (first || second) finish(has_first_won ? first : second);
      EXPECT_EQ(under.list("/a"), Names{"out"}) << n;
      EXPECT_EQ(under.list("/a/out"), Names{"file"}) << n;
    }
  }
  EXPECT_GT(calls, 10);
}

}  // namespace
}  // namespace modicum
