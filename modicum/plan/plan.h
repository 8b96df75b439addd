// The door of `plan`: Manifest x Recipe x Layout x Strategy -> Plan and Promise. Touches nothing.
//
// A plan is its inputs and generators of what a rank does: `for_each_stored_transfer` which
// elements go where, `for_each_read`, `for_each_node_read` and `RankWindow` the reads that bring
// them. The promise and the counted traffic come from the same generators as the load, so that a
// prediction can't drift from it. The manifest and the recipe must outlive the plan. Values; any
// thread.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "modicum/base/base.h"
#include "modicum/layout/layout.h"
#include "modicum/recipe/recipe.h"
#include "modicum/spec/spec.h"

namespace modicum {

// A strategy is a row: who reads data files, and which whole tensors a rank that reads, and one
// that does not, hold at a time besides their shards.
enum class Reader : uint8_t {
  every_rank,
  rank_0,
  node_leader,  // the first rank of a node reads what any of its ranks needs
  replicas,     // ranks that hold the same read in turn
};
enum class Window : uint8_t { none, one_tensor, whole_model };
struct Strategy {
  std::string_view name;
  Reader reader;
  Window of_reader;
  Window of_others;
};
std::span<const Strategy> strategies() noexcept;
const Strategy& strategy_named(std::string_view name);  // unknown: USAGE with the nearest name

// Where the loaded elements go: host memory of ours; copied out of the staging, to a device or to
// be digested and dropped; host memory that the caller has already.
enum class Destination : uint8_t { cpu, copy, given };

// Elements from a source to a local buffer, by element counts (see Runs).
struct Transfer {
  enum class Source : uint8_t { stored, zero, init, caller };  // zero: padding
  Source source = Source::stored;
  uint32_t from = 0;    // stored: index in the manifest; init: its node; caller: its ordinal
  uint32_t target = 0;  // whose elements they are; of padding, the last target before it
  uint32_t buffer = 0;  // the local buffer that holds them
  DType from_dtype = DType::f32;
  DType to_dtype = DType::f32;
  // Elements of a compared alias (Recipe::is_compared): what is in their places in the buffer,
  // which the target that it names fills, must be the same. Nothing is written.
  bool compared = false;
  Runs runs;

  int64_t numel() const noexcept { return runs.numel(); }
  // Of runs [k, k + n_runs) the elements [i, i + n).
  Transfer part(int64_t k, int64_t n_runs, int64_t i, int64_t n) const noexcept {
    Transfer part = *this;
    part.runs = runs.part(k, n_runs, i, n);
    return part;
  }
  bool casts() const noexcept { return from_dtype != to_dtype; }
  bool dequantises() const noexcept { return casts() && is_fp8_code(from_dtype); }
};

// One read of a file. `direct`: the bytes are those of the one transfer's one run, cast into
// nothing, and may go straight to where they belong; else the read goes through staging.
struct Read {
  Extent at;
  bool direct = false;
  Extent scale;  // where FP8 codes are dequantised: the part of their scales that is read with them
  std::span<const Transfer> transfers;  // valid during the call only

  uint64_t bytes() const noexcept { return at.bytes() + scale.bytes(); }
};

struct PlanOptions {
  const Strategy* strategy = nullptr;
  int ranks_per_node = 0;  // 0: all on one
  Destination destination = Destination::cpu;
  std::vector<Destination> destination_of;  // by target; empty: all alike
  uint64_t staging_bytes = 8 * kMiB;
  uint64_t baseline_bytes = kBaselineBytes;  // what a rank's process holds before the load
  std::vector<uint64_t> baseline_of;         // the same by rank; empty: baseline_bytes each
  uint64_t init_bytes = 0;     // the most that tensors made by the caller take at once
  bool caller_sends = false;   // what is exchanged goes through the caller's transport: no ring
  Fork fork = Fork::excluded;  // what forked children find of the shards
  // What a rank will hold after its load besides what it holds then: the promise's later phases.
  // Page tables are added.
  std::vector<Phase> after;
};

constexpr uint64_t kMinStagingBytes = 256 * kKiB;
constexpr uint64_t kMinDefaultStagingBytes = 1 * kMiB;  // the default shrinks no further to fit
constexpr size_t kReadTableRows = 1024;                 // transfers sorted at a time

// The phases of a load's promise, by index: headers are known; everything is held; what remains.
// Those of PlanOptions::after follow, from kLoadPhases on.
enum : size_t { kOpenPhase, kLoadPhase, kHoldPhase, kLoadPhases };

// How a rank's staging is divided. One worker's share is a table and a slot.
struct Staging {
  uint64_t ring_part_bytes = 0;  // this rank's part of the exchange ring
  uint64_t table_bytes = 0;
  uint64_t slot_bytes = 0;
  uint64_t tile_bytes = 0;   // the most that one staged read brings: a slot, or less if it is
                             // cast within the slot
  int workers = 0;           // shares that fit; 0 where nothing is streamed
  bool exchanges = false;    // what one rank has read is handed on to others
  uint64_t total_bytes = 0;  // of the rank
};

// Two targets whose elements are compared while they are read: an alias that is stored, and what it
// is an alias of.
struct Tie {
  uint32_t alias = 0;
  uint32_t of = 0;
};

// The targets that need each stored tensor, for its elements or as the scale of another.
struct Uses {
  std::vector<uint32_t> targets;  // those of tensor s stand at [begins[s], begins[s + 1])
  std::vector<uint32_t> begins;   // by stored tensor, and the end

