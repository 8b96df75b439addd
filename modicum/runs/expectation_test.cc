#include "modicum/runs/expectation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "modicum/io/file_doubles.h"

namespace modicum {
namespace {

constexpr int64_t kRows = 200;
constexpr int64_t kColumns = 300;

std::byte value_at(int64_t element) { return std::byte(element * 7 % 251); }

// A matrix of bytes that `synth` did not write. A tensor before it makes it begin within a page.
void put_matrix(FileSystem& files) {
  files.make_directory("/m");
  const std::vector<TensorSpec> specs = {
      {.fqn = "a", .dtype = DType::u8, .shape = {5}},
      {.fqn = "w", .dtype = DType::u8, .shape = {kRows, kColumns}}};
  SafetensorsWriter out(files, "/m/model.safetensors", specs);
  std::vector<std::byte> bytes;
  for (int64_t i = 0; i < kRows * kColumns; ++i) bytes.push_back(value_at(i));
  out.write(1, 0, bytes);
  out.finish();
}

struct Matrix {
  Matrix() {
    put_matrix(memory);
    checkpoint = open_checkpoint(recorded, "/m");
    opened = recorded.calls().size();
  }
  int64_t reads() const {
    const std::vector<IoCall> calls = recorded.calls();
    return std::count_if(calls.begin() + static_cast<std::ptrdiff_t>(opened), calls.end(),
                         [](const IoCall& call) { return call.what == "read"; });
  }

  MemoryFileSystem memory;
  RecordingFileSystem recorded{memory};
  Checkpoint checkpoint;
  size_t opened = 0;  // number of calls that opened the checkpoint
};

// Must fail if each element, as a permuted target requests them, costs a read.
TEST(Expectation, ATransposedMatrixIsReadByPages) {
  Matrix matrix;
  int64_t beats = 0;
  Expectation expected(matrix.checkpoint, [&beats] { ++beats; });
  for (int64_t column = 0; column < kColumns; ++column) {
    for (int64_t row = 0; row < kRows; ++row) {
      std::byte got{};
      expected(1, row * kColumns + column, 1, {&got, 1});
      ASSERT_EQ(got, value_at(row * kColumns + column)) << row << ", " << column;
    }
  }
  // 60'000 bytes that begin within a page touch at most 14 + 2 pages.
  EXPECT_LE(matrix.reads(), kRows * kColumns / static_cast<int64_t>(kPageBytes) + 2);
  EXPECT_EQ(beats, kRows * kColumns);
}

TEST(Expectation, AnyStretchHasTheFilesBytes) {
  Matrix matrix;
  Expectation expected(matrix.checkpoint, [] {});
  for (const int64_t n : {1, 300, 4095, 4096, 4097, 20000}) {
    for (int64_t first = 0; first + n <= kRows * kColumns; first += 3001) {
      std::vector<std::byte> got(static_cast<size_t>(n));
      expected(1, first, n, got);
      for (int64_t i = 0; i < n; ++i) ASSERT_EQ(got[static_cast<size_t>(i)], value_at(first + i));
    }
  }
}

// Must fail if a page of a changed file is used.
TEST(Expectation, AFileThatHasChangedIsAConflict) {
  Matrix matrix;
  Expectation expected(matrix.checkpoint, [] {});
  std::byte got{};
  expected(1, 0, 1, {&got, 1});
  matrix.memory.put("/m/model.safetensors", matrix.memory.get("/m/model.safetensors"));
  try {
    expected(1, kRows * kColumns - 1, 1, {&got, 1});
    FAIL() << "expected CONFLICT, got no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), Category::conflict);
  }
}

}  // namespace
}  // namespace modicum
