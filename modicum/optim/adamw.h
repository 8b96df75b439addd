// AdamW's state over the shards of a rank.
//
//   declared     an AdamWSpec: a value; adamw_footprint says what it will take
//      |           AdamW(spec, ledger, ...): budget and memory of the caller's are checked
//   bound        each shard has its place in a plane, or in memory of the caller's
//      |           the same call charges, commits and pins: all of it or nothing
//   committed    masters and moments are zero; set_options, set_steps, import_from, expect
//      |
//      |  arrive, arrived_in_place, leave_out   <---------------------+
//      v                                                              |
//   arriving     until every shard has arrived `expect`ed times or is left out
//      |           norm, norms; before that: MISMATCH                 |
//   complete                                                          |
//      |           step: masters and moments move, steps count  ------+
//      +---------  skip (also while arriving): nothing moves    ------+
//
// plane, scales, export_to, digest and refresh_masters: at any time but within a step.
//
// Memory: one arena per plane, charged and committed when the state is made, huge pages where the
// kernel allows them, never inherited by forked children. No call takes memory of that size later.
//
// Gradients: every element arrives once per step, or as often as `expect` says, added up in fp32.
// The norm is taken while what arrives is in the cache: when a bucket's last element has come for
// the last time, its squares are added up, and `norm` adds the buckets in their order. So neither
// the order of arrival, nor its pieces, nor threads change a bit.
//
// Threads: arrive, arrived_in_place and leave_out may be called by several threads at once, except
// that a parameter's elements arrive for the second time only when all calls that brought it for
// the first have returned; export_to and import_from, too, for elements that don't overlap. All
// else: one thread, while no gradient is arriving. A state that was used before a fork belongs to
// the parent.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "modicum/kernels/kernels.h"
#include "modicum/memory/memory.h"
#include "modicum/optim/norm.h"
#include "modicum/optim/shards.h"

namespace modicum {

class Partition;
class ShardMap;
struct Arriving;
struct Bucket;
struct Stretch;

// Pins memory that a device reads and writes directly, on request: the gradients and, of a split
// master, the upper half, each arena once and at its exact size.
struct Pinner {
  std::function<void(std::span<std::byte>)> pin;    // throws where it can't
  std::function<void(std::span<std::byte>)> unpin;  // before the memory goes; does not throw
  // What the process may still lock, where pinning is subject to RLIMIT_MEMLOCK.
  uint64_t limit_bytes = UINT64_MAX;
};

// Part of a gradient: local elements [at, at + n) of a shard.
struct Piece {
  size_t shard = 0;
  int64_t at = 0;
  int64_t n = 0;
  const std::byte* elements = nullptr;
  DType dtype = DType::f32;  // or bf16, f16
};

// New parameters that are ready to leave: local elements [at, at + n) of a shard.
struct ReadyChunk {
  size_t shard = 0;
  int64_t at = 0;
  int64_t n = 0;
  const std::byte* elements = nullptr;
  int slot = -1;  // of the ring; -1 where they lie in the master itself
};

// How they leave while the step goes on: `send` may only begin, and is called on the thread that
// made the chunk. Neither may throw.
struct Outlet {
  DType dtype = DType::bf16;  // or f16; bf16 where the master is split
  // The caller's memory, kRingSlotBytes a slot and at least a slot per thread; a split master is
  // sent from where it lies and needs none.
  std::span<std::byte> ring;
  std::function<void(const ReadyChunk&)> send;
  std::function<void(int slot)> wait;  // until the slot may be written again; empty: at once
};
constexpr uint64_t kRingSlotBytes = kBucketElements * 2;

struct StepOptions {
  float unscale = 1.0F;  // finite, above 0
  float clip = 1.0F;     // finite, 0 or more
  const Outlet* outlet = nullptr;
  // First does what `refresh_masters` does, to what is stepped and in the same pass.
  bool refresh_masters = false;
};

// Layout-free: the sum over all ranks is the same for every sharding, and for formats that hold the
// same values. Of fp32 values, names and global indices.
struct StateDigest {
  uint64_t state = 0;   // parameters and moments
  uint64_t master = 0;  // parameters only
  StateDigest& operator+=(const StateDigest& other) noexcept;
  bool operator==(const StateDigest&) const = default;
};

class AdamW {
 public:
  // Takes and commits everything on `threads` threads, which are also those of `step` and `digest`;
  // `poll` is the cancellation callback: an exception from it aborts that, and nothing
  // stays taken. Masters and moments are zero. BUDGET, before a page is touched, where the ledger
  // or what may be pinned doesn't suffice; NOMEM; MISMATCH, naming the parameter, for runs that
  // overlap, for memory of the caller's (`master`, `out`) that two parameters share or a group that
  // is not there; USAGE for options out of range; UNSUPPORTED for what semantics don't know.
  AdamW(AdamWSpec spec, Ledger& ledger, int threads, Pinner pinner = {}, Poll poll = kNoPoll);
  ~AdamW();
  AdamW(const AdamW&) = delete;
  AdamW& operator=(const AdamW&) = delete;