  std::span<const uint32_t> of(uint32_t stored) const noexcept {
    return std::span(targets).subspan(begins[stored], begins[stored + 1] - begins[stored]);
  }
};

struct Plan {
  const Manifest* manifest = nullptr;
  const Recipe* recipe = nullptr;
  Layout layout;
  PlanOptions options;
  // Targets that are read or made, by the first stored tensor that they need; of aliases, those
  // that are compared.
  std::vector<uint32_t> order;
  std::vector<Tie> ties;  // by alias
  Uses uses;
  Staging staging;
  Promise promise;
  Digest inputs;  // of everything that decides what will happen; ranks agree on it first

  int ranks() const noexcept { return layout.world_size(); }
  const Strategy& strategy() const noexcept { return *options.strategy; }
  uint64_t held_bytes() const noexcept;  // purpose `plan` in each rank: recipe, orders, bookkeeping
};

// The plan borrows the manifest and the recipe.
Plan make_plan(const Manifest& manifest, const Recipe& recipe, Layout layout, PlanOptions options);
Plan make_plan(const Manifest&&, const Recipe&, Layout, PlanOptions) = delete;
Plan make_plan(const Manifest&, const Recipe&&, Layout, PlanOptions) = delete;
Plan make_plan(const Manifest&&, const Recipe&&, Layout, PlanOptions) = delete;

// A rank's local buffers by number: first one for each target (empty where the target lies in a
// flat group or is an alias), then one for each flat group.
uint32_t buffer_count(const Plan& plan) noexcept;
LocalBuffer buffer_of(const Plan& plan, uint32_t buffer, int rank);
// For an alias the target that it names, whose memory it shares; any other buffer itself.
uint32_t holder_of(const Plan& plan, uint32_t buffer) noexcept;
Destination destination_of(const Plan& plan, uint32_t buffer) noexcept;
// Where each buffer that is host memory of ours begins in a rank's arena, and the arena's end.
std::vector<uint64_t> arena_begins(const Plan& plan, int rank);
// The target's name; of a flat group "flat", or "flat.0", "flat.1"... where there are several.
std::string buffer_name(const Plan& plan, uint32_t buffer);
// The pieces of a target that `rank` holds, each over a shape with the target's row-major order and
// with its place in the local buffer.
void for_each_piece(const Recipe& recipe, const Layout& layout, uint32_t target, int rank,
                    FunctionRef<void(uint32_t buffer, const Box& piece)> piece);
// The other way round: the stretches of a buffer's elements [held.lo, held.hi) that are neighbours
// in a target, `global` being the first one's row-major index there and `local` its place in the
// buffer.
void for_each_held_run(
    const Plan& plan, uint32_t buffer, int rank, const Chunk& held,
    FunctionRef<void(uint32_t target, int64_t global, int64_t local, int64_t n)> run);
// Of the ranks that hold the same elements of a target, exactly one is primary: the first.
bool is_primary(const Recipe& recipe, const Layout& layout, uint32_t target, int rank);

// A budget per node, and where it comes from ("flag", "cgroup v1 /a", "MemAvailable").
struct Budget {
  uint64_t bytes = 0;
  std::string source;
};

// The node that needs most, the first of them.
int worst_node(const Promise& promise);
// Whether every node's promised peak is within the budget (<=).
bool fits(const Promise& promise, const Budget& budget);
// BUDGET where it isn't: which node, by how much, and the largest owners.
std::optional<Error> refusal_of(const Promise& promise, const Budget& budget);
// Throws that refusal, if there is one.
void require_fits(const Promise& promise, const Budget& budget);
// The plan with staging as much smaller as the budget needs, but not below `least_bytes`. Where
// that does not fit either, the plan with `least_bytes`, so that a refusal names the true
// shortfall; the plan unchanged where it fits, or where less staging would not lower its peak.
Plan shrunk_to_fit(Plan plan, const Budget& budget, uint64_t least_bytes = kMinDefaultStagingBytes);

// Who holds most at a node's peak, in words: "shards 924.00 MiB, staging 32.00 MiB".
std::string peak_cause(const Promise& promise, int node);

// What rank `rank` puts into its buffers, or compares with what it puts there: from stored tensors,
// and what needs no reading (zero, init, caller), which may be many more elements and is walked
// only where it is asked for. Together they tile each buffer, padding included. Targets in
// `plan.order`.
void for_each_stored_transfer(const Plan& plan, int rank, FunctionRef<void(const Transfer&)> fn);
void for_each_made_transfer(const Plan& plan, int rank, FunctionRef<void(const Transfer&)> fn);
// From stored tensors to one target; from one stored tensor to all targets that take its elements.
void for_each_transfer_of(const Plan& plan, int rank, uint32_t target,
                          FunctionRef<void(const Transfer&)> fn);
void for_each_transfer_from(const Plan& plan, int rank, uint32_t stored,
                            FunctionRef<void(const Transfer&)> fn);

// The reads by which rank `rank` gets its own bytes (strategies that read what they need), in
// batches sorted by file offset, neighbours coalesced. `table` is room to sort in (kReadTableRows).
void for_each_read(const Plan& plan, int rank, std::span<Transfer> table,
                   FunctionRef<void(const Read&)> fn);

// The ranks that hand on to each other what one of them has read, `rank` among them, in order; only
// itself where nothing is sent. Groups don't overlap, and none is larger than rank 0's.
std::vector<int> exchange_group(const Plan& plan, int rank);

// With `node-reader`: the reads of a node's leader, the same for all its ranks, target by target. A
// stretch of a stored tensor that somebody on the node needs for the target, as long as fits into a
// slot; scales, where it is dequantised, stand behind it.
struct NodeRead {
  // What a rank needs of the stretch's bytes, scales too.
  struct Wanted {
    uint64_t begin = 0;
    uint64_t end = 0;

