#include "modicum/io/file.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <fstream>
#include <optional>
#include <thread>

#include "modicum/base/base.h"
#include "modicum/base/error_double.h"
#include "modicum/io/errno_error.h"
#include "modicum/io/file_doubles.h"
#include "modicum/io/io.h"
#include "modicum/io/temp_dir_double.h"

namespace modicum {
namespace {

std::span<const std::byte> as_bytes(const std::string& text) {
  return std::as_bytes(std::span(text));
}

// The `size` bytes of the file from `offset` on.
std::string read_text(File& file, uint64_t offset, size_t size) {
  std::string text(size, '?');
  file.read(std::as_writable_bytes(std::span(text)), offset);
  return text;
}

void write_file(FileSystem& files, const std::string& path, const std::string& text) {
  const std::unique_ptr<File> file = files.create(path);
  file->write(as_bytes(text), 0);
  file->sync();
  file->close();
}

#define EXPECT_FAILS(wanted, ...)                                                \
  do {                                                                           \
    const std::optional<Error> thrown_ = error_of([&] { (void)(__VA_ARGS__); }); \
    ASSERT_TRUE(thrown_) << "expected an error";                                 \
    EXPECT_EQ(thrown_->category(), wanted) << thrown_->what();                   \
  } while (false)

// The contract of FileSystem, tested on PosixFileSystem (parameter true) and on MemoryFileSystem
// (false).
class FileSystemTest : public testing::TestWithParam<bool> {
 protected:
  FileSystemTest() {
    if (!GetParam()) memory_.make_directory("dir");
  }
  FileSystem& files() { return GetParam() ? static_cast<FileSystem&>(posix_) : memory_; }
  std::string at(const std::string& name) const {
    return GetParam() ? temp_ / name : join_path("dir", name);
  }
  std::string directory() const { return GetParam() ? temp_.path() : "dir"; }

