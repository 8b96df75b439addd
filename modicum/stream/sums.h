// The digests of saved tensors, and the proof that ranks together wrote each element exactly once.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "modicum/spec/spec.h"

namespace modicum {

// The seed of a tensor's elements in digests: over its name, dtype and shape.
uint64_t digest_seed(const TensorSpec& spec);
// The part of a model's digest that a tensor without elements has, so that these count, too. The
// chunks' digests are the rest.
uint64_t digest_of_empty(const TensorSpec& spec);

// The writes to one chunk: a stretch of kChunkBytes of a tensor (the last chunk may be shorter).
// All three members are sums over parts, threads and ranks.
struct ChunkSum {
  uint64_t count = 0;        // elements
  uint64_t fingerprint = 0;  // of their places (Powers), modulo Powers::kPrime
  uint64_t digest = 0;       // of their values (digest_run), modulo 2^64
};

// The sums of all chunks of a manifest's tensors. Elements smaller than a byte are counted byte by
// byte. Any thread may add.
//
//   tensor of 9 MiB    chunk 0: 4 MiB    chunk 1: 4 MiB    chunk 2: 1 MiB
//   rank 0 wrote       all               the first 2 MiB   -
//   rank 1 wrote       -                 the last 2 MiB    all
//   merged             proven            proven            proven
class ChunkSums {
 public:
  static constexpr uint64_t kChunkBytes = 4 * kMiB;

  // `point`: the same on all ranks of a save and unknown to the plan; above 1, below
  // Powers::kPrime.
  ChunkSums(const Manifest& manifest, uint64_t point);
  ChunkSums(const Manifest&&, uint64_t) = delete;
  static uint64_t held_bytes(const Manifest& manifest) noexcept;

  // Counts bytes [at, at + bytes.size()) of a stored tensor as written. No element may be divided.
  void add(uint32_t stored, uint64_t at, std::span<const std::byte> bytes);
  // The same for an extent of a file, which may contain several tensors.
  void add(const Extent& at, std::span<const std::byte> bytes);

  // Serialises the sums of the chunks that were written to. `merge` adds those of another rank;
  // INTEGRITY if they can't be sums of this manifest.
  std::vector<std::byte> bytes() const;
  void merge(std::span<const std::byte> sums);

  // INTEGRITY, naming the first tensor of which an element was not written exactly once.
  void prove() const;
  std::span<const ChunkSum> of_tensor(uint32_t stored) const noexcept;
  uint64_t digest_of_tensor(uint32_t stored) const noexcept;

 private:
  uint64_t chunk_numel(uint32_t stored, uint64_t chunk) const noexcept;

  const Manifest& manifest_;
  const Powers powers_;
  std::vector<uint64_t> begins_;  // of each tensor in chunks_, and the end
  std::vector<uint64_t> seeds_;   // by tensor
  std::mutex mutex_;
  std::vector<ChunkSum> chunks_;
};

}  // namespace modicum
