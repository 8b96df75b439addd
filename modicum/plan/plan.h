// The public header of `plan`: Manifest x Recipe x Layout x Strategy -> Plan and Promise. Opens
// no file; `traffic` starts threads.
//
// A plan consists of its inputs plus generators: `for_each_stored_transfer` yields the elements and
// their destinations; `for_each_read`, `for_each_node_read` and `RankWindow` yield the reads that
// fetch them. The counted traffic, the windows in the promise and the load all come from these
// generators, so a prediction can't drift from the load. The manifest and the recipe must outlive
// the plan. Plans are values; any number of threads may read one.
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

// A strategy is a row of a table: which ranks read data files, and the window (host memory for
// whole stored tensors) that a reading rank and a receiving rank hold in addition to their shards.
enum class Reader : uint8_t {
  every_rank,
  rank_0,
  node_leader,  // the first rank of a node reads for all ranks of that node
  replicas,     // ranks with equal shards take turns reading
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

// Where loaded elements go. cpu: to the rank's arena, one block of host memory that the load
// allocates. copy: to a callback, which takes them from staging and copies them to a device or only
// hashes them. caller_memory: to host memory of the caller.
enum class Destination : uint8_t { cpu, copy, caller_memory };

// Strided runs of elements from one source to one local buffer (see Runs).
struct Transfer {
  enum class Source : uint8_t { stored, zero, init, caller };  // zero: padding
  Source source = Source::stored;
  uint32_t from = 0;    // stored: index in the manifest; init: recipe node; caller: Node::from
  uint32_t target = 0;  // the target of the elements; for padding, the last target before it
  uint32_t buffer = 0;  // the local buffer that holds the elements
  DType from_dtype = DType::f32;
  DType to_dtype = DType::f32;
  // The target is a compared alias (Recipe::is_compared). Its elements are not written: they must
  // equal the elements that the aliased target puts into the same places of `buffer`.
  bool compared = false;
  Runs runs;

  int64_t numel() const noexcept { return runs.numel(); }
  // The transfer of only elements [i, i + n) of each of the runs [k, k + n_runs).
  Transfer part(int64_t k, int64_t n_runs, int64_t i, int64_t n) const noexcept {
    Transfer part = *this;
    part.runs = runs.part(k, n_runs, i, n);
    return part;
  }
  bool casts() const noexcept { return from_dtype != to_dtype; }
  bool dequantises() const noexcept { return casts() && is_fp8_code(from_dtype); }
};

// One read of a file. A `direct` read goes straight into the local buffer: it is one contiguous run
// of one transfer that is neither cast, compared, sent to other ranks nor given to a callback.
// Every other read goes through staging.
struct Read {
  Extent at;
  bool direct = false;
  // The read is one run of at least 256 KiB, and no other rank of the node holds the same shard of
  // its target. Such a read may bypass the page cache.
  bool once = false;
  Extent scale;  // the part of the scales that is read with FP8 codes to dequantise them
  std::span<const Transfer> transfers;  // valid during the call only

