// A step (a saved checkpoint directory) that is read again, and the recorded digests of its
// tensors. Part of the public header of `training`.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "modicum/checkpoint/checkpoint.h"

namespace modicum {

// The digests of recorded tensors, in a fraction of the memory of their StepTensors.
class RecordedDigests {
 public:
  explicit RecordedDigests(std::span<const StepTensor> tensors);
  // The memory of the digests of a step's tensors. `saved` is their manifest.
  static uint64_t held_bytes(const Manifest& saved) noexcept;

  // StepTensor::chunks of the tensor with this name, dtype and shape; nullopt if none is recorded.
  std::optional<std::span<const uint64_t>> chunks_of(const TensorSpec& spec) const;

 private:
  struct Tensor {
    uint64_t seed;        // digest_seed of its spec
    uint64_t begin, end;  // in chunks_
  };

  std::vector<Tensor> tensors_;  // sorted by seed
  std::vector<uint64_t> chunks_;
};

// While rank processes run, the launcher holds this instead of the whole record.
struct RecordedStep {
  explicit RecordedStep(FoundStep step);

  FoundStep found;  // without StepRecord::tensors and StepRecord::state
  bool has_state;
  RecordedDigests tensors, state;
};

}  // namespace modicum
