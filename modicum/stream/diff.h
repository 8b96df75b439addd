// The differences of two checkpoints. Part of the door of `stream`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "modicum/checkpoint/checkpoint.h"

namespace modicum {

struct Difference {
  // only_in_a, only_in_b: the other checkpoint has no tensor of this name. values: same dtype and
  // shape, other bits.
  enum class Kind : uint8_t { only_in_a, only_in_b, dtype, shape, values };
  std::string tensor;
  Kind kind = Kind::values;
  int64_t first_index = 0;  // row-major index of the first differing element
  int64_t count = 0;        // of differing elements: all elements unless the kind is `values`
};
std::string_view kind_name(Difference::Kind kind) noexcept;

struct Differences {
  std::vector<Difference> found;  // in the order of A's tensors, then those that only B has
  uint64_t tensors = 0;           // with a name in both
  uint64_t bytes = 0;             // compared, of each checkpoint
};

// Compares names, dtypes, shapes and, bit for bit, values; not how they are divided among files.
// Holds kDiffBytes for each thread. `poll` is called between reads, on any thread; an exception
// from it ends the call. Errors: FORMAT.TRUNC, IO; CONFLICT if a file changed.
constexpr uint64_t kDiffBytes = 8 * kMiB;
Differences diff(const Checkpoint& a, const Checkpoint& b, int threads,
                 FunctionRef<void(uint64_t more_bytes)> poll);

}  // namespace modicum
