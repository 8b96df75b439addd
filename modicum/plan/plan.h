// The door of `plan`: Manifest x Recipe x Layout x Strategy -> Plan and Promise. Touches nothing.
//
// A plan is its inputs and generators: `for_each_transfer` walks what one rank needs,
// `for_each_read` the reads that get it. The same generators fill the promise, so that a prediction
// can't drift from the run. The manifest and the recipe must outlive the plan. Values; any thread.
#pragma once

#include <array>
#include <functional>
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

// A strategy is a row: who reads, and what a rank holds whole besides its shards.
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

// Where the loaded elements go: host memory of ours; out of the staging by copies (to a device, or
// digested and dropped); host memory that the caller has already.
enum class Destination : uint8_t { cpu, discard, given };

// Elements from a source to a local buffer, by element counts (see Runs). Those of a compared alias
// (Recipe::is_compared) have the places that its target's elements have.
struct Transfer {
  enum class Source : uint8_t { stored, zero, init, caller };  // zero: padding
  Source source = Source::stored;
  uint32_t from = 0;    // stored: index in the manifest; init: its node; caller: its ordinal
  uint32_t target = 0;  // whose elements they are; of padding, the last target before it
  uint32_t buffer = 0;  // the local buffer that they go to
  DType from_dtype = DType::f32;
  DType to_dtype = DType::f32;
  bool compared = false;  // of a compared alias, and `buffer` is its number: nothing is written
  Runs runs;

  int64_t numel() const noexcept { return runs.runs * runs.run; }
  bool casts() const noexcept { return from_dtype != to_dtype; }
  bool dequantises() const noexcept { return casts() && is_fp8_code(from_dtype); }
};

// One read of a file. `direct`: the bytes are those of the one transfer's one run, cast into
// nothing, and may go straight to where they belong; else the read goes through staging.
struct Read {
  uint32_t file = 0;
  uint64_t begin = 0;
  uint64_t end = 0;
  bool direct = false;
  Extent scale;  // where FP8 codes are dequantised: their stored scales, which are read too
  std::span<const Transfer> transfers;  // valid during the call only
};

struct PlanOptions {
  const Strategy* strategy = nullptr;
  int ranks_per_node = 0;  // 0: all on one
  Destination destination = Destination::cpu;
  std::vector<Destination> destination_of;  // by target; empty: all alike
  uint64_t staging_bytes = 8 * kMiB;
  uint64_t baseline_bytes = kBaselineBytes;
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

// The phases of a load's promise: headers are known; everything is held; what remains. Those of
// PlanOptions::after follow.
constexpr size_t kOpenPhase = 0;
constexpr size_t kLoadPhase = 1;
constexpr size_t kHoldPhase = 2;
constexpr size_t kLoadPhases = 3;

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

struct Plan {
  const Manifest* manifest = nullptr;
  const Recipe* recipe = nullptr;
  Layout layout;
  PlanOptions options;
  std::vector<uint32_t> order;       // targets, by the first stored tensor they need; of aliases
                                     // those that are compared
  std::vector<Tie> ties;             // by alias
  std::vector<uint32_t> uses_begin;  // uses[uses_begin[s] .. uses_begin[s + 1]): targets that need
  std::vector<uint32_t> uses;        // stored tensor s, be it as the scale of another
  Staging staging;
  Promise promise;
  Digest inputs;  // of everything that decides what will happen; ranks agree on it first

