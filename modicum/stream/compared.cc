#include "modicum/stream/compared.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "modicum/stream/reader.h"

namespace modicum {
namespace {

const Manifest kNoTensors{};

// All ranks need the same point, and nothing that it is computed from depends on the plan.
uint64_t point_of(const Manifest& manifest) {
  return 2 + manifest.identity.low % (Powers::kPrime - 2);
}

// Chunks [first, first + n), which a rank has compared.
struct ChunkRange {
  uint64_t first = 0, n = 0;
};

template <typename Value>
void append(const Value& value, std::vector<std::byte>& to) {
  to.resize(to.size() + sizeof value);
  std::memcpy(&to[to.size() - sizeof value], &value, sizeof value);
}

[[noreturn]] void refuse_merge() {
  fail(Category::integrity, "the digests of a rank belong to another checkpoint");
}

template <typename Value>
Value take(std::span<const std::byte>& from) {
  Value value;
  if (from.size() < sizeof value) refuse_merge();
  std::memcpy(&value, from.data(), sizeof value);
  from = from.subspan(sizeof value);
  return value;
}

}  // namespace

ComparedChunks::ComparedChunks(const Manifest& manifest, std::string folder)
    : manifest_(manifest),
      folder_(std::move(folder)),
      sums_(has_record() ? manifest : kNoTensors, point_of(manifest), manifest.recorded_kind),
      is_compared_(manifest.recorded.size()) {}

template <typename Fn>
void ComparedChunks::for_each_chunk(const Fn& fn) const {
  if (!has_record()) return;
  Chunk chunk;
  for (; chunk.stored < manifest_.tensors.size(); ++chunk.stored) {
    const uint64_t chunks = digest_chunks_of(manifest_.tensors[chunk.stored]);
    for (chunk.of_tensor = 0; chunk.of_tensor < chunks; ++chunk.of_tensor, ++chunk.of_all) {
      fn(chunk);
    }
  }
}

Extent ComparedChunks::extent_of(const Chunk& chunk) const noexcept {
  const Extent& tensor = manifest_.tensors[chunk.stored].at;
  const uint64_t begin = chunk.of_tensor * kDigestChunkBytes;
  return {tensor.file, begin, std::min(begin + kDigestChunkBytes, tensor.bytes())};
}

uint64_t ComparedChunks::added(const Chunk& chunk) const noexcept {
  return sums_.of_tensor(chunk.stored)[chunk.of_tensor].count;
}

void ComparedChunks::add(uint32_t stored, uint64_t at, std::span<const std::byte> bytes) {
  if (has_record()) sums_.add(stored, at, bytes);
}

void ComparedChunks::add(const Transfer& transfer, const std::byte* from) {
  if (has_record()) sums_.add(transfer.from, transfer.runs, from);
}

void ComparedChunks::compare(const Chunk& chunk, uint64_t times) const {
  const uint64_t expected = times * manifest_.recorded[chunk.of_all];
  const ChunkSum& sum = sums_.of_tensor(chunk.stored)[chunk.of_tensor];
  const bool is_checksum = manifest_.recorded_kind == ChunkSumKind::checksum;
  const uint64_t got = is_checksum ? sum.checksum : sum.digest;
  if (got == expected) return;
  const StoredTensor& tensor = manifest_.tensors[chunk.stored];
  fail(Category::integrity, "the values are not those that were saved",
       {.file = folder_ + manifest_.files[tensor.at.file].name,
        .tensor = tensor.spec.fqn,
        .offset = tensor.at.begin + extent_of(chunk).begin,
        .expected = fmt::format("{} {:016x}", is_checksum ? "checksum" : "digest", expected),
        .got = fmt::format("{:016x}", got)});
}

void ComparedChunks::compare() {
  for_each_chunk([&](const Chunk& chunk) {
    const uint64_t times = sums_.times(chunk.stored, chunk.of_tensor).value_or(0);
    if (times == 0) return;
    compare(chunk, times);
    is_compared_[chunk.of_all] = true;
    sums_.reset(chunk.stored, chunk.of_tensor);
  });
}

bool ComparedChunks::has_rest() const noexcept {
  bool has_rest = false;
  for_each_chunk([&](const Chunk& chunk) { has_rest |= added(chunk) > 0; });
  return has_rest;
}

uint64_t ComparedChunks::compare_rest(const Checkpoint& checkpoint, std::span<std::byte> room,
                                      Poll poll) {
  DataReader reader(checkpoint);
  for_each_chunk([&](const Chunk& chunk) {
    if (added(chunk) == 0) return;
    sums_.reset(chunk.stored, chunk.of_tensor);
    const Extent all = extent_of(chunk);
    for (uint64_t at = all.begin; at < all.end; at += room.size()) {
      poll();
      const auto part = room.first(std::min<uint64_t>(room.size(), all.end - at));
      reader.read(all.file, manifest_.tensors[chunk.stored].at.begin + at, part);
      sums_.add(chunk.stored, at, part);
    }
  });
  reader.finish();
  compare();
  return reader.bytes_read();
}

std::vector<std::byte> ComparedChunks::bytes() const {
  std::vector<ChunkRange> ranges;
  for (uint64_t c = 0; c < is_compared_.size(); ++c) {
    if (!is_compared_[c]) continue;
    if (ranges.empty() || ranges.back().first + ranges.back().n != c) ranges.push_back({c, 0});
    ++ranges.back().n;
  }
  std::vector<std::byte> all;
  append(uint64_t{ranges.size()}, all);
  for (const ChunkRange& range : ranges) append(range, all);
  const std::vector<std::byte> sums = sums_.bytes();
  all.insert(all.end(), sums.begin(), sums.end());
  return all;
}

void ComparedChunks::merge(std::span<const std::byte> of_rank) {
  for (auto left = take<uint64_t>(of_rank); left > 0; --left) {
    const auto range = take<ChunkRange>(of_rank);
    const uint64_t chunks = is_compared_.size();
    if (range.first > chunks || range.n > chunks - range.first) refuse_merge();
    for (uint64_t c = 0; c < range.n; ++c) is_compared_[range.first + c] = true;
  }
  sums_.merge(of_rank);
}

// A chunk of which some elements were read without being compared counts as not compared, even if
// a rank has compared it whole.
ComparedValues ComparedChunks::finish() {
  compare();
  ComparedValues values;
  uint32_t last = UINT32_MAX;  // the last tensor in not_compared
  for_each_chunk([&](const Chunk& chunk) {
    if (is_compared_[chunk.of_all] && added(chunk) == 0) {
      values.bytes += extent_of(chunk).bytes();
    } else if (chunk.stored != std::exchange(last, chunk.stored)) {
      values.not_compared.push_back(manifest_.tensors[chunk.stored].spec.fqn);
    }
  });
  return values;
}

}  // namespace modicum
