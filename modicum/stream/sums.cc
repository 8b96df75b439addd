#include "modicum/stream/sums.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "modicum/base/base.h"
#include "modicum/kernels/kernels.h"
#include "modicum/stream/coverage.h"

namespace modicum {
namespace {

// One chunk in the bytes that ranks exchange.
struct Entry {
  uint64_t chunk;  // index in ChunkSums::chunks_
  ChunkSum sum;
};
static_assert(sizeof(Entry) == 40);

// Elements smaller than a byte are counted as bytes.
uint64_t unit_bytes(const TensorSpec& spec) noexcept {
  return static_cast<uint64_t>(std::max(8, bits_per_element(spec.dtype))) / 8;
}

}  // namespace

uint64_t digest_seed(const TensorSpec& spec) {
  return name_hash(
      fmt::format("{}|{}|{}", spec.fqn, torch_name(spec.dtype), shape_text(spec.shape)));
}

uint64_t digest_of_empty(const TensorSpec& spec) {
  return name_hash(fmt::format("{:016x}", digest_seed(spec)));
}

uint64_t ChunkSums::chunks_of_file(const Manifest& manifest, uint32_t file) noexcept {
  uint64_t chunks = 0;
  for (const StoredTensor& stored : manifest.tensors) {
    if (stored.at.file == file) chunks += digest_chunks_of(stored);
  }
  return chunks;
}

uint64_t point_of(const std::string& uuid) {
  return 2 + digest_of(uuid).low % (Powers::kPrime - 2);
}

ChunkSums::ChunkSums(const Manifest& manifest, uint64_t point, std::optional<ChunkSumKind> only)
    : manifest_(manifest), powers_(point), only_(only) {
  uint64_t chunks = 0;
  for (const StoredTensor& stored : manifest.tensors) {
    begins_.push_back(chunks);
    seeds_.push_back(digest_seed(stored.spec));
    chunks += digest_chunks_of(stored);
  }
  begins_.push_back(chunks);
  chunks_.resize(chunks);
}

uint64_t ChunkSums::held_bytes(const Manifest& manifest) noexcept {
  return heap_block_bytes(manifest.digest_chunks() * sizeof(ChunkSum)) +
         2 * heap_block_bytes((manifest.tensors.size() + 1) * sizeof(uint64_t));
}

uint64_t ChunkSums::exchanged_bytes(const Manifest& manifest) noexcept {
  return heap_block_bytes(manifest.digest_chunks() * sizeof(Entry));
}

void ChunkSums::add(uint32_t stored, uint64_t at, std::span<const std::byte> bytes) {
  const uint64_t unit = unit_bytes(manifest_.tensors[stored].spec);
  while (!bytes.empty()) {
    const uint64_t chunk = at / kChunkBytes;
    const uint64_t n = std::min<uint64_t>(bytes.size(), (chunk + 1) * kChunkBytes - at);
    const uint64_t first = at / unit, count = n / unit;
    ChunkSum sum{.count = count, .fingerprint = powers_.sum(first, 1, count)};
    add_values(stored, at, bytes.first(n), unit, sum);
    add_sum(begins_[stored] + chunk, sum);
    at += n;
    bytes = bytes.subspan(n);
  }
}

void ChunkSums::add_values(uint32_t stored, uint64_t at, std::span<const std::byte> bytes,
                           uint64_t unit, ChunkSum& sum) const noexcept {
  const uint64_t seed = seeds_[stored];
  if (only_ != ChunkSumKind::checksum) {
    sum.digest +=
        digest_run(seed, bytes.data(), static_cast<int>(unit), static_cast<int64_t>(at / unit),
                   static_cast<int64_t>(bytes.size() / unit));
  }
  if (only_ != ChunkSumKind::digest) sum.checksum += checksum_run(seed, at, bytes);
}

void ChunkSums::add(const Extent& at, std::span<const std::byte> bytes) {
  const auto& tensors = manifest_.tensors;
  // Starts with the first tensor that ends after the begin of the extent.
  auto tensor = std::upper_bound(
      tensors.begin(), tensors.end(), at, [](const Extent& e, const StoredTensor& s) {
        return std::pair(e.file, e.begin) < std::pair(s.at.file, s.at.end);
      });
  for (uint64_t done = 0; done < bytes.size(); ++tensor) {
    const uint64_t from = at.begin + done - tensor->at.begin;
    const uint64_t n = std::min(tensor->at.end, at.end) - tensor->at.begin - from;
    add(static_cast<uint32_t>(tensor - tensors.begin()), from, bytes.subspan(done, n));
    done += n;
  }
}

// The runs that end in the chunk of the first one are added together: a sum over short runs would
// otherwise take longer than their digest.
void ChunkSums::add(uint32_t stored, const Runs& runs, const std::byte* from) {
  const TensorSpec& spec = manifest_.tensors[stored].spec;
  const auto bits = static_cast<uint64_t>(bits_per_element(spec.dtype));
  const auto bytes = [bits](int64_t elements) {
    return static_cast<uint64_t>(elements) * bits / 8;
  };
  const uint64_t run_bytes = bytes(runs.length), stride = bytes(runs.stride);
  if (run_bytes == 0 || runs.count == 0) return;
  if (runs.count == 1 || stride == run_bytes) {
    return add(stored, bytes(runs.first), {from, static_cast<uint64_t>(runs.count) * run_bytes});
  }
  MODICUM_ASSERT(runs.stride > 0);
  const uint64_t unit = unit_bytes(spec);
  const auto count = static_cast<uint64_t>(runs.count);
  for (uint64_t k = 0; k < count;) {
    const uint64_t at = bytes(runs.first) + k * stride;
    const std::byte* const first = from + k * stride;
    const uint64_t chunk = at / kChunkBytes, end = (chunk + 1) * kChunkBytes;
    if (at + run_bytes > end) {
      add(stored, at, {first, run_bytes});
      ++k;
      continue;
    }
    const uint64_t n = std::min(count - k, (end - at - run_bytes) / stride + 1);
    ChunkSum sum{.count = n * (run_bytes / unit),
                 .fingerprint = powers_.sum(at / unit, {1, run_bytes / unit},
                                            {static_cast<int64_t>(stride / unit), n})};
    for (uint64_t i = 0; i < n; ++i) {
      add_values(stored, at + i * stride, {first + i * stride, run_bytes}, unit, sum);
    }
    add_sum(begins_[stored] + chunk, sum);
    k += n;
  }
}

void ChunkSums::add_sum(uint64_t chunk, const ChunkSum& more) {
  const std::lock_guard lock(mutex_);
  ChunkSum& sum = chunks_[chunk];
  sum.count += more.count;
  sum.fingerprint = Powers::add(sum.fingerprint, more.fingerprint);
  sum.digest += more.digest;
  sum.checksum += more.checksum;
}

std::vector<std::byte> ChunkSums::bytes() const {
  const auto written = std::count_if(chunks_.begin(), chunks_.end(),
                                     [](const ChunkSum& sum) { return sum.count != 0; });
  std::vector<std::byte> out;
  out.reserve(static_cast<size_t>(written) * sizeof(Entry));
  for (uint64_t c = 0; c < chunks_.size(); ++c) {
    if (chunks_[c].count == 0) continue;
    const Entry entry{c, chunks_[c]};
    const auto* const begin = reinterpret_cast<const std::byte*>(&entry);
    out.insert(out.end(), begin, begin + sizeof entry);
  }
  return out;
}

uint64_t ChunkSums::most_bytes() const noexcept { return chunks_.size() * sizeof(Entry); }

void ChunkSums::merge(std::span<const std::byte> sums) {
  const auto refuse = [] {
    fail(Category::integrity, "the sums of a rank belong to other files than the saved ones");
  };
  if (sums.size() % sizeof(Entry) != 0) refuse();
  for (; !sums.empty(); sums = sums.subspan(sizeof(Entry))) {
    Entry entry;
    std::memcpy(&entry, sums.data(), sizeof entry);
    if (entry.chunk >= chunks_.size() || entry.sum.fingerprint >= Powers::kPrime) refuse();
    add_sum(entry.chunk, entry.sum);
  }
}

uint64_t ChunkSums::chunk_numel(uint32_t stored, uint64_t chunk) const noexcept {
  const StoredTensor& tensor = manifest_.tensors[stored];
  return std::min(kChunkBytes, tensor.at.bytes() - chunk * kChunkBytes) / unit_bytes(tensor.spec);
}

std::optional<uint64_t> ChunkSums::times(uint32_t stored, uint64_t chunk) const noexcept {
  const ChunkSum& sum = chunks_[begins_[stored] + chunk];
  const uint64_t numel = chunk_numel(stored, chunk);
  if (sum.count % numel != 0) return std::nullopt;
  const uint64_t times = sum.count / numel;
  const uint64_t first = chunk * (kChunkBytes / unit_bytes(manifest_.tensors[stored].spec));
  // The fingerprint of adding all elements `times` times, by doubling.
  uint64_t expected = 0, doubled = powers_.sum(first, 1, numel);
  for (uint64_t left = times; left > 0; left /= 2) {
    if (left % 2 == 1) expected = Powers::add(expected, doubled);
    doubled = Powers::add(doubled, doubled);
  }
  return sum.fingerprint == expected ? std::optional(times) : std::nullopt;
}

void ChunkSums::reset(uint32_t stored, uint64_t chunk) noexcept {
  chunks_[begins_[stored] + chunk] = {};
}

void ChunkSums::prove() const {
  for (uint32_t s = 0; s < manifest_.tensors.size(); ++s) {
    const TensorSpec& spec = manifest_.tensors[s].spec;
    const std::span<const ChunkSum> chunks = of_tensor(s);
    for (uint64_t c = 0; c < chunks.size(); ++c) {
      const uint64_t numel = chunk_numel(s, c);
      const uint64_t first = c * (kChunkBytes / unit_bytes(spec));
      if (chunks[c].count == numel && chunks[c].fingerprint == powers_.sum(first, 1, numel)) {
        continue;
      }
      fail(Category::integrity, "the elements of a saved tensor were not written exactly once each",
           {.file = manifest_.files[manifest_.tensors[s].at.file].name,
            .tensor = spec.fqn,
            .expected = fmt::format("{} elements from element {} on", numel, first),
            .got = written_text(chunks[c].count, numel)});
    }
  }
}

std::span<const ChunkSum> ChunkSums::of_tensor(uint32_t stored) const noexcept {
  return std::span(chunks_).subspan(begins_[stored], begins_[stored + 1] - begins_[stored]);
}

}  // namespace modicum