  uint64_t bytes() const noexcept { return at.bytes() + scale.bytes(); }
};

struct PlanOptions {
  const Strategy* strategy = nullptr;
  int ranks_per_node = 0;  // 0: all ranks on one node
  Destination destination = Destination::cpu;
  std::vector<Destination> destination_of;   // by target; empty: `destination` for all
  uint64_t staging_bytes = 8 * kMiB;         // per rank
  uint64_t baseline_bytes = kBaselineBytes;  // held by a rank process before the load
  std::vector<uint64_t> baseline_of;         // by rank; empty: `baseline_bytes` for all
  int threads = 1;                           // of each rank
  uint64_t init_bytes = 0;                   // the most that caller-provided tensors hold at once
  bool caller_sends = false;  // the exchange uses the caller's transport: no ring in staging
  bool gathers = false;       // in a save, the ranks of a node write divided rows (Rows) together
  // In a save, by target: whether the first replica writes all elements. If false, or if empty, the
  // replicas divide them.
  std::vector<bool> from_first;
  Fork fork = Fork::excluded;  // how forked children see the shards
  // Later phases of the promise: each rank's charges on top of phase `hold` and its part of the
  // ring. The promise adds page tables and the memory of threads to each phase.
  std::vector<Phase> after;
  // Each adds a phase of the same name at the end, on top of the last phase of `after`, or of
  // `hold` if `after` is empty. `save`: a rank's charges; without staging of its own it
  // has `staging_bytes`. `resume`: the headers and digests of the checkpoint to read, which all
  // phases hold, and the staging of its own phase.
  std::optional<Footprint> save, resume;
};

constexpr uint64_t kMinStagingBytes = 256 * kKiB;
// Staging that the user did not choose is shrunk to fit a budget, but not below this.
constexpr uint64_t kMinDefaultStagingBytes = 1 * kMiB;
constexpr size_t kReadTableRows = 1024;  // transfers sorted at a time
// A worker's largest slot. Larger ones don't fit into the CPU's caches, which made loads up to 40 %
// slower.
constexpr uint64_t kSlotBytes = 1 * kMiB;
// The most bytes of a slot's cast room (see Staging) if no element is cast. The room is then used
// only to gather elements that are not neighbours in their source.
constexpr uint64_t kLineRoomBytes = 64 * kKiB;

// Indices of the phases of a load's promise. Open: headers have been read. Load: shards, staging
// and window are held. Hold: shards are held. PlanOptions::after begins at index kLoadPhases.
enum : size_t { kOpenPhase, kLoadPhase, kHoldPhase, kLoadPhases };

// The parts of the promise of a run with an optimizer, for which PlanOptions::after has one phase.
// `save` needs PlanOptions::save, `resume` needs PlanOptions::resume. Of a run with both (a save
// that goes on from a checkpoint) only the whole promise has a meaning.
//
//   load      the three phases of the load
//   step      the phase of PlanOptions::after
//   save      the phase `save`
//   resume    the three phases of the load, and the phase `resume`
enum class Part : uint8_t { load, step, save, resume };
Promise part_of(const Promise& promise, Part part);

// How a rank's staging is divided:
//
//   | ring part | gather part | table | slot        | table | slot        | ...
//                              \_ worker 0's share _/ \_ worker 1's share _/
//                                      |- tile |- cast room -|
//
// The ring parts of an exchange group form one ring in shared memory; they exist only if ranks
// exchange without the caller's transport. The gather parts of a node form a SharedGather; they
// exist only in a save with divided rows (Rows) and several ranks on a node. A worker sorts
// transfers in its table and reads one tile at a time into its slot. The cast room, the rest of the
// slot, exists only with Destination::copy. It is four fifths of the slot if such a target is cast,
// else kLineRoomBytes, but at most half of the slot. Without a cast room the slot is one tile.
//
// Example: 8 MiB, and 4 ranks that exchange. The ring part is 2 MiB, so 6 MiB remain. The table has
// 1024 rows, the slot 1 MiB. There is one worker, since ranks that exchange must make the same
// calls in the same order.
struct Staging {
  uint64_t ring_part_bytes = 0;
  uint64_t gather_part_bytes = 0;
  uint64_t table_bytes = 0;
  uint64_t slot_bytes = 0;
  uint64_t tile_bytes = 0;  // the largest staged read
  // The number of shares that fit. 1 if ranks exchange and hold no window. 0 if there are no slots.
  int workers = 0;
  bool exchanges = false;  // ranks send each other bytes of the checkpoint
  // One rank's charge: all of its staging, or only its ring and gather parts if there are no slots.
  uint64_t total_bytes = 0;

  // How many of a rank's `threads` load.
  int workers_of(int threads) const noexcept {
    return workers == 0 ? threads : std::min(threads, workers);
  }
};

// A stored alias and the target that it names. Their elements are compared while both are read.
struct Tie {
  uint32_t alias = 0;
  uint32_t target = 0;  // the target
};

// The targets that need each stored tensor, for its elements or as scales of another tensor.
struct Uses {
  std::vector<uint32_t> targets;  // tensor s is needed by those at [begins[s], begins[s + 1])
  std::vector<uint32_t> begins;   // one entry per stored tensor, and the size of `targets`

  std::span<const uint32_t> targets_of(uint32_t stored) const noexcept {
    return std::span(targets).subspan(begins[stored], begins[stored + 1] - begins[stored]);
  }
};

struct Plan {
  const Manifest* manifest = nullptr;
  const Recipe* recipe = nullptr;
  Layout layout;
  PlanOptions options;
  // The targets that are filled or compared, sorted by the first stored tensor that they need.
  // Aliases that are not stored are left out.
  std::vector<uint32_t> order;
  std::vector<Tie> ties;  // sorted by alias
  Uses uses;
  Staging staging;
  Promise promise;
  // Digest of the inputs that all ranks must share (not PlanOptions::threads). Ranks compare theirs
  // before a load.
  Digest inputs;

