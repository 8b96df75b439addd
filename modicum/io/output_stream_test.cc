#include "modicum/io/output_stream.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include "modicum/base/base.h"
#include "modicum/io/temp_dir_double.h"

namespace modicum {
namespace {

// Catches: `open` waits for the reader of a FIFO; a regular file is written in place; a
// descriptor's path is opened anew, at offset 0; errors of open(2) are reported as EBADF.

// Up to 64 bytes that are read from a descriptor.
std::string taken_from(int fd) {
  char text[64];
  const ssize_t got = read(fd, text, sizeof text);
  return {text, got < 0 ? 0 : static_cast<size_t>(got)};
}

// The error of opening `path`; "opened" if it succeeds.
std::string refused(const std::string& path) {
  try {
    OutputStream::open(path);
  } catch (const Error& error) {
    return error.what();
  }
  return "opened";
}

TEST(OutputStream, WritesToTheDescriptorThatItsPathNames) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  for (const std::string folder : {"/dev/fd/", "/proc/self/fd/"}) {
    auto stream = OutputStream::open(folder + std::to_string(ends[1]));
    ASSERT_TRUE(stream.has_value());
    stream->write("a page");
    EXPECT_EQ(taken_from(ends[0]), "a page");
    const std::string read_end = std::to_string(ends[0]);
    EXPECT_EQ(refused(folder + read_end),
              "IO: the descriptor is not open for writing (file " + read_end + ")");
  }
  EXPECT_EQ(refused("/dev/fd/987"), "IO: cannot open: EBADF (Bad file descriptor) (file 987)");
  close(ends[0]);
  close(ends[1]);
}

TEST(OutputStream, ARedirectedFileContinuesAtItsOffset) {
  const TempDir temp;
  const std::string path = temp / "redirected";
  const int fd = open(path.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600);
  ASSERT_EQ(write(fd, "first ", 6), 6);
  OutputStream::open("/dev/fd/" + std::to_string(fd))->write("then");
  close(fd);
  std::string text;
  std::getline(std::ifstream(path), text);
  EXPECT_EQ(text, "first then");
  EXPECT_FALSE(OutputStream::open(path).has_value()) << "a regular file";
  unlink(path.c_str());
  EXPECT_FALSE(OutputStream::open(path).has_value()) << "no such file";
  EXPECT_FALSE(OutputStream::open("/dev/fd/").has_value());
  EXPECT_FALSE(OutputStream::open(temp.path()).has_value());
}

TEST(OutputStream, AFifoNeedsAReader) {
  const TempDir temp;
  const std::string path = temp / "fifo";
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_EQ(refused(path), "IO: cannot open: ENXIO (No such device or address) (file fifo)");
  const int reader = open(path.c_str(), O_RDONLY | O_NONBLOCK);
  OutputStream::open(path)->write("a trace");
  EXPECT_EQ(taken_from(reader), "a trace");
  close(reader);
}

TEST(OutputStream, AMissingPermissionIsReported) {
  if (geteuid() == 0) GTEST_SKIP() << "root may write any file";
  const TempDir temp;
  const std::string path = temp / "fifo";
  ASSERT_EQ(mkfifo(path.c_str(), 0400), 0);
  EXPECT_EQ(refused(path), "IO: cannot open: EACCES (Permission denied) (file fifo)");
}

TEST(OutputStream, ADeviceIsWritten) {
  OutputStream::open("/dev/null")->write("nothing");
  EXPECT_THROW(OutputStream::open("/dev/full")->write("no room"), Error);
}

}  // namespace
}  // namespace modicum
