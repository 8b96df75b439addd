// The digests of saved tensors, and the proof that ranks together wrote each element exactly once.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "modicum/checkpoint/checkpoint.h"
#include "modicum/spec/spec.h"

namespace modicum {

// The seed with which a tensor's elements are digested: a hash of its name, dtype and shape.
uint64_t digest_seed(const TensorSpec& spec);
// A value for each tensor, derived from its seed. A model's digest is the sum of these values and
// of the chunks' digests, so that a tensor without elements also counts.
uint64_t digest_of_empty(const TensorSpec& spec);

// The point of the ChunkSums of a save: a number that CheckpointRecord::uuid determines.
uint64_t point_of(const std::string& uuid);

// Sums over the writes to one chunk, which is kChunkBytes of a tensor (its last chunk may be
// shorter). The sums of several writes, threads or ranks are added member by member.
struct ChunkSum {
  uint64_t count = 0;        // number of elements written
  uint64_t fingerprint = 0;  // sum of point^i (Powers) over written elements i, as in Coverage
  uint64_t digest = 0;       // sum of the hashes of their values (digest_run), modulo 2^64
  uint64_t checksum = 0;     // their checksum_run, modulo 2^64
};

// The sums of all chunks of a manifest's tensors. For dtypes below 8 bits a byte counts as one
// element. `add` is thread-safe.
//
//   tensor of 9 MiB    chunk 0: 4 MiB    chunk 1: 4 MiB    chunk 2: 1 MiB
//   rank 0 wrote       all               the first 2 MiB   -
//   rank 1 wrote       -                 the last 2 MiB    all
//   merged             proven            proven            proven
class ChunkSums {
 public:
  static constexpr uint64_t kChunkBytes = kDigestChunkBytes;

  // `point`: that of point_of, the same on all ranks of a save; or any other value above 1 and
  // below Powers::kPrime that does not depend on the plan. `only`: the kind of sum that is
  // computed, by default both.
  ChunkSums(const Manifest& manifest, uint64_t point, std::optional<ChunkSumKind> only = {});
  ChunkSums(const Manifest&&, uint64_t, std::optional<ChunkSumKind> = {}) = delete;
  static uint64_t chunks_of_file(const Manifest& manifest, uint32_t file) noexcept;
  // The memory of a ChunkSums for this manifest; that of the bytes that ranks exchange.
  static uint64_t held_bytes(const Manifest& manifest) noexcept;
  static uint64_t exchanged_bytes(const Manifest& manifest) noexcept;

  // Adds a write of `bytes` to bytes [at, at + bytes.size()) of a stored tensor. Both ends must be
  // at element boundaries.
  void add(uint32_t stored, uint64_t at, std::span<const std::byte> bytes);
  // Adds a write to an extent of a file, which may contain several tensors.
  void add(const Extent& at, std::span<const std::byte> bytes);
  // Adds runs of a stored tensor's elements. `from` points to the first element; the others follow
  // at the distances that they have in the tensor.
  void add(uint32_t stored, const Runs& runs, const std::byte* from);

  // bytes() serialises the sums of the chunks that were written to, in most_bytes() or less.
  // `merge` adds the sums that another rank has serialised; throws INTEGRITY if they can't belong
  // to this manifest.
  std::vector<std::byte> bytes() const;
  uint64_t most_bytes() const noexcept;
  void merge(std::span<const std::byte> sums);

  // Throws INTEGRITY, naming the first tensor with an element that was not written exactly once.
  void prove() const;
  // How often each element of a chunk was added; nullopt unless equally often.
  std::optional<uint64_t> times(uint32_t stored, uint64_t chunk) const noexcept;
  void reset(uint32_t stored, uint64_t chunk) noexcept;  // forgets the additions
  // By chunk of the tensor.
  std::span<const ChunkSum> of_tensor(uint32_t stored) const noexcept;

 private:
  // Adds the digest and checksum of contiguous elements to `sum`. `at` and `unit` are in bytes.
  void add_values(uint32_t stored, uint64_t at, std::span<const std::byte> bytes, uint64_t unit,
                  ChunkSum& sum) const noexcept;
  void add_sum(uint64_t chunk, const ChunkSum& more);
  uint64_t chunk_numel(uint32_t stored, uint64_t chunk) const noexcept;

  const Manifest& manifest_;
  const Powers powers_;
  const std::optional<ChunkSumKind> only_;
  std::vector<uint64_t> begins_;  // by tensor: its first chunk; the last is the number of chunks
  std::vector<uint64_t> seeds_;   // by tensor
  std::mutex mutex_;
  std::vector<ChunkSum> chunks_;
};

}  // namespace modicum