  int ranks() const noexcept { return layout.world_size(); }
  const Strategy& strategy() const noexcept { return *options.strategy; }
  // Each rank's charge for purpose `plan`: recipe, layout, order and bookkeeping of the load.
  uint64_t held_bytes() const noexcept;
};

// Returns a plan that borrows the manifest and the recipe. Throws USAGE if staging is too small,
// there is no rank, or ranks would read that can't (Manifest::only_rank_0); UNSUPPORTED or
// MISMATCH, with the tensor, if a tensor cannot be loaded; MISMATCH if a node would hold more than
// 2^63-1 bytes.
Plan make_plan(const Manifest& manifest, const Recipe& recipe, Layout layout, PlanOptions options);
Plan make_plan(const Manifest&&, const Recipe&, Layout, PlanOptions) = delete;
Plan make_plan(const Manifest&, const Recipe&&, Layout, PlanOptions) = delete;
Plan make_plan(const Manifest&&, const Recipe&&, Layout, PlanOptions) = delete;
// The promise of the same run if each rank read the whole model: that of strategy full-per-rank.
Promise full_per_rank_promise(const Plan& plan);

// Functions that take a rank, or the index of a buffer or a target, throw USAGE if the plan has no
// such rank or index.

// A rank's local buffers by number: first one per target, which is empty for aliases and for
// targets in a flat group; then one per flat group.
uint32_t buffer_count(const Plan& plan) noexcept;
LocalBuffer buffer_of(const Plan& plan, uint32_t buffer, int rank);
// For an alias, the buffer of the target that it names; else `buffer` itself.
uint32_t holder_of(const Plan& plan, uint32_t buffer);
Destination destination_of(const Plan& plan, uint32_t buffer);
// The offset of each buffer in a rank's arena, and the arena's size. Only buffers with
// Destination::cpu take space in it.
std::vector<uint64_t> arena_begins(const Plan& plan, int rank);
// The target's name. The buffer of a flat group is "flat", or "flat.0", "flat.1", ... if there are
// several groups.
std::string buffer_name(const Plan& plan, uint32_t buffer);
// The pieces of a target that `rank` holds, each with its place in the local buffer. A box's dims
// may be merged dims of the target, in the same row-major order.
void for_each_piece(const Recipe& recipe, const Layout& layout, uint32_t target, int rank,
                    FunctionRef<void(uint32_t buffer, const Box& piece)> piece);
// The inverse: splits a buffer's elements [held.lo, held.hi) into runs that are contiguous in one
// target. `global` is the row-major index of a run's first element in the target, `local` its place
// in the buffer.
void for_each_held_run(
    const Plan& plan, uint32_t buffer, int rank, const Chunk& chunk,
    FunctionRef<void(uint32_t target, int64_t global, int64_t local, int64_t n)> run);
// Whether `rank` is the primary replica of its elements of `target`: the lowest rank that holds
// them.
bool is_primary(const Recipe& recipe, const Layout& layout, uint32_t target, int rank);

// A budget per node and its source, for example "flag", "cgroup v1 /a", "MemAvailable" or
// "run.json".
struct Budget {
  uint64_t bytes = 0;
  std::string source;
  bool is_shared = false;  // `bytes` is one node's share of this machine, on which all nodes run
};

// The node with the highest peak; the first one if several are equal.
int worst_node(const Promise& promise);
// Whether every node's promised peak is within the budget (<=).
bool fits(const Promise& promise, const Budget& budget);
// What must fit a budget: `who` (such as "node 3") needs `bytes` at the time `when` (such as "in
// phase 'step'"; may be empty). `owners` hold these bytes, the largest owner first.
struct Need {
  std::string who;
  uint64_t bytes = 0;
  std::string when;
  std::vector<Owner> owners;
};
// A BUDGET error with the shortfall and the owners; empty if the need fits.
std::optional<Error> refusal_of(Need need, const Budget& budget);
// A BUDGET error for the node with the highest promised peak; empty if that peak fits.
std::optional<Error> refusal_of(const Promise& promise, const Budget& budget);
// Throws the error of refusal_of, if any.
void require_fits(const Promise& promise, const Budget& budget);
// Returns the plan with its staging reduced just enough to fit, but not below `least_bytes`. If it
// does not fit even then, returns the plan with `least_bytes`, so that the refusal reports the true
// shortfall. Returns the plan unchanged if it fits, if its staging is not above `least_bytes`, or
// if less staging would not lower its peak.
Plan shrunk_to_fit(Plan plan, const Budget& budget, uint64_t least_bytes = kMinDefaultStagingBytes);

// The first two owners, with the names that `named` gives to their purposes.
std::string largest_owners(std::span<const Owner> owners,
                           FunctionRef<std::string(std::string_view)> named);
// The two largest owners at a node's peak: "shards 924.00 MiB, staging 32.00 MiB".
std::string peak_cause(const Promise& promise, int node);

// The transfers of `rank`, target by target in `plan.order`. The first function generates transfers
// from stored tensors, the second those that need no read (zero, init, caller). Without the
// transfers of compared aliases, they fill each buffer exactly once, padding included. They are
// separate functions since an initialised tensor may have many more runs than a stored one.
void for_each_stored_transfer(const Plan& plan, int rank, FunctionRef<void(const Transfer&)> fn);
void for_each_made_transfer(const Plan& plan, int rank, FunctionRef<void(const Transfer&)> fn);
// for_each_transfer_of: the transfers from all stored tensors to one target.
// for_each_transfer_from: the transfers from one stored tensor to all targets.
void for_each_transfer_of(const Plan& plan, int rank, uint32_t target,
                          FunctionRef<void(const Transfer&)> fn);
void for_each_transfer_from(const Plan& plan, int rank, uint32_t stored,
                            FunctionRef<void(const Transfer&)> fn);

// The reads of `rank` for its own shards, with own-shard and replica-striped. Reads come in batches
// that are sorted by file offset, and small neighbouring reads are joined. `table` is scratch space
// of at least kReadTableRows rows.
void for_each_read(const Plan& plan, int rank, std::span<Transfer> table,
                   FunctionRef<void(const Read&)> fn);

// One write to a file in a save. Its transfers go in reverse, from a local buffer to the stored
// tensor. Each transfer is one run (`runs.count` is 1), and they are contiguous in the file. A
// `direct` write has one transfer, whose bytes are written from host memory without a conversion.
struct Write {
  Extent at;
  bool direct = false;
  std::span<const Transfer> transfers;  // valid during the call only
};
// The writes by which `rank` saves its local buffers into the files of the plan's manifest. `plan`
// is the plan that would load the saved files. Replicas divide the elements that they all hold
// among themselves. So all ranks together write each element once. Elements of tensors that no
// target reads are not written. Writes come in batches that are sorted by file offset. `table` is
// scratch space of at least kReadTableRows rows.
//
// Rows::divided: only targets of which the rank holds a short run in each of several rows. Other
// ranks write to the same pages, so all ranks walk these targets in the same order. Rows::whole:
// all other targets. Rank r of n begins r/n of the way through the targets and wraps around, so
// that the ranks write to different places of the files.
enum class Rows : uint8_t { whole, divided };
void for_each_write(const Plan& plan, int rank, Rows which, std::span<Transfer> table,
                    FunctionRef<void(const Write&)> fn);

// The ranks [first, end) of the node of `rank`. If only rank 0 can read the files, all ranks count
// as one node.
struct NodeRanks {
  int first = 0;
  int end = 0;
};
NodeRanks node_of(const Plan& plan, int rank);

// The group of `rank`: the ranks that exchange with it, and `rank` itself, ascending. It has only
// `rank` without an exchange. Groups don't overlap, and none is larger than rank 0's.
std::vector<int> exchange_group(const Plan& plan, int rank);

// One read of a node's leader, with strategy `node-reader`: a contiguous stretch of a stored tensor
// that ranks of the node need for `target`, at most a tile long. Every rank of the node generates
// the same reads. The leader reads and broadcasts; each rank copies only its `wanted` bytes.
//
//   4 ranks, FSDP2 Shard(0) of [8, n], so 2 rows each; a tile holds 5 rows:
//
//     row              0    1    2    3    4    5    6    7
//     held by rank     0    0    1    1    2    2    3    3
//     read 0          [----------------------]
//       wanted         \_r0__/  \_r1__/  \r2/
//     read 1                                   [-----------]
//       wanted                                 \r2/ \_r3__/
//
// In the slot the scales of dequantised codes follow the codes: [codes | scales]. A rank that needs
// codes therefore wants everything from its first code to the end of the scales.
struct NodeRead {
  // The byte range of the slot that one rank needs; may be empty.
  struct Request {
    uint64_t begin = 0;
    uint64_t end = 0;