  StateFormat format() const noexcept { return spec_.format; }
  size_t shards() const noexcept { return spec_.shards.size(); }
  const ShardSpec& shard(size_t index) const { return spec_.shards.at(index); }
  const AdamOptions& options(int group) const;
  // For the steps to come. Whether amsgrad is on can't change: its memory is taken or it isn't.
  void set_options(int group, const AdamOptions& options);

  // How often each element arrives in a step, from the next one on; nothing of it may have arrived.
  // More than once: UNSUPPORTED where the format's gradient is not fp32.
  void expect(int passes);
  // MISMATCH, naming the parameter, for what has arrived already or lies outside.
  void arrive(const Piece& piece);
  // The same for what has been written to its place in the gradient's plane, in the plane's dtype.
  void arrived_in_place(size_t shard, int64_t at, int64_t n);
  // This step has no gradient for it: neither its values nor its step count change.
  void leave_out(size_t shard);

  // The sum is over primary replicas (ShardSpec::counts), as gradients arrived; `finite` covers all
  // shards.
  // MISMATCH, naming the parameter, where something is missing.
  GradNorm norm() const;
  // The same by shard, for callers that count what others hold too only once.
  std::vector<GradNorm> norms() const;
  // One step with all that has arrived, whose norm must be finite. MISMATCH as `norm`. USAGE for
  // factors out of range; NOMEM where a thread can't be started: then nothing has been stepped, the
  // gradients are still there, and the call can be repeated.
  void step(const StepOptions& options = {});
  // An element of a shard's `out` that is not its master rounded has been written by somebody else
  // since the last step: its value becomes the master. For shards whose `out` holds the parameter
  // from the beginning; compares bits. Does nothing to split masters.
  void refresh_masters();
  // Forgets the gradients, complete or not. No other byte of the state changes, no step is counted.
  void skip();

  // Steps that a parameter has made.
  int64_t steps(size_t shard) const { return steps_.at(shard); }
  void set_steps(size_t shard, int64_t steps);

  // A shard's part of a plane as it lies there (the caller's, where the master is); empty where the
  // format or the group has none. `scales`: of 8-bit moments.
  std::span<std::byte> plane(size_t shard, Plane plane) const;
  std::span<float> scales(size_t shard, Plane plane) const;

  // Local elements [at, at + n) as fp32 values, exactly; and from fp32 values: exactly into fp32
  // and fp32-split, else rounded as a step rounds. Blocks of 8-bit moments are imported whole:
  // USAGE where `at` or its end cuts one. Works on a few cache lines at a time.
  void export_to(size_t shard, StatePlane plane, int64_t at, std::span<float> to) const;
  void import_from(size_t shard, StatePlane plane, int64_t at, std::span<const float> from);

  StateDigest digest() const;  // this rank's part: of the shards that count

 private:
  class Pins;
  class Slots;

  void check_budget(const Ledger& ledger, const Pinner& pinner) const;
  std::span<Bucket> buckets(size_t shard) const noexcept;
  bool claim(size_t shard, int64_t at, int64_t n);
  void settle(size_t shard, int64_t bucket, int64_t n);
  void take_norm(size_t shard, int64_t bucket);
  void require_complete() const;
  template <typename Fn>
  void for_each_norm(const Fn& fn) const;
  void forget_gradients();
  [[noreturn]] void fail_about(size_t shard, const std::string& what) const;

  std::byte* element(size_t shard, Plane plane, int64_t at) const noexcept;
  AdamSpan span_of(size_t shard, const Stretch& stretch) const noexcept;
  void check_outlet(const Outlet& outlet) const;
  void require_held(size_t shard, StatePlane plane, int64_t at, int64_t n) const;
  const AdamOptions& options_of(size_t shard) const { return options(spec_.shards[shard].group); }
  void step_of(int worker, const StepOptions& options);
  void refresh_masters_of(const AdamSpan& span) const noexcept;

  AdamWSpec spec_;
  const StateFormatRow& row_;
  const int threads_;
  std::unique_ptr<ShardMap> map_;
  std::unique_ptr<Partition> partition_;
  std::array<Buffer, kPlanes> arenas_;
  std::unique_ptr<Pins> pins_;
  std::vector<uint64_t> parameter_;  // name_hash of each shard's FQN
  std::vector<int64_t> steps_;
  int passes_ = 1;
  std::vector<Arriving> arriving_;
  std::mutex mutex_;  // of arriving_, while gradients arrive
};

}  // namespace modicum
