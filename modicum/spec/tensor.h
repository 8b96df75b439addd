// The contents of a checkpoint as values: tensors, their byte ranges, and the manifest.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "modicum/base/base.h"
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

// The largest total size of a checkpoint's tensors, or of a recipe's targets: 1 EiB. It is checked
// once, when tensors enter from a header or a recipe. After that the arithmetic of one rank (bits
// of a tensor, offsets, alignment, 16 bytes of optimizer state per 2-byte parameter) fits 64 bits
// and is not checked again. Sums over ranks saturate.
constexpr uint64_t kMaxModelBytes = uint64_t{1} << 60;

// The product of the dims; 1 for 0-d. Empty if a dim is negative, or if the product of the nonzero
// dims exceeds 2^63-1. So strides, and products of only some dims, don't overflow either. (torch
// refuses [0, 2^62, 2^62], too: "Stride calculation overflowed".)
std::optional<int64_t> checked_numel(const std::vector<int64_t>& shape) noexcept;
// Bytes of a tensor, rounded up for elements smaller than a byte. Empty if checked_numel is empty,
// or if there are more than kMaxModelBytes.
std::optional<uint64_t> checked_bytes(DType dtype, const std::vector<int64_t>& shape) noexcept;

// The product of the dims of a shape that has a checked_numel, or of some of its dims.
int64_t numel_of(const std::vector<int64_t>& shape) noexcept;
// Bytes of `numel` elements, rounded up for elements smaller than a byte.
uint64_t bytes_of(DType dtype, int64_t numel) noexcept;
std::string shape_text(const std::vector<int64_t>& shape);                // "[2, 3]"
std::string tensor_text(DType dtype, const std::vector<int64_t>& shape);  // "float32 [2, 3]"

// Half-open range of bytes of one file of a manifest.
struct Extent {
  uint32_t file = 0;  // index into Manifest::files
  uint64_t begin = 0;
  uint64_t end = 0;

  uint64_t bytes() const noexcept { return end - begin; }
  bool operator==(const Extent&) const = default;
};

// The scales of a tensor of FP8 codes: value = code * scale[r / block[0]][c / block[1]] over the
// last two dims (a vector is one row). Each index of the outer dims has its own grid of scales. See
// ScaleGrid.
struct BlockScale {
  uint32_t tensor = 0;             // the scales' index in the manifest
  std::array<int64_t, 2> block{};  // zeros: unknown (see block_of)

  bool fits() const noexcept { return block[0] > 0; }
  bool operator==(const BlockScale&) const = default;
};

// A tensor of a checkpoint.
struct StoredTensor {
  TensorSpec spec;
  Extent at;
  std::optional<BlockScale> scale;  // set for FP8 codes that have scales

  bool operator==(const StoredTensor&) const = default;
};

// Identifies the content of a file by its stat(2) data, which is read when the header is validated,
// and compared whenever the file is opened again and after its last read. Limit: two writes within
// one tick of the kernel's clock (1 to 10 ms) have the same times.
struct FileIdentity {
  uint64_t device = 0;
  uint64_t inode = 0;
  uint64_t size_bytes = 0;
  int64_t mtime_ns = 0;  // when the content changed; any process may set it
  int64_t ctime_ns = 0;  // when the inode changed; only the kernel sets it

  bool operator==(const FileIdentity&) const = default;
};

struct DataFile {
  std::string name;  // base name, one path component
  FileIdentity identity;
  uint64_t header_bytes = 0;  // length prefix and JSON; the data begins here

  bool operator==(const DataFile&) const = default;
};

// The record of a saved checkpoint has sums for each chunk of a tensor: 4 MiB, the last
// one may be shorter. The digest (digest_run) is a part of the model's digest; the checksum
// (checksum_run) takes a fraction of its time. Records of modicum 0.1, and those that would become
// too long, have digests only.
enum class ChunkSumKind : uint8_t { digest, checksum };
constexpr uint64_t kDigestChunkBytes = 4 * kMiB;
uint64_t digest_chunks_of(const StoredTensor& stored) noexcept;

// A validated checkpoint: the tensors of a file tile its data without gap or overlap. Tensors are
// sorted by (file, begin), so the order of indices is the order of a sequential read.
struct Manifest {
  std::vector<DataFile> files;
  std::vector<StoredTensor> tensors;
  // A digest of the tensors' names, dtypes, shapes, extents and scales, and of the files' names and
  // sizes. Inodes and times are left out, so that copies of a checkpoint have equal identities.
  Digest identity;
  bool only_rank_0 = false;  // the files are in rank 0's memory, unreadable for other ranks

  // The recorded sums of all chunks, in the order of `tensors`; empty without a record.
  std::vector<uint64_t> recorded;
  ChunkSumKind recorded_kind = ChunkSumKind::checksum;

  uint64_t data_bytes() const noexcept;     // sum over the tensors
  uint64_t digest_chunks() const noexcept;  // sum over the tensors
  // Host memory of this value, and of a rank that compares values with `recorded` (ComparedChunks);
  // equal for equal values.
  uint64_t held_bytes() const noexcept;
  uint64_t handed_over_bytes() const noexcept;  // the most that ComparedChunks::bytes returns
};

}  // namespace modicum