    uint64_t bytes() const noexcept { return end - begin; }
  };

  uint32_t target = 0;
  uint32_t stored = 0;
  int64_t first = 0;  // the stretch is elements [first, first + count) of the stored tensor
  int64_t count = 0;
  Extent at;                        // the bytes of the stretch
  Extent scale;                     // the scales that dequantise it; may be empty
  std::span<const Request> wanted;  // one entry per rank of the node; valid during the call only

  uint64_t bytes() const noexcept { return at.bytes() + scale.bytes(); }
};
void for_each_node_read(const Plan& plan, int rank, FunctionRef<void(const NodeRead&)> fn);
// The parts of a transfer whose stored elements are in the stretch of `read`.
void for_each_transfer_within(const Transfer& transfer, const NodeRead& read,
                              FunctionRef<void(const Transfer&)> fn);

// Whether `rank` is the only one of its node that reads data files.
bool reads_alone(const Plan& plan, int rank);
// Whether `rank` reads data files. All other ranks receive their bytes from ranks that read.
bool reads_storage(const Plan& plan, int rank);

// The window of one rank: host memory for whole stored tensors, with strategies that read whole
// tensors. Yields the reads that fill the window and the place of each tensor in it. The promise,
// the counted traffic and the load all use this class. The plan must outlive it; any thread.
class RankWindow {
 public:
  RankWindow(const Plan& plan, int rank);
  RankWindow(const Plan&&, int) = delete;

