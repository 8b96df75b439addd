#include "modicum/runs/expectation.h"

#include <utility>

#include "modicum/plan/plan.h"

namespace modicum {

Expectation::Expectation(const Checkpoint& checkpoint, std::function<void()> heartbeat)
    : checkpoint_(checkpoint),
      heartbeat_(std::move(heartbeat)),
      mark_(synth_mark(checkpoint.metadata)) {}

void Expectation::operator()(uint32_t stored, int64_t first, int64_t n, std::span<std::byte> into) {
  heartbeat_();
  const Stored& tensor = checkpoint_.manifest.tensors[stored];
  if (mark_) {
    synth_expected(*mark_, tensor.spec, first, n, into.data());
    return;
  }
  if (!file_ || file_index_ != tensor.at.file) {
    file_ = open_data_file(checkpoint_, tensor.at.file);
    file_index_ = tensor.at.file;
  }
  file_->read(into, extent_of(tensor, first, n).begin);
  // After each read, so that a changed file is reported as CONFLICT, not as a wrong value.
  require_unchanged(*file_, checkpoint_.manifest.files[file_index_].identity);
}

}  // namespace modicum
