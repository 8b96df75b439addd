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

// Must fail for these mutants: a FIFO without a reader that is waited for; a regular file that is
// written in place; a descriptor that is opened anew, at its begin.

std::string taken_from(int fd) {
  char text[64];
  const ssize_t got = read(fd, text, sizeof text);
  return {text, got < 0 ? 0 : static_cast<size_t>(got)};
}

TEST(OutputStream, IsTheDescriptorThatItsNameHas) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  for (const std::string folder : {"/dev/fd/", "/proc/self/fd/"}) {
    auto stream = OutputStream::open(folder + std::to_string(ends[1]));
    ASSERT_TRUE(stream.has_value());
    stream->write("a page");
    EXPECT_EQ(taken_from(ends[0]), "a page");
    EXPECT_THROW(OutputStream::open(folder + std::to_string(ends[0])), Error) << "to be read";
  }
  EXPECT_THROW(OutputStream::open("/dev/fd/987"), Error) << "it is not open";
  close(ends[0]);
  close(ends[1]);
}

TEST(OutputStream, AFileBehindADescriptorGoesOn) {
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
  EXPECT_FALSE(OutputStream::open(path).has_value()) << "nothing";
  EXPECT_FALSE(OutputStream::open("/dev/fd/").has_value());
  EXPECT_FALSE(OutputStream::open(temp.path()).has_value());
}

TEST(OutputStream, AFifoHasAReader) {
  const TempDir temp;
  const std::string path = temp / "fifo";
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_THROW(OutputStream::open(path), Error);
  const int reader = open(path.c_str(), O_RDONLY | O_NONBLOCK);
  OutputStream::open(path)->write("a trace");
  EXPECT_EQ(taken_from(reader), "a trace");
  close(reader);
}

TEST(OutputStream, ADeviceIsWritten) {
  OutputStream::open("/dev/null")->write("nothing");
  EXPECT_THROW(OutputStream::open("/dev/full")->write("no room"), Error);
}

}  // namespace
}  // namespace modicum
