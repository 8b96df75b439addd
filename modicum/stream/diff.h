// The differences of two checkpoints. Part of the public header of `stream`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "modicum/checkpoint/checkpoint.h"

namespace modicum {

struct Difference {
  // only_in_a, only_in_b: the other checkpoint has no tensor of this name. dtype: the dtypes
  // differ. shape: the dtypes are equal, the shapes differ. values: only elements differ.
  enum class Kind : uint8_t { only_in_a, only_in_b, dtype, shape, values };
  std::string tensor;
  Kind kind = Kind::values;
  int64_t first_index = 0;  // row-major index of the first differing element
  // For `values`, and for `dtype` if the values were compared, the number of differing elements.
  // Else the number of all elements: of B's tensor for only_in_b, of A's tensor for the other
  // kinds.
  int64_t count = 0;
  // For `dtype`, if the values were compared: the dtype to which the other tensor was rounded.
  std::optional<DType> rounded_to;
  int64_t overflowed = 0;  // finite values that became infinite by this rounding
  // Of differing elements, if they are fp32, bf16 or fp16: the largest absolute difference and the
  // row-major index of the first element that has it. Infinite if one of the values is infinite or
  // NaN.
  std::optional<double> largest;
  int64_t largest_index = 0;
  // For `dtype`: the dtypes in A and B.
  DType dtype_a = DType::f32, dtype_b = DType::f32;
  std::vector<int64_t> shape;  // of A's tensor; of B's for only_in_b
};
std::string_view kind_name(Difference::Kind kind) noexcept;

struct Differences {
  std::vector<Difference> found;  // in the order of A's tensors, then tensors that only B has
  uint64_t tensors = 0;           // number of names that are in both
  uint64_t bytes = 0;             // bytes of A that were compared
  ComparedValues with_record;     // of the checkpoints among A and B
};

constexpr uint64_t kDiffBytes = 8 * kMiB;
// Compares names, dtypes, shapes and, bit for bit, values, but not the division into files. Of two
// dtypes among fp32, bf16 and fp16 the wider tensor is rounded to the narrower dtype before; then a
// NaN equals every NaN. Of bf16 and fp16, each is rounded to the other; the result is that with
// fewer differences. Values of other dtypes that differ are not compared. Holds
// kDiffBytes for each thread. Calls `poll` after each read with the number of bytes compared since
// the last call, on any thread; an exception from it ends the call. Values of a checkpoint are also
// compared with its record. Throws FORMAT.TRUNC, IO; CONFLICT if a file changed; INTEGRITY if a
// value of a checkpoint is not the saved one.
Differences diff(const Checkpoint& a, const Checkpoint& b, int threads,
                 FunctionRef<void(uint64_t more_bytes)> poll);

}  // namespace modicum
