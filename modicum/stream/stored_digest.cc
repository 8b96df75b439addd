// Digests a step's tensors from the buffers into which the step was loaded.
#include <algorithm>
#include <array>

#include "modicum/kernels/kernels.h"
#include "modicum/stream/stream.h"
#include "modicum/stream/sums.h"

namespace modicum {
namespace {

// Copies the elements of a run, which are at_step apart in a buffer.
void gather(const Runs& run, size_t size, std::span<const std::byte> from, std::byte* to) {
  for (int64_t i = 0; i < run.length; ++i) {
    const auto at = static_cast<size_t>(run.at + i * run.at_step) * size;
    const std::span<const std::byte> element = from.subspan(at, size);
    to = std::copy(element.begin(), element.end(), to);
  }
}

// The digest of one run. Elements smaller than a byte are digested byte by byte, as in ChunkSums.
uint64_t digest_of_run(const TensorSpec& stored, uint64_t seed, const Runs& run,
                       std::span<const std::byte> from) {
  const int unit = std::max(8, bits_per_element(stored.dtype)) / 8;
  const auto units = [&](int64_t n) {
    return static_cast<int64_t>(bytes_of(stored.dtype, n)) / unit;
  };
  const auto digest = [&](const std::byte* elements, int64_t first, int64_t n) {
    return digest_run(seed, elements, unit, units(first), units(n));
  };
  if (run.at_step == 1 || run.length == 1) {
    return digest(from.data() + bytes_of(stored.dtype, run.at), run.first, run.length);
  }
  std::array<std::byte, 4096> room;
  const auto most = static_cast<int64_t>(room.size()) / unit;
  uint64_t sum = 0;
  for (int64_t i = 0; i < run.length; i += most) {
    const Runs part = run.part(0, 1, i, std::min(most, run.length - i));
    gather(part, static_cast<size_t>(unit), from, room.data());
    sum += digest(room.data(), part.first, part.length);
  }
  return sum;
}

}  // namespace

uint64_t stored_digest_of_rank(const Plan& plan, int rank, Sink& sink,
                               const std::vector<bool>& included, Poll poll) {
  uint64_t sum = 0;
  for (const uint32_t target : plan.order) {
    poll();
    if (!is_primary(*plan.recipe, plan.layout, holder_of(plan, target), rank)) continue;
    for_each_transfer_of(plan, rank, target, [&](const Transfer& t) {
      if (t.source != Transfer::Source::stored || !included[t.from]) return;
      const TensorSpec& stored = plan.manifest->tensors[t.from].spec;
      const uint64_t seed = digest_seed(stored);
      for (int64_t k = 0; k < t.runs.count; ++k) {
        sum +=
            digest_of_run(stored, seed, t.runs.part(k, 1, 0, t.runs.length), sink.host(t.buffer));
      }
    });
  }
  return sum;
}

}  // namespace modicum
