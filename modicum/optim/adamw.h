// AdamW over the shards of a rank. Its states, and the calls that change them:
//
//   AdamWSpec          a value; adamw_footprint(spec) is the memory that the state will hold
//      |  AdamW(spec, ledger, ...)          charges and commits all of it, or throws
//      v
//   READY              moments and masters are zero, except masters that the caller owns, which
//      |               are unchanged; import_from, set_steps, set_options
//      |  arrive | arrived_in_place | leave_out                     <-------------+
//      v                                                                          |
//   ARRIVING           until every shard has arrived or was left out;             |
//      |               norm and step throw MISMATCH                               |
//      v                                                                          |
//   COMPLETE           norm, norms; all-reduce GradNorm over the ranks            |
//      |  step         masters, moments and step counts change  ------------------+
//      |  skip         (also while ARRIVING) only drops the gradients  -----------+
//
// plane, scales, export_to, digest and refresh_masters are allowed in every state, but not during a
// step. One iteration of a rank:
//
//   state.arrive({shard, at, n, grad, DType::bf16});           // each piece, any order, any thread
//   GradNorm norm = all_reduce(state.norm());
//   if (!norm.finite) return state.skip();
//   state.step({.clip = clip_factor(norm.norm(), max_norm)});
//
// Memory: one arena (one mapping) per plane, charged and committed by the constructor, with huge
// pages where the kernel allows them, and excluded from forked children unless AdamWSpec::fork says
// otherwise. No later call allocates memory in proportion to the number of elements.
//
// Gradients: every element arrives once per step. The thread that completes a bucket sums its
// squares while the bucket is still in the cache; `norm` adds the buckets in a fixed order. So the
// norm of a rank has the same bits for any order of arrival, any pieces and any number of threads.
//
// Threads: arrive, arrived_in_place and leave_out may run concurrently, and so may export_to and
// import_from for disjoint elements. All other calls: one thread, while no gradient arrives. After
// a fork only the parent may change the state; a child can read it unless it is Fork::excluded.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "modicum/kernels/kernels.h"
#include "modicum/memory/memory.h"
#include "modicum/optim/norm.h"
#include "modicum/optim/shards.h"

