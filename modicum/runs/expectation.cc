#include "modicum/runs/expectation.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "modicum/plan/plan.h"

namespace modicum {
namespace {

constexpr size_t kMaxPages = 32 * kMiB / kPageBytes;

}  // namespace

Expectation::Expectation(const Checkpoint& checkpoint, std::function<void()> heartbeat)
    : checkpoint_(checkpoint),
      heartbeat_(std::move(heartbeat)),
      mark_(synth_mark(checkpoint.metadata)) {}

void Expectation::operator()(uint32_t stored, int64_t first, int64_t n, std::span<std::byte> out) {
  heartbeat_();
  const StoredTensor& tensor = checkpoint_.manifest.tensors[stored];
  if (mark_) {
    synth_expected(*mark_, tensor.spec, first, n, out.data());
    return;
  }
  open(tensor.at.file);
  const uint64_t begin = extent_of(tensor, first, n).begin;
  if (out.size() < kPageBytes) {
    copy_from_pages(begin, out);
  } else {
    read(begin, out);
  }
}

void Expectation::open(uint32_t file) {
  if (file_ && file_index_ == file) return;
  pages_.clear();
  file_ = open_data_file(checkpoint_, file);
  file_index_ = file;
}

void Expectation::read(uint64_t begin, std::span<std::byte> out) {
  file_->read(out, begin);
  // After each read, so that a changed file is reported as CONFLICT, not as a wrong value.
  require_unchanged(*file_, checkpoint_.manifest.files[file_index_].identity);
}

void Expectation::copy_from_pages(uint64_t begin, std::span<std::byte> out) {
  while (!out.empty()) {
    const auto from = page(begin / kPageBytes).subspan(begin % kPageBytes);
    const size_t n = std::min(from.size(), out.size());
    std::memcpy(out.data(), from.data(), n);
    out = out.subspan(n);
    begin += n;
  }
}

std::span<const std::byte> Expectation::page(uint64_t index) {
  const auto found = pages_.find(index);
  if (found != pages_.end()) return found->second;
  if (pages_.size() == kMaxPages) pages_.clear();
  const uint64_t size = checkpoint_.manifest.files[file_index_].identity.size_bytes;
  std::vector<std::byte> bytes(std::min<uint64_t>(kPageBytes, size - index * kPageBytes));
  read(index * kPageBytes, bytes);
  return pages_.emplace(index, std::move(bytes)).first->second;
}

}  // namespace modicum
