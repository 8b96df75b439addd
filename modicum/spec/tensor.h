// What a checkpoint holds, as values: tensors, where their bytes stand, and all of them together.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "modicum/spec/digest.h"
#include "modicum/spec/dtype.h"

namespace modicum {

enum class Role : uint8_t { param, buffer, master, master_low, grad, exp_avg, exp_avg_sq };

struct TensorSpec {
  std::string fqn;
  Role role = Role::param;
  DType dtype = DType::f32;
  std::vector<int64_t> shape;  // row-major; 0-d has no dims and one element

  bool operator==(const TensorSpec&) const = default;
};

// The most that a checkpoint's tensors, or a recipe's targets, may come to: 1 EiB. Tensors are held
// against it where they come in, from a header or a recipe. Behind that, what one rank counts (bits
// of a tensor, offsets, alignment, 16 bytes of optimizer state for 2 of a parameter) fits 64 bits
// and is not checked again. Sums over ranks are: they saturate.
constexpr uint64_t kMaxModelBytes = uint64_t{1} << 60;

// The product of the dims; 1 for 0-d. Nothing where a dim is negative or where the dims that are
// not 0 have a product over 2^63-1, so that of a shape with a numel no stride and no product of
// some dims overflows either. (torch refuses [0, 2^62, 2^62], too: "Stride calculation
// overflowed".)
std::optional<int64_t> checked_numel(const std::vector<int64_t>& shape) noexcept;
// Bytes of a tensor, sub-byte types rounded up; nothing where it has no numel, or over
// kMaxModelBytes.
std::optional<uint64_t> checked_bytes(DType dtype, const std::vector<int64_t>& shape) noexcept;

// Elements of a shape that checked_numel has passed, or of a part of it.
int64_t numel_of(const std::vector<int64_t>& shape) noexcept;
// Bytes of that many elements; exact also for types below a byte.
uint64_t bytes_of(DType dtype, int64_t numel) noexcept;
std::string shape_text(const std::vector<int64_t>& shape);  // "[2, 3]"

// Half-open range of bytes of one file of a manifest.
struct Extent {
  uint32_t file = 0;  // index into Manifest::files
  uint64_t begin = 0;
  uint64_t end = 0;

  uint64_t bytes() const noexcept { return end - begin; }
  bool operator==(const Extent&) const = default;
};

// The scales of a tensor of FP8 codes: value = code * scale[r / block[0]][c / block[1]] over the
// last two dims (a vector is one row), with a grid of scales for each index of the dims before
// them. ScaleGrid does the arithmetic.
struct BlockScale {
  uint32_t tensor = 0;             // the scales' index in the manifest
  std::array<int64_t, 2> block{};  // zeros: their grid fits no block size

  bool fits() const noexcept { return block[0] > 0; }
  bool operator==(const BlockScale&) const = default;
};

struct Stored {
  TensorSpec spec;
  Extent at;
  std::optional<BlockScale> scale;  // FP8 codes that have one

  bool operator==(const Stored&) const = default;
};

// What tells one content of a file from another, as far as the kernel does. It is taken when the
// header is proven, and compared whenever the file is opened again and after its last read. Two
// writes within one tick of the kernel's clock (1 to 10 ms) have the same times.
struct FileIdentity {
  uint64_t device = 0;
  uint64_t inode = 0;
  uint64_t size_bytes = 0;
  int64_t mtime_ns = 0;  // of the content; any process may set it
  int64_t ctime_ns = 0;  // of the inode; only the kernel sets it

  bool operator==(const FileIdentity&) const = default;
};

struct DataFile {
  std::string name;  // base name, one path component
  FileIdentity identity;
  uint64_t header_bytes = 0;  // length prefix and JSON: where the data begins

  bool operator==(const DataFile&) const = default;
};

// A proven checkpoint: the tensors of a file tile its data without gap or overlap. Tensors are
// sorted by (file, begin), so an index in `tensors` orders them as a sequential reader meets them.
struct Manifest {
  std::vector<DataFile> files;
  std::vector<Stored> tensors;
  // Over tensors' names, dtypes, shapes, extents and scales, and files' names and sizes; not over
  // inodes or times, so that copies of a checkpoint agree.
  Digest identity;
  bool only_rank_0 = false;  // the files are in rank 0's memory: no other rank can read them

  uint64_t data_bytes() const noexcept;  // sum over the tensors
  uint64_t held_bytes() const noexcept;  // host memory of this value; equal for equal values
};

}  // namespace modicum