namespace modicum {

class Partition;
class ShardMap;
struct GradientArrival;
struct Bucket;
struct StateStep;
struct Stretch;

// Page-locks the arenas that a device accesses: the gradients and, of a split master, the bf16
// half. Each arena is pinned once, at its exact size.
struct Pinner {
  std::function<void(std::span<std::byte>)> pin;    // throws on failure; empty: nothing is pinned
  std::function<void(std::span<std::byte>)> unpin;  // before the memory is unmapped; must not throw
  // Bytes that the process may still lock; set it if RLIMIT_MEMLOCK applies to pinning.
  uint64_t limit_bytes = UINT64_MAX;
};

// Part of an arriving gradient: local elements [at, at + n) of a shard.
struct Piece {
  size_t shard = 0;
  int64_t at = 0;
  int64_t n = 0;
  const std::byte* elements = nullptr;
  DType dtype = DType::f32;  // or bf16, f16
};

// Updated parameters, ready to be copied: local elements [at, at + n) of a shard.
struct ReadyChunk {
  size_t shard = 0;
  int64_t at = 0;
  int64_t n = 0;
  const std::byte* elements = nullptr;
  int slot = -1;  // slot of Outlet::ring; -1 if `elements` points into the master
};

// Copies updated parameters out (to a device) while the step runs. `send` starts the copy of a
// chunk, on the worker thread that computed it; `wait` blocks until a slot's copy is complete.
// Neither may throw.
struct Outlet {
  DType dtype = DType::bf16;  // or f16; only bf16 for a split master
  // The caller's staging memory: kRingSlotBytes per slot, at least one slot per thread. Unused for
  // a split master, which is sent in place.
  std::span<std::byte> ring;
  std::function<void(const ReadyChunk&)> send;
  std::function<void(int slot)> wait;  // empty: a slot may be reused as soon as `send` returns
};
// Called on the step's threads with memory of parameters and state that the step is about to
// overwrite. Must not throw.
using BeforeOverwrite = std::function<void(std::span<const std::byte>)>;

// A slot holds a bucket in a 2-byte dtype. Buckets end where blocks of scales end, so one may have
// almost kScaleBlock elements more than kBucketElements.
constexpr uint64_t kRingSlotBytes = round_up((kBucketElements + kScaleBlock) * 2, kPageBytes);

// Gradients are multiplied by `unscale`, then by `clip`.
struct StepOptions {
  float unscale = 1.0F;  // finite, above 0
  float clip = 1.0F;     // finite, 0 or more
  // May be nullptr. Unless the master is split, new parameters go to the outlet in place of `out`.
  const Outlet* outlet = nullptr;
  // Calls refresh_masters for each bucket just before it is stepped.
  bool refresh_masters = false;
  const BeforeOverwrite* before_overwrite = nullptr;  // may be nullptr
};

// A digest over FQNs, global indices and fp32 values. Its sum over all ranks is the same for every
// sharding, and for all formats that hold the same values.
struct StateDigest {
  uint64_t state = 0;   // parameters and moments
  uint64_t master = 0;  // parameters only
  StateDigest& operator+=(const StateDigest& other) noexcept;
  bool operator==(const StateDigest&) const = default;
};

// Functions that take the index of a shard or of a group throw USAGE if there is none.
class AdamW {
 public:
  // Charges and commits the state on `threads` threads; `step`, `refresh_masters` and `digest` use
  // as many. On failure nothing stays charged. Throws BUDGET, before a page is touched, if the
  // ledger's or the pinner's limit is exceeded; NOMEM; any exception of `poll` or `pin`; MISMATCH,
  // naming the parameter, for runs that are empty or not ascending, a group out of range, or
  // caller-owned memory (`master`, `out`) that overlaps; USAGE for options out of range;
  // UNSUPPORTED for options that the chosen semantics lack.
  AdamW(AdamWSpec spec, Ledger& ledger, int threads, Pinner pinner = {}, Poll poll = kNoPoll);
  ~AdamW();
  AdamW(const AdamW&) = delete;
  AdamW& operator=(const AdamW&) = delete;

  StateFormat format() const noexcept { return spec_.format; }
  size_t shards() const noexcept { return spec_.shards.size(); }
  const ShardSpec& shard(size_t index) const { return spec_.shards[checked_shard(index)]; }
  const AdamOptions& options(int group) const;
  // Sets the options of later steps. Throws as the constructor does for invalid options, and USAGE
  // if `amsgrad` changes, since only the constructor allocates the plane of max_exp_avg_sq.
  void set_options(int group, const AdamOptions& options);

  // Converts a piece and stores it. Throws MISMATCH, naming the parameter, if an element is outside
  // of the shard or has already arrived in this step, or if the parameter was left out.
  void arrive(const Piece& piece);
  // Like `arrive`, for elements that the caller has already written to plane(shard, Plane::grad).
  void arrived_in_place(size_t shard, int64_t at, int64_t n);
  // The parameter has no gradient in this step: its values and step count stay unchanged. Throws
  // MISMATCH if some of its elements have arrived.
  void leave_out(size_t shard);

  // This rank's sum of squares over its primary replicas (ShardSpec::counts); `finite` covers all
  // shards. Throws MISMATCH, naming the parameter, if a gradient is missing.
  GradNorm norm() const;
  // The sum of squares of each shard, secondary replicas included, for callers that weight replicas
  // themselves. Throws as `norm` does.
  std::vector<GradNorm> norms() const;
  // One optimizer step. Throws MISMATCH as `norm` does; USAGE if a gradient is not finite,
  // `unscale` or `clip` is out of range, or the outlet's ring has fewer slots than threads;
  // UNSUPPORTED for an outlet that is not bf16 if the master is split; NOMEM if a thread cannot be
  // started. On failure nothing has been stepped and the gradients are kept, so the call can be
  // repeated.
  void step(const StepOptions& options = {});
  // One step of several states, all or nothing: on failure none of them has been stepped. Threads
  // are started once.
  static void step_all(std::span<const StateStep> steps);
  // Adopts values that the caller has written to a shard's `out` since the last step: where the
  // bits of `out` differ from the rounded master, the master becomes the value of `out`. So `out`
  // must hold the parameter before the first call too. No effect on split masters.
  void refresh_masters();
  // Drops the gradients, even incomplete ones. Nothing else changes.
  void skip();

