#include "modicum/training/recorded_step.h"

#include <algorithm>
#include <utility>

#include "modicum/stream/stream.h"

namespace modicum {

RecordedDigests::RecordedDigests(std::span<const StepTensor> tensors) {
  tensors_.reserve(tensors.size());
  uint64_t chunks = 0;
  for (const StepTensor& tensor : tensors) chunks += tensor.chunks.size();
  chunks_.reserve(chunks);
  for (const StepTensor& tensor : tensors) {
    const uint64_t begin = chunks_.size();
    chunks_.insert(chunks_.end(), tensor.chunks.begin(), tensor.chunks.end());
    tensors_.push_back({digest_seed(tensor.spec), begin, chunks_.size()});
  }
  std::sort(tensors_.begin(), tensors_.end(),
            [](const Tensor& a, const Tensor& b) { return a.seed < b.seed; });
}

uint64_t RecordedDigests::held_bytes(const Manifest& saved) noexcept {
  uint64_t chunks = 0;
  for (const Stored& stored : saved.tensors) chunks += digest_chunks_of(stored);
  return heap_block_bytes(saved.tensors.size() * sizeof(Tensor)) +
         heap_block_bytes(chunks * sizeof(uint64_t));
}

std::optional<std::span<const uint64_t>> RecordedDigests::chunks_of(const TensorSpec& spec) const {
  const uint64_t seed = digest_seed(spec);
  const auto found =
      std::lower_bound(tensors_.begin(), tensors_.end(), seed,
                       [](const Tensor& tensor, uint64_t of) { return tensor.seed < of; });
  if (found == tensors_.end() || found->seed != seed) return std::nullopt;
  return std::span(chunks_).subspan(found->begin, found->end - found->begin);
}

RecordedStep::RecordedStep(FoundStep step)
    : found(std::move(step)),
      has_state(!found.record.state.empty()),
      tensors(std::exchange(found.record.tensors, {})),
      state(std::exchange(found.record.state, {})) {}

}  // namespace modicum
