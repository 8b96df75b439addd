// The window of a rank, with strategies that read whole tensors.
//
//   whole_model   | tensor 0 | tensor 1 |   tensor 2   | ...    each at a multiple of 64 bytes
//   one_tensor    | codes | scales |                            reused for every tensor
#include <algorithm>

#include "modicum/plan/inside.h"
#include "modicum/plan/plan.h"

namespace modicum {

RankWindow::RankWindow(const Plan& plan, int rank)
    : plan_(plan), reads_(reads_storage(plan, rank)) {
  size_ = reads_ ? plan.strategy().of_reader : plan.strategy().of_others;
  if (size_ != Window::whole_model) return;
  const std::vector<StoredTensor>& tensors = plan.manifest->tensors;
  begins_.reserve(tensors.size());
  uint64_t end = 0;
  for (uint32_t s = 0; s < tensors.size(); ++s) {
    begins_.push_back(end);
    if (is_needed(plan, s)) end += round_up(tensors[s].at.bytes(), kBufferAlignment);
  }
}

uint64_t RankWindow::bytes() const {
  uint64_t end = 0;
  const auto add = [&](const WholeTensor& whole) {
    end = std::max(end, whole.place + plan_.manifest->tensors[whole.stored].at.bytes());
  };
  for_each_read([&](const Read& read) { end = std::max(end, read.place + read.at.bytes()); });
  for_each_tensor([&](const Tensor& tensor) {
    add(tensor.elements);
    if (tensor.scale) add(*tensor.scale);
  });
  return round_up(end, kPageBytes);
}

void RankWindow::for_each_read(FunctionRef<void(const Read&)> fn) const {
  if (!reads_ || size_ == Window::none) return;
  for (uint32_t s = 0; s < plan_.manifest->tensors.size(); ++s) {
    if (!is_needed(plan_, s)) continue;
    const Extent& at = plan_.manifest->tensors[s].at;
    for (uint64_t done = 0; done < at.bytes(); done += kMaxReadBytes) {
      const uint64_t begin = at.begin + done;
      const uint64_t end = std::min(at.end, begin + kMaxReadBytes);
      fn({s, {at.file, begin, end}, place_of(s) + done});
    }
  }
}

void RankWindow::for_each_tensor(FunctionRef<void(const Tensor&)> fn) const {
  if (size_ == Window::none) return;
  for (uint32_t s = 0; s < plan_.manifest->tensors.size(); ++s) {
    if (gives_elements(plan_, s)) fn(tensor(s));
  }
}

RankWindow::Tensor RankWindow::tensor(uint32_t stored) const {
  checked_index("stored tensor", stored, plan_.manifest->tensors.size());
  Tensor tensor{{stored, place_of(stored)}, std::nullopt};
  const auto scale = scale_beside(plan_, stored);
  if (!scale) return tensor;
  // In a window of one tensor the scales follow the codes.
  const uint64_t behind = round_up(plan_.manifest->tensors[stored].at.bytes(), kBufferAlignment);
  tensor.scale = {*scale, begins_.empty() ? behind : place_of(*scale)};
  return tensor;
}

}  // namespace modicum