  // One read of the rank into its window.
  struct Read {
    uint32_t stored = 0;
    Extent at;           // a part of the stored tensor, at most 8 MiB
    uint64_t place = 0;  // where in the window its first byte goes
  };
  // A whole stored tensor at byte `place` of the window.
  struct WholeTensor {
    uint32_t stored = 0;
    uint64_t place = 0;
  };
  // A tensor from which targets take elements, and the scales that dequantise it, if any.
  struct Tensor {
    WholeTensor elements;
    std::optional<WholeTensor> scale;
  };

  uint64_t bytes() const;  // the window's size, rounded up to whole pages
  // In file order; no call if `rank` does not read.
  void for_each_read(FunctionRef<void(const Read&)> fn) const;
  // All tensors from which targets take elements, in file order. With rank0-broadcast, rank 0 sends
  // each of them and its scales.
  void for_each_tensor(FunctionRef<void(const Tensor&)> fn) const;
  Tensor tensor(uint32_t stored) const;

 private:
  uint64_t place_of(uint32_t stored) const noexcept {
    return begins_.empty() ? 0 : begins_[stored];
  }

  const Plan& plan_;
  const bool reads_;
  Window size_;
  std::vector<uint64_t> begins_;  // place of each stored tensor; empty unless all are held at once
};

// The bytes that a load will read and send, counted with the generators that the load runs.
struct Traffic {
  uint64_t storage_read_bytes = 0;
  uint64_t exchanged_bytes = 0;  // received from other ranks, summed over the receivers
  uint64_t reads = 0;
  // Counted only with own-shard and replica-striped:
  uint64_t transfers = 0;     // transfers from stored tensors
  uint64_t needed_bytes = 0;  // stored elements that go into buffers, and their scales

  Traffic& operator+=(const Traffic& other) noexcept;  // saturates
  bool operator==(const Traffic&) const = default;
};
Traffic traffic(const Plan& plan);

// The counters of one rank's load: bytes read, received and written. The memory that the rank held
// is in its ledger.
struct LoadOutcome {
  uint64_t bytes_loaded = 0;  // put into local buffers, without padding
  uint64_t storage_read_bytes = 0;
  uint64_t exchanged_bytes = 0;
  uint64_t page_cache_peak_bytes = 0;  // most page cache from these reads that was not yet dropped
};

// The bytes of elements [first, first + count) of a stored tensor. Throws UNSUPPORTED if elements
// smaller than a byte do not begin and end on a byte boundary.
Extent extent_of(const StoredTensor& stored, int64_t first, int64_t count);

}  // namespace modicum