    uint64_t bytes() const noexcept { return end - begin; }
  };

  uint32_t target = 0;
  uint32_t stored = 0;
  int64_t first = 0;  // element
  int64_t count = 0;
  Extent at;
  Extent scale;
  std::span<const Wanted> wanted;  // by rank of the node; valid during the call only

  uint64_t bytes() const noexcept { return at.bytes() + scale.bytes(); }
};
void for_each_node_read(const Plan& plan, int rank, FunctionRef<void(const NodeRead&)> fn);
// The parts of a transfer from a stored tensor that such a stretch brings.
void for_each_transfer_within(const Transfer& transfer, const NodeRead& read,
                              FunctionRef<void(const Transfer&)> fn);

// Whether `rank` reads data files at all; the others are sent what they need.
bool reads_storage(const Plan& plan, int rank) noexcept;

// The window of one rank, with a strategy that reads whole tensors: what comes into it and where it
// stands there until its elements are taken out. The promise, the counted traffic and the load all
// follow it. The plan must outlive it; any thread.
class RankWindow {
 public:
  RankWindow(const Plan& plan, int rank);
  RankWindow(const Plan&&, int) = delete;

  // One read of the rank into its window.
  struct Read {
    uint32_t stored = 0;
    Extent at;           // a part of that tensor, at most 8 MiB
    uint64_t place = 0;  // of its first byte in the window
  };
  // A stored tensor that stands whole in the window, from byte `place` on.
  struct Whole {
    uint32_t stored = 0;
    uint64_t place = 0;
  };
  // A tensor whose elements are taken out, with the scale that dequantises them, if any does.
  struct Tensor {
    Whole elements;
    std::optional<Whole> scale;
  };

  uint64_t bytes() const;  // that it needs, in whole pages
  // In the order of the files; none where another rank reads.
  void for_each_read(FunctionRef<void(const Read&)> fn) const;
  // All, in the order of the files. Where one rank reads, it sends each of them, and its scale, to
  // the others.
  void for_each_tensor(FunctionRef<void(const Tensor&)> fn) const;
  Tensor tensor(uint32_t stored) const noexcept;

 private:
  uint64_t place_of(uint32_t stored) const noexcept {
    return begins_.empty() ? 0 : begins_[stored];
  }

  const Plan& plan_;
  const bool reads_;
  Window size_;
  std::vector<uint64_t> begins_;  // by stored tensor, where the window holds them all
};

// What a load will read and send, counted by the generators that it follows.
struct Traffic {
  uint64_t storage_read_bytes = 0;
  uint64_t exchanged_bytes = 0;  // received from other ranks, summed over the receivers
  uint64_t reads = 0;
  // Own-bytes strategies only:
  uint64_t transfers = 0;     // from stored tensors
  uint64_t needed_bytes = 0;  // of the elements (and their scales) that the ranks asked for

  Traffic& operator+=(const Traffic& other) noexcept;  // saturates
  bool operator==(const Traffic&) const = default;
};
Traffic traffic_of_rank(const Plan& plan, int rank);
Traffic traffic(const Plan& plan);

// What one rank's load has read, received and written; what it held is in its ledger.
struct LoadOutcome {
  uint64_t bytes_loaded = 0;  // put into local buffers, padding left out
  uint64_t storage_read_bytes = 0;
  uint64_t exchanged_bytes = 0;
  uint64_t page_cache_peak_bytes = 0;  // brought in by these reads and not yet dropped
};

// Bytes [begin, end) of the file that elements of a stored tensor occupy. Elements below a byte
// must begin and end on one: UNSUPPORTED.
Extent extent_of(const Stored& stored, int64_t first, int64_t count);

}  // namespace modicum