  int ranks() const noexcept { return layout.world_size(); }
  const Strategy& strategy() const noexcept { return *options.strategy; }
  uint64_t held_bytes() const noexcept;  // purpose `plan` in each rank: recipe, orders, bookkeeping
};

Plan make_plan(const Manifest& manifest, const Recipe& recipe, Layout layout, PlanOptions options);

// A rank's local buffers by their numbers: first one for each target (empty where the target lies
// in a flat group or is an alias), then one for each flat group.
uint32_t buffer_count(const Plan& plan) noexcept;
LocalBuffer buffer_of(const Plan& plan, uint32_t buffer, int rank);
// The buffer whose memory a buffer's is: itself, or that of what an alias names.
uint32_t holder_of(const Plan& plan, uint32_t buffer) noexcept;
Destination destination_of(const Plan& plan, uint32_t buffer) noexcept;
// Where each buffer that is host memory of ours begins in a rank's arena, and the arena's end.
std::vector<uint64_t> arena_begins(const Plan& plan, int rank);
// What to call a buffer: the target's name; "flat", or "flat.0", "flat.1"... where there are
// several.
std::string buffer_name(const Plan& plan, uint32_t buffer);
// The pieces of a target that `rank` holds, each over a shape with the target's row-major order,
// with its place in that buffer.
void for_each_piece(const Plan& plan, uint32_t target, int rank,
                    const std::function<void(uint32_t buffer, const Box& piece)>& piece);
void for_each_piece(const Recipe& recipe, const Layout& layout, uint32_t target, int rank,
                    const std::function<void(uint32_t buffer, const Box& piece)>& piece);
// The other way round: the stretches that lie at [at, at + n) of a buffer and are neighbours in a
// target, `global` being the first one's row-major index there and `local` its place in the buffer.
void for_each_held_run(
    const Plan& plan, uint32_t buffer, int rank, int64_t at, int64_t n,
    const std::function<void(uint32_t target, int64_t global, int64_t local, int64_t n)>& run);
// Of the ranks that hold the same elements of a target, exactly one is primary: the first.
bool is_primary(const Plan& plan, uint32_t target, int rank);
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
// Throws that.
void require_fits(const Promise& promise, const Budget& budget);
// A plan whose staging has shrunk, down to `least_bytes`, as far as the budget needs; where even
// that is too much, the plan with that staging, so that a refusal says what is really missing. The
// plan itself where it fits, or where staging is not what it lacks.
Plan shrunk_to_fit(Plan plan, const Budget& budget, uint64_t least_bytes = kMinDefaultStagingBytes);

// Who holds what at a node's peak, largest first; and the two largest in words: "shards 924.00 MiB,
// staging 32.00 MiB".
std::vector<Owner> peak_owners(const Promise& promise, int node);
std::string peak_cause(const Promise& promise, int node);

// All that rank `rank` must put into its buffers or compare with what it puts there, padding
// included: the transfers tile each buffer. Targets in `plan.order`. Of one target; and just those
// that come from that stored tensor.
void for_each_transfer(const Plan& plan, int rank, const std::function<void(const Transfer&)>& fn);
void for_each_transfer_of(const Plan& plan, int rank, uint32_t target,
                          const std::function<void(const Transfer&)>& fn);
// Without those that need no reading: what these are made of may be large, and is not walked.
void for_each_stored_transfer(const Plan& plan, int rank,
                              const std::function<void(const Transfer&)>& fn);
void for_each_stored_transfer_of(const Plan& plan, int rank, uint32_t target,
                                 const std::function<void(const Transfer&)>& fn);
void for_each_transfer_from(const Plan& plan, int rank, uint32_t only_stored,
                            const std::function<void(const Transfer&)>& fn);

// The reads by which rank `rank` gets its own bytes (strategies that read what they need), in
// batches sorted by file offset, neighbours coalesced. `table` is room to sort in (kReadTableRows).
// `made` gets the transfers that need no reading: zero, init, caller. Where it is empty, they are
// not walked.
void for_each_read(const Plan& plan, int rank, std::span<Transfer> table,
                   const std::function<void(const Read&)>& read,
                   const std::function<void(const Transfer&)>& made);

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
void for_each_node_read(const Plan& plan, int rank, const std::function<void(const NodeRead&)>& fn);
void for_each_node_read_of(const Plan& plan, int rank, uint32_t target,
                           const std::function<void(const NodeRead&)>& fn);
// The parts of a transfer that such a stretch brings.
void for_each_transfer_within(const Transfer& transfer, const NodeRead& read,
                              const std::function<void(const Transfer&)>& fn);

// The most that one read brings straight into its place: a multiple of the windows in which the
// page cache is dropped, and little enough to report progress often.
constexpr uint64_t kMostReadBytes = 8 * kMiB;

// Whether `rank` reads data files at all; the others are sent what they need.
bool reads_storage(const Plan& plan, int rank) noexcept;

// The window of one rank, with a strategy that reads whole tensors: what comes into it and where it
// stands there until its elements are taken out. The promise, the counted traffic and the load all
// follow it. The plan must outlive it; any thread.
class RankWindow {
 public:
  RankWindow(const Plan& plan, int rank);
  RankWindow(const Plan&& plan, int rank) = delete;

  // One read of the rank into its window.
  struct Read {
    uint32_t stored = 0;
    Extent at;           // a part of that tensor, at most kMostReadBytes
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

// Whether a target needs the stored tensor, be it as a scale.
bool is_needed(const Plan& plan, uint32_t stored) noexcept;

// FP8 codes and their scales. A scale of codes that are dequantised is needed, too, but it may be
// that no target has its elements: then only these know it.
bool gives_elements(const Plan& plan, uint32_t stored) noexcept;
// The scale that must be at hand where elements of `stored` are put in place; nothing where no
// target dequantises them.
std::optional<uint32_t> scale_beside(const Plan& plan, uint32_t stored) noexcept;
// The part of the stored scales that a transfer needs: whole rows of their grid, or some of one
// row. Empty where nothing is dequantised.
Extent scale_extent(const Plan& plan, const Transfer& transfer);

// What the run will read and send, by the generators.
struct Traffic {
  uint64_t storage_read_bytes = 0;
  uint64_t exchanged_bytes = 0;  // received from other ranks, summed over the receivers
  uint64_t reads = 0;
  // Own-bytes strategies only:
  uint64_t transfers = 0;     // from stored tensors
  uint64_t needed_bytes = 0;  // of the elements (and their scales) that the ranks asked for

  Traffic& operator+=(const Traffic& other) noexcept;
};
Traffic traffic_of_rank(const Plan& plan, int rank);
Traffic traffic(const Plan& plan);

// Bytes [begin, end) of the file that elements of a stored tensor occupy. Elements below a byte
// must begin and end on one: UNSUPPORTED.
Extent extent_of(const Stored& stored, int64_t first, int64_t count);

}  // namespace modicum
