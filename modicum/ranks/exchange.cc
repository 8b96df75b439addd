#include "modicum/ranks/exchange.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>

#include "modicum/ranks/counters.h"

namespace modicum {
namespace {

constexpr uint32_t kSlots = 4;

}  // namespace

// `filled` and `RingExchange::turn_` wrap around, so only their difference is compared. Since 2^32
// is a multiple of kSlots, slots stay in order across a wrap.
struct SharedRing::Control {
  std::atomic<uint32_t> filled{0};                  // turns filled so far by all roots
  std::array<std::atomic<uint32_t>, kSlots> taken;  // by slot: readers that have copied it
};

SharedRing::SharedRing(int ranks, uint64_t part_bytes)
    : ranks_(ranks),
      part_bytes_(part_bytes),
      slot_bytes_(saturating_mul(part_bytes, static_cast<uint64_t>(ranks)) / kSlots),
      control_(Mapping::shared(sizeof(Control))),
      data_(Mapping::shared(saturating_mul(part_bytes, static_cast<uint64_t>(ranks)))) {
  MODICUM_ASSERT(part_bytes % kPageBytes == 0);
  MODICUM_ASSERT(slot_bytes_ > 0);
  auto* const fresh = new (control_.bytes().data()) Control;
  // All slots begin as taken, so that the first root need not wait.
  for (auto& taken : fresh->taken) taken.store(static_cast<uint32_t>(ranks - 1));
}

SharedRing::Control& SharedRing::control() const noexcept {
  return *reinterpret_cast<Control*>(control_.bytes().data());
}

Charge RingExchange::commit(Ledger& ledger) {
  const uint64_t begin = ring_.part_bytes_ * static_cast<uint64_t>(place_);
  return ledger.charge_shared(Purpose::staging,
                              ring_.data_.bytes().subspan(begin, ring_.part_bytes_));
}

void RingExchange::broadcast(int root, std::span<std::byte> bytes, Part wanted) {
  if (place_ == root) {
    send(bytes);
  } else {
    receive(bytes, wanted);
  }
}

void RingExchange::send(std::span<const std::byte> bytes) {
  SharedRing::Control& control = ring_.control();
  const auto readers = static_cast<uint32_t>(ring_.ranks_ - 1);
  while (!bytes.empty()) {
    auto& taken = control.taken[turn_ % kSlots];
    wait_until(taken, board_, rank_, [&](uint32_t now) { return now == readers; });
    const size_t n = std::min<size_t>(bytes.size(), ring_.slot_bytes_);
    std::memcpy(ring_.data_.bytes().data() + turn_ % kSlots * ring_.slot_bytes_, bytes.data(), n);
    taken.store(0, std::memory_order_relaxed);  // published by the store to `filled`
    control.filled.store(++turn_, std::memory_order_release);
    wake_all(control.filled);
    bytes = bytes.subspan(n);
  }
}

void RingExchange::receive(std::span<std::byte> bytes, Part wanted) {
  size_t at = 0;
  SharedRing::Control& control = ring_.control();
  const auto readers = static_cast<uint32_t>(ring_.ranks_ - 1);
  while (at < bytes.size()) {
    wait_until(control.filled, board_, rank_,
               [&](uint32_t filled) { return static_cast<int32_t>(filled - turn_) > 0; });
    const size_t n = std::min<size_t>(bytes.size() - at, ring_.slot_bytes_);
    const size_t begin = std::clamp(wanted.begin, at, at + n);
    const size_t end = std::clamp(wanted.end, begin, at + n);
    const std::byte* slot = ring_.data_.bytes().data() + turn_ % kSlots * ring_.slot_bytes_;
    std::memcpy(bytes.data() + begin, slot + (begin - at), end - begin);
    auto& taken = control.taken[turn_ % kSlots];
    if (taken.fetch_add(1, std::memory_order_acq_rel) + 1 == readers) wake_all(taken);
    ++turn_;
    at += n;
  }
}

}  // namespace modicum