 private:
  TempDir temp_;
  PosixFileSystem posix_;
  MemoryFileSystem memory_;
};

INSTANTIATE_TEST_SUITE_P(Both, FileSystemTest, testing::Bool(), [](const auto& which) {
  return which.param ? std::string("Posix") : std::string("Memory");
});

TEST_P(FileSystemTest, ReadsBackWhatWasWritten) {
  write_file(files(), at("a"), "hello, world");
  const std::unique_ptr<File> file = files().open(at("a"));
  EXPECT_EQ(file->name(), "a");
  EXPECT_EQ(file->identity().size_bytes, 12U);
  EXPECT_EQ(read_text(*file, 0, 12), "hello, world");
  EXPECT_EQ(read_text(*file, 7, 5), "world");
  EXPECT_EQ(read_text(*file, 12, 0), "");
}

TEST_P(FileSystemTest, WritesAtAnyOffsetAndTheGapIsZero) {
  const std::unique_ptr<File> out = files().create(at("a"));
  out->write(as_bytes("end"), 5);
  out->write(as_bytes("b"), 0);
  out->truncate(9);
  out->close();
  EXPECT_EQ(read_text(*files().open(at("a")), 0, 9), std::string("b\0\0\0\0end\0", 9));
}

TEST_P(FileSystemTest, AReadPastTheEndIsTruncation) {
  write_file(files(), at("a"), "0123456789");
  const std::unique_ptr<File> file = files().open(at("a"));
  const std::optional<Error> met = error_of([&] { read_text(*file, 4, 10); });
  ASSERT_TRUE(met);
  EXPECT_EQ(met->category(), Category::format_trunc);
  EXPECT_EQ(met->facts().file, "a");
  EXPECT_EQ(met->facts().offset, 4U);
  EXPECT_EQ(met->facts().expected, "10");
  EXPECT_EQ(met->facts().got, "6");
  EXPECT_FAILS(Category::format_trunc, read_text(*file, 100, 1));
}

TEST_P(FileSystemTest, CreateNeverReplaces) {
  write_file(files(), at("a"), "first");
  EXPECT_FAILS(Category::conflict, files().create(at("a")));
  EXPECT_EQ(read_text(*files().open(at("a")), 0, 5), "first");
}

// Each writer has a separate File, as the ranks of a save have.
TEST_P(FileSystemTest, SeveralWritersFillOneFile) {
  const std::unique_ptr<File> file = files().create(at("a"));
  file->allocate(6);
  EXPECT_EQ(file->identity().size_bytes, 6U);
  file->close();
  for (const auto& [offset, text] : {std::pair(3, "def"), std::pair(0, "abc")}) {
    const std::unique_ptr<File> writer = files().open_to_write(at("a"));
    writer->write(as_bytes(text), static_cast<uint64_t>(offset));
    writer->start_writeback(0, 6);
    writer->finish_writeback(0, 6);
    writer->sync();
    writer->close();
  }
  EXPECT_EQ(read_text(*files().open(at("a")), 0, 6), "abcdef");
  EXPECT_EQ(files().open(at("a"))->identity().size_bytes, 6U);
  EXPECT_FAILS(Category::io, files().open_to_write(at("absent")));
  files().make_directory(at("d"));
  EXPECT_FAILS(Category::io, files().open_to_write(at("d")));
}

TEST_P(FileSystemTest, AMissingFileIsAnIoErrorWithErrnosName) {
  const std::optional<Error> met = error_of([&] { files().open(at("nothing")); });
  ASSERT_TRUE(met);
  EXPECT_STREQ(met->what(), "IO: cannot open: ENOENT (No such file or directory) (file nothing)");
  EXPECT_FAILS(Category::io, files().create(at("no/such/dir")));
  EXPECT_FAILS(Category::io, files().list(at("nothing")));
  EXPECT_FAILS(Category::io, files().remove(at("nothing")));
  EXPECT_FAILS(Category::io, files().rename(at("nothing"), at("b")));
  EXPECT_FAILS(Category::io, files().sync_directory(at("nothing")));
}

TEST_P(FileSystemTest, DirectoriesAreRefusedAsFiles) {
  files().make_directory(at("sub"));
  EXPECT_FAILS(Category::io, files().open(at("sub")));
}

TEST_P(FileSystemTest, ListsBaseNamesSorted) {
  write_file(files(), at("b"), "");
  write_file(files(), at("a"), "");
  files().make_directory(at("c"));
  EXPECT_EQ(files().list(directory()), (std::vector<std::string>{"a", "b", "c"}));
  EXPECT_EQ(files().list(at("c")), std::vector<std::string>{});
}

TEST_P(FileSystemTest, DistinguishesFilesFromDirectories) {
  write_file(files(), at("a"), "");
  EXPECT_TRUE(files().exists(at("a")));
  EXPECT_FALSE(files().is_directory(at("a")));
  EXPECT_TRUE(files().is_directory(directory()));
  EXPECT_FALSE(files().exists(at("a/below")));
  EXPECT_FALSE(files().exists(at("nothing")));
  EXPECT_FALSE(files().is_directory(at("nothing")));
}

TEST_P(FileSystemTest, MakeDirectoryNeverReplaces) {
  files().make_directory(at("sub"));
  EXPECT_FAILS(Category::conflict, files().make_directory(at("sub")));
  EXPECT_FAILS(Category::io, files().make_directory(at("no/sub")));
}

TEST_P(FileSystemTest, RenamesFilesAndWholeDirectories) {
  files().make_directory(at("one"));
  write_file(files(), at("one/a"), "text");
  files().rename(at("one"), at("two"));
  EXPECT_FALSE(files().exists(at("one")));
  EXPECT_EQ(read_text(*files().open(at("two/a")), 0, 4), "text");
  write_file(files(), at("b"), "other");
  files().rename(at("b"), at("two/a"));
  EXPECT_EQ(read_text(*files().open(at("two/a")), 0, 5), "other");
  files().make_directory(at("empty"));
  EXPECT_FAILS(Category::conflict, files().rename(at("empty"), at("two")));
}

TEST_P(FileSystemTest, RenamesToNewNamesOnly) {
  for (const char* name : {"one", "empty"}) files().make_directory(at(name));
  write_file(files(), at("one/a"), "text");
  EXPECT_FAILS(Category::conflict, files().rename_new(at("one"), at("empty")));
  EXPECT_FAILS(Category::io, files().rename_new(at("nothing"), at("two")));
  files().rename_new(at("one"), at("two"));
  EXPECT_EQ(files().list(directory()), (std::vector<std::string>{"empty", "two"}));
}

TEST_P(FileSystemTest, RemovesTrees) {
  for (const char* name : {"one", "one/sub"}) files().make_directory(at(name));
  for (const char* name : {"one/a", "one/sub/b", "c"}) write_file(files(), at(name), "text");
  EXPECT_FALSE(files().entry(at("one"))->is_link);
  EXPECT_FAILS(Category::io, files().empty_directory(at("c")));
  EXPECT_FAILS(Category::io, files().empty_directory(at("nothing")));
  files().empty_directory(at("one"));
  EXPECT_TRUE(files().list(at("one")).empty());
  for (const char* name : {"one", "c", "nothing"}) files().remove_tree(at(name));
  EXPECT_TRUE(files().list(directory()).empty());
  EXPECT_FALSE(files().entry(at("one")));
}

TEST_P(FileSystemTest, RemovesFilesAndEmptyDirectories) {
  files().make_directory(at("sub"));
  write_file(files(), at("sub/a"), "text");
  EXPECT_FAILS(Category::io, files().remove(at("sub")));
  const std::unique_ptr<File> still_open = files().open(at("sub/a"));
  files().remove(at("sub/a"));
  files().remove(at("sub"));
  EXPECT_FALSE(files().exists(at("sub")));
  EXPECT_EQ(read_text(*still_open, 0, 4), "text");
}

TEST_P(FileSystemTest, IdentityChangesWithAReplacedFile) {
  write_file(files(), at("a"), "one");
  write_file(files(), at("b"), "two");
  const FileIdentity first = files().open(at("a"))->identity();
  EXPECT_EQ(files().open(at("a"))->identity(), first);
  files().rename(at("b"), at("a"));
  EXPECT_NE(files().open(at("a"))->identity(), first);
}

TEST_P(FileSystemTest, ACreatedFileCantBeReadNorAnOpenedOneWritten) {
  const std::unique_ptr<File> out = files().create(at("a"));
  out->write(as_bytes("text"), 0);
  EXPECT_FAILS(Category::io, read_text(*out, 0, 4));
  const std::unique_ptr<File> in = files().open(at("a"));
  EXPECT_FAILS(Category::io, in->write(as_bytes("text"), 0));
}

TEST_P(FileSystemTest, UsingAClosedFileFailsAnAssertion) {
  const std::unique_ptr<File> out = files().create(at("a"));
  out->close();
  EXPECT_FAILS(Category::internal, out->write(as_bytes("text"), 0));
  EXPECT_FAILS(Category::internal, out->close());
}

TEST_P(FileSystemTest, OneFileIsReadByManyThreads) {
  std::string text(1 << 20, '\0');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * 7 + i / 256);
  write_file(files(), at("a"), text);
  const std::unique_ptr<File> file = files().open(at("a"));
  run_workers(4, [&](int worker) {
    for (size_t i = static_cast<size_t>(worker); i < 64; i += 4) {
      EXPECT_EQ(read_text(*file, i * 16384, 16384), text.substr(i * 16384, 16384));
    }
  });
}

TEST(PosixFile, FollowsSymbolicLinks) {
  const TempDir temp;
  PosixFileSystem files;
  write_file(files, temp / "a", "text");
  ASSERT_EQ(symlink("a", (temp / "link").c_str()), 0);
  EXPECT_EQ(read_text(*files.open(temp / "link"), 0, 4), "text");
  EXPECT_EQ(files.open(temp / "link")->identity(), files.open(temp / "a")->identity());
  EXPECT_EQ(files.link_target(temp / "link"), "a");
  EXPECT_EQ(files.link_target(temp / "a"), "");
  EXPECT_FAILS(Category::io, files.link_target(temp / "nothing"));
}

TEST(PosixFile, RefusesDanglingAndCircularLinks) {
  const TempDir temp;
  PosixFileSystem files;
  ASSERT_EQ(symlink("nothing", (temp / "dangling").c_str()), 0);
  ASSERT_EQ(symlink("circle", (temp / "circle").c_str()), 0);
  EXPECT_FALSE(files.exists(temp / "dangling"));
  EXPECT_FAILS(Category::io, files.open(temp / "dangling"));
  EXPECT_FAILS(Category::conflict, files.create(temp / "dangling"));
  const std::optional<Error> met = error_of([&] { files.open(temp / "circle"); });
  ASSERT_TRUE(met);
  EXPECT_NE(met->what_happened().find("ELOOP"), std::string::npos) << met->what();
}

TEST(PosixFile, RefusesAFifoWithoutWaiting) {
  const TempDir temp;
  ASSERT_EQ(mkfifo((temp / "fifo").c_str(), 0600), 0);
  const std::optional<Error> met = error_of([&] { PosixFileSystem().open(temp / "fifo"); });
  ASSERT_TRUE(met);
  EXPECT_STREQ(met->what(), "IO: not a regular file (file fifo)");
}

TEST(PosixFile, RefusesDevices) { EXPECT_FAILS(Category::io, PosixFileSystem().open("/dev/zero")); }

TEST(PosixFile, MissingPermissionIsAnIoError) {
  if (geteuid() == 0) GTEST_SKIP() << "root is permitted to read any file";
  const TempDir temp;
  PosixFileSystem files;
  write_file(files, temp / "a", "text");
  ASSERT_EQ(chmod((temp / "a").c_str(), 0), 0);
  EXPECT_FAILS(Category::io, files.open(temp / "a"));
}

TEST(PosixFile, AFailedWriteReportsItsOffset) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  const TempDir temp;
  PosixFileSystem files;
  const std::unique_ptr<File> file = files.create(temp / "a");
  // Of the bytes 50 to 349, the first call writes 50 to 99; the second one, at 100, fails.
  const rlimit small{.rlim_cur = 100, .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::optional<Error> met =
      error_of([&] { file->write(as_bytes(std::string(300, 'x')), 50); });
  setrlimit(RLIMIT_FSIZE, &before);
  signal(SIGXFSZ, handler);
  ASSERT_TRUE(met);
  EXPECT_STREQ(met->what(), "IO: write failed: EFBIG (File too large) (file a, offset 100)");
}

// Catches: a text that is read before its length is known.
TEST(ReadText, ALongFileIsRefusedUnread) {
  MemoryFileSystem under;
  under.put("/a", "12345");
  RecordingFileSystem files(under);
  EXPECT_EQ(read_text(*files.open("/a"), 5, Category::integrity), "12345");
  const size_t before = files.calls().size();
  EXPECT_FAILS(Category::index_json, read_text(*files.open("/a"), 4, Category::index_json));
  for (size_t i = before; i < files.calls().size(); ++i) EXPECT_NE(files.calls()[i].what, "read");
}

// Catches: File::allocate reserves no space, fills the disk before it fails, or needs free space
// for what the file holds already.
TEST(PosixFile, AllocatedSpaceIsReserved) {
  const TempDir temp;
  PosixFileSystem files;
  const std::unique_ptr<File> file = files.create(temp / "a");
  file->allocate(1 << 20);
  struct stat status {};
  ASSERT_EQ(stat((temp / "a").c_str(), &status), 0);
  EXPECT_EQ(status.st_size, 1 << 20);
  EXPECT_GE(status.st_blocks * 512, 1 << 20);

  const uint64_t too_large = space_of(temp.path())->size_bytes + (1 << 20);
  const std::optional<Error> met = error_of([&] { file->allocate(too_large); });
  ASSERT_TRUE(met);
  EXPECT_EQ(met->category(), Category::no_space);
  EXPECT_EQ(met->facts().expected, std::to_string(too_large - (1 << 20)) + " bytes free");
  file->allocate(1 << 10);  // less than the file holds
  EXPECT_EQ(file->identity().size_bytes, 1U << 20);
}

TEST(ErrnoError, NoSpaceAndNoQuotaAreNospace) {
  EXPECT_FAILS(Category::no_space, fail_errno(ENOSPC, "write failed"));
  EXPECT_FAILS(Category::no_space, fail_errno(EDQUOT, "write failed"));
  EXPECT_FAILS(Category::io, fail_errno(EIO, "write failed"));
}

TEST(ErrnoError, UnknownNumbersAreStillPrinted) {
  const std::optional<Error> met = error_of([] { fail_errno(ECHRNG, "read failed"); });
  ASSERT_TRUE(met);
  EXPECT_NE(met->what_happened().find("errno 44"), std::string::npos) << met->what();
}

TEST(PosixFile, TruncationDuringAReadIsAnError) {
  const TempDir temp;
  PosixFileSystem files;
  write_file(files, temp / "a", std::string(10000, 'x'));
  const std::unique_ptr<File> file = files.open(temp / "a");
  ASSERT_EQ(truncate((temp / "a").c_str(), 5000), 0);
  EXPECT_FAILS(Category::format_trunc, read_text(*file, 0, 10000));
}

TEST(PosixFile, SurvivesAStormOfSignals) {
  struct sigaction action {};
  struct sigaction before {};
  action.sa_handler = [](int) {};  // without SA_RESTART
  ASSERT_EQ(sigaction(SIGUSR1, &action, &before), 0);
  const TempDir temp;
  PosixFileSystem files;
  const std::string text(4 << 20, 'y');
  std::atomic<bool> is_done = false;
  const pthread_t target = pthread_self();
  std::thread storm([&] {
    while (!is_done) pthread_kill(target, SIGUSR1);
  });
  write_file(files, temp / "a", text);
  const std::string got = read_text(*files.open(temp / "a"), 0, text.size());
  is_done = true;
  storm.join();
  sigaction(SIGUSR1, &before, nullptr);
  EXPECT_TRUE(got == text);
}

TEST(PosixFile, CacheHintsAreCorrectWhereSupported) {
  const TempDir temp;
  PosixFileSystem files;
  write_file(files, temp / "a", std::string(4 << 20, 'x'));
  const std::unique_ptr<File> file = files.open(temp / "a");
  const auto is_cached = [](File& cached_file) {
    return cached_file.cached_bytes(0, 4 << 20) == 4 << 20;
  };
  read_text(*file, 0, 4 << 20);
  if (!is_cached(*file)) GTEST_SKIP() << "this kernel has no cachestat";
  file->drop_cached(0, 0);
  EXPECT_TRUE(is_cached(*file)) << "an empty range drops nothing";
  file->drop_cached(0, 4 << 20);
  if (is_cached(*file)) GTEST_SKIP() << "this file system keeps its files in memory";
  read_text(*file, 0, 4 << 20);
  EXPECT_TRUE(is_cached(*file));
}

TEST(PosixFile, CountsCachedBytes) {
  const TempDir temp;
  PosixFileSystem files;
  write_file(files, temp / "a", std::string(5000, 'x'));
  const std::unique_ptr<File> file = files.open(temp / "a");
  read_text(*file, 0, 5000);
  if (!file->cached_bytes(0, 5000)) GTEST_SKIP() << "this kernel has no cachestat";
  EXPECT_EQ(file->cached_bytes(0, 5000), 5000U);
  EXPECT_EQ(file->cached_bytes(4999, 5000), 1U);
  EXPECT_EQ(file->cached_bytes(7, 7), 0U);
  EXPECT_EQ(file->cached_bytes(5000, 1 << 20), kPageBytes) << "the last page of the file";
  EXPECT_EQ(file->cached_bytes(0, 1 << 20), 2 * kPageBytes);
}

// Catches: the bytes before the range on its first page are not skipped; the end of the file within
// the range is not noticed; the reads fill the page cache.
TEST(PosixFile, ReadsAroundThePageCache) {
  constexpr uint64_t kSize = 40 * kPageBytes + 1234;
  const TempDir temp;
  PosixFileSystem files;
  std::string text(kSize, '\0');
  for (size_t i = 0; i < kSize; ++i) text[i] = static_cast<char>(i / 251 + i);
  write_file(files, temp / "a", text);
  const std::unique_ptr<File> file = files.open(temp / "a");
  alignas(kPageBytes) static std::array<std::byte, 3 * kPageBytes> room;
  file->drop_cached(0, kSize);
  std::string got(kSize, '?');
  const auto read = [&](uint64_t begin, uint64_t end) {
    const auto target = std::as_writable_bytes(std::span(got)).first(end - begin);
    return file->read_around(target, begin, room);
  };
  if (!read(0, 1)) GTEST_SKIP() << "this file system has no direct I/O";
  for (const auto& [begin, end] : {std::pair<uint64_t, uint64_t>{0, kSize},
                                   {1, kSize - 1},
                                   {kPageBytes, 2 * kPageBytes},
                                   {kPageBytes - 1, 4 * kPageBytes + 1},
                                   {kSize - 3, kSize},
                                   {5, 5}}) {
    ASSERT_TRUE(read(begin, end)) << begin;
    EXPECT_TRUE(got.substr(0, end - begin) == text.substr(begin, end - begin)) << begin;
  }
  EXPECT_EQ(file->cached_bytes(0, kSize).value_or(0), 0U);
  EXPECT_FALSE(read(kSize - 3, kSize + 1));
  EXPECT_FALSE(read(kSize + kPageBytes, kSize + kPageBytes + 1));
  file->close();
  EXPECT_FALSE(read(0, 1));
}

TEST(PosixFile, DescriptorsDoNotLeak) {
  const TempDir temp;
  PosixFileSystem files;
  write_file(files, temp / "a", "text");
  const size_t before = files.list("/proc/self/fd").size();
  for (int i = 0; i < 10; ++i) {
    files.open(temp / "a");
    EXPECT_FAILS(Category::io, files.open(temp.path()));
    files.sync_directory(temp.path());
    read_kernel_text(temp / "a");
  }
  EXPECT_EQ(files.list("/proc/self/fd").size(), before);
}

TEST(MemoryFileSystem, APowerCutLosesUnsyncedBytes) {
  MemoryFileSystem files;
  const std::unique_ptr<File> file = files.create("a");
  files.sync_directory("/");
  file->write(as_bytes("synced"), 0);
  file->sync();
  file->write(as_bytes("UNSYNCED"), 0);
  EXPECT_EQ(files.get("a"), "UNSYNCED");
  files.lose_unsynced();
  EXPECT_EQ(files.get("a"), "synced");
}

TEST(MemoryFileSystem, APowerCutLosesUnsyncedNames) {
  MemoryFileSystem files;
  files.put("dir/kept", "kept");
  files.put("dir/removed", "removed");
  write_file(files, "dir/new", "new");
  files.remove("dir/removed");
  files.lose_unsynced();
  EXPECT_EQ(files.list("dir"), (std::vector<std::string>{"kept", "removed"}));
  EXPECT_EQ(files.get("dir/removed"), "removed");

  write_file(files, "dir/new", "new");
  files.sync_directory("dir");
  files.lose_unsynced();
  EXPECT_EQ(files.get("dir/new"), "new");
}

TEST(MemoryFileSystem, ARenameIsDurableAfterItsDirectoryIsSynced) {
  MemoryFileSystem files;
  files.put("tmp/a", "text");
  files.rename("tmp", "final");
  EXPECT_EQ(files.get("final/a"), "text");
  files.lose_unsynced();
  EXPECT_EQ(files.get("tmp/a"), "text");
  EXPECT_FALSE(files.exists("final"));
  files.rename("tmp", "final");
  files.sync_directory("");
  files.lose_unsynced();
  EXPECT_EQ(files.get("final/a"), "text");
  EXPECT_FALSE(files.exists("tmp"));
}

TEST(MemoryFileSystem, PutChangesAFileInPlace) {
  MemoryFileSystem files;
  files.put("a", "before");
  const std::unique_ptr<File> file = files.open("a");
  const FileIdentity before = file->identity();
  files.put("a", "later");
  EXPECT_EQ(file->identity().inode, before.inode);
  EXPECT_NE(file->identity(), before);
  EXPECT_EQ(read_text(*file, 0, 5), "later");
}

// Makes six calls, of which the fifth is the rename.
void save(FileSystem& files) {
  const std::unique_ptr<File> file = files.create("a.tmp");
  file->write(as_bytes("0123456789"), 0);
  file->sync();
  file->close();
  files.rename("a.tmp", "a");
  files.sync_directory("/");
}

TEST(RecordingFileSystem, RecordsCallsInOrder) {
  MemoryFileSystem memory;
  RecordingFileSystem files(memory);
  save(files);
  const std::unique_ptr<File> file = files.open("a");
  read_text(*file, 2, 5);
  read_text(*file, 9, 1);
  file->cached_bytes(0, 1);
  file->drop_cached(0, 1);
  std::string text;
  for (const IoCall& call : files.calls()) text += call.what + " " + call.file + "; ";
  EXPECT_EQ(text,
            "create a.tmp; write a.tmp; sync a.tmp; close a.tmp; rename a.tmp; "
            "sync_directory /; open a; read a; read a; ");
  EXPECT_EQ(files.calls()[7].begin, 2U);
  EXPECT_EQ(files.calls()[7].end, 7U);
  EXPECT_EQ(files.bytes_read(), 6U);
}

TEST(RecordingFileSystem, FailsExactlyTheNthCall) {
  for (int64_t n = 1; n <= 6; ++n) {
    MemoryFileSystem memory;
    RecordingFileSystem files(memory, n);
    const std::optional<Error> met = error_of([&] { save(files); });
    ASSERT_TRUE(met) << n;
    EXPECT_EQ(met->category(), Category::io);
    EXPECT_NE(met->what_happened().find("EIO"), std::string::npos) << met->what();
    EXPECT_EQ(files.calls().size(), static_cast<size_t>(n));
    EXPECT_EQ(memory.exists("a"), n == 6);
    files.exists("a");  // does not throw: calls after the failed one are passed on again
  }
  MemoryFileSystem memory;
  RecordingFileSystem files(memory, 7);
  save(files);
  EXPECT_EQ(memory.get("a"), "0123456789");
}

TEST(ReadText, ReadsKernelFilesWhoseSizeIsUnknown) {
  const std::optional<std::string> status = read_kernel_text("/proc/self/status");
  ASSERT_TRUE(status);
  EXPECT_NE(status->find("VmRSS:"), std::string::npos);
  EXPECT_FALSE(read_kernel_text("/proc/self/nothing"));
  EXPECT_FALSE(read_kernel_text("/proc"));
  EXPECT_FALSE(read_kernel_text("/dev/zero"));
}

// As smaps of a process with tens of thousands of mappings.
TEST(ReadText, LinesOfALongFileAreRead) {
  const TempDir temp;
  const std::string line(1023, 'x');
  constexpr size_t kLines = 17 * kKiB;
  {
    std::ofstream file(temp / "a");
    for (size_t i = 0; i < kLines; ++i) file << line << '\n';
    file << "end";
  }
  EXPECT_FALSE(read_kernel_text(temp / "a"));
  size_t whole = 0;
  std::string last;
  EXPECT_TRUE(for_each_kernel_line(temp / "a", [&](std::string_view text) {
    whole += text == line ? 1 : 0;
    last = text;
  }));
  EXPECT_EQ(whole, kLines);
  EXPECT_EQ(last, "end");
  const auto drop = [](std::string_view) {};
  EXPECT_FALSE(for_each_kernel_line(temp / "nothing", drop));
  EXPECT_FALSE(for_each_kernel_line("/dev/zero", drop)) << "a line without an end";
}

// Catches: blocks reserved for root count as free; a number of blocks is returned as bytes.
TEST(SpaceOf, IsWhatTheFileSystemReports) {
  struct statvfs reported {};
  ASSERT_EQ(statvfs("/", &reported), 0);
  const std::optional<FileSystemSpace> space = space_of("/");
  ASSERT_TRUE(space);
  EXPECT_EQ(space->size_bytes, reported.f_blocks * reported.f_frsize);
  // The tolerance is for files that other programs write between the two calls.
  EXPECT_NEAR(static_cast<double>(space->free_bytes),
              static_cast<double>(reported.f_bavail * reported.f_frsize), 1e9);
  EXPECT_LT(space->free_bytes, space->size_bytes);
  EXPECT_FALSE(space_of("/proc/self/nothing"));
}

TEST(ReadText, WritingToAKernelFileReportsFailure) {
  const TempDir temp;
  PosixFileSystem files;
  write_file(files, temp / "a", "");
  EXPECT_TRUE(write_kernel_text(temp / "a", "5"));
  EXPECT_EQ(read_kernel_text(temp / "a"), "5");
  EXPECT_FALSE(write_kernel_text(temp / "nothing", "5"));
}

TEST(Paths, AreSplitAndJoined) {
  EXPECT_EQ(base_name("a/b/c"), "c");
  EXPECT_EQ(base_name("a/b/c/"), "c");
  EXPECT_EQ(base_name("c"), "c");
  EXPECT_EQ(base_name("/"), "/");
  EXPECT_EQ(base_name(""), "");
  EXPECT_EQ(join_path("a", "b"), "a/b");
  EXPECT_EQ(join_path("a/", "b"), "a/b");
  EXPECT_EQ(join_path("", "b"), "b");
}

}  // namespace
}  // namespace modicum