  // Number of steps of a parameter. set_steps throws USAGE for a negative number.
  int64_t steps(size_t shard) const { return steps_[checked_shard(shard)]; }
  void set_steps(size_t shard, int64_t steps);

  // A shard's elements of a plane as stored (a caller-owned master in the caller's memory); empty
  // if the format or the group lacks the plane. `scales` returns the scales of 8-bit moments.
  std::span<std::byte> plane(size_t shard, Plane plane) const;
  std::span<float> scales(size_t shard, Plane plane) const;

  // Reads or writes local elements as fp32, from element `at` on. Export is exact. Import is exact
  // into fp32 planes and, for values that round to a finite bf16, into split masters of 32 bits. It
  // rounds split masters of 24 bits and bf16 moments with the random bits of the parameter's last
  // step, and 8-bit moments to the nearest code.
  // Throws MISMATCH for elements outside of the shard and for a plane that the group lacks; USAGE
  // if an import divides a block of 8-bit moments. Neither allocates.
  void export_to(size_t shard, StatePlane plane, int64_t at, std::span<float> to) const;
  void import_from(size_t shard, StatePlane plane, int64_t at, std::span<const float> from);

  StateDigest digest() const;  // this rank's part, over its primary replicas

 private:
  class Pins;
  class Slots;

  size_t checked_shard(size_t shard) const { return checked_index("shard", shard, shards()); }
  size_t checked_group(int group) const;
  void check_budget(const Ledger& ledger, const Pinner& pinner) const;
  std::span<Bucket> buckets(size_t shard) const noexcept;
  // Marks elements as arrived in this step. Throws if some have arrived before.
  void claim(size_t shard, int64_t at, int64_t n);
  // Counts `n` stored elements of a bucket; computes the norm if they are its last ones.
  void settle(size_t shard, int64_t bucket, int64_t n);
  void take_norm(size_t shard, int64_t bucket);  // computes a complete bucket's norm
  void require_complete() const;
  void require_finite_gradients() const;
  template <typename Fn>
  void for_each_norm(const Fn& fn) const;
  void forget_gradients();
  [[noreturn]] void fail_about(size_t shard, const std::string& what) const;

  std::byte* element(size_t shard, Plane plane, int64_t at) const noexcept;
  AdamSpan span_of(size_t shard, const Stretch& stretch) const noexcept;
  void check_outlet(const Outlet& outlet) const;
  void require_held(size_t shard, StatePlane plane, int64_t at, int64_t n) const;
  const AdamOptions& options_of(size_t shard) const { return options(spec_.shards[shard].group); }
  void prepare_step(const StepOptions& options);
  void finish_step();
  // Computes the step's constants (numbers_).
  void take_numbers(const StepOptions& options);
  void step_of(int worker, const StepOptions& options);
  // Calls `before` with all memory that a step of the stretch writes, except `Outlet::ring`.
  void announce(size_t shard, const Stretch& stretch, const BeforeOverwrite& before) const;
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
  // The constants of the last step, by group and step count.
  struct StepNumbers {
    AdamNumbers numbers;
    BetaPowers powers;
  };
  std::map<std::pair<int, int64_t>, StepNumbers> numbers_;
  std::vector<GradientArrival> arriving_;
  std::mutex mutex_;  // guards arriving_ while gradients arrive
};

struct StateStep {
  AdamW* state = nullptr;
  StepOptions options;
};

}  // namespace modicum
