#include "modicum/plan/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "modicum/plan/inside.h"

namespace modicum {
namespace {

// Bookkeeping per buffer during a load: its expected and written places (Coverage), and its offset.
constexpr uint64_t kBookkeepingBytesPerBuffer = 6 * sizeof(uint64_t);
// Bookkeeping per tie: one sum over the alias's elements and one over the target's.
constexpr uint64_t kBookkeepingBytesPerTie = 2 * sizeof(uint64_t);

// Calls `fn` for each stored tensor from which `target` takes elements, in manifest order.
template <typename Fn>
void for_each_source(const Plan& plan, uint32_t target, const Fn& fn) {
  const uint32_t root = plan.recipe->read_node(target);
  const Node& node = plan.recipe->nodes[root];
  if (node.op == Op::stored) return fn(node.from);  // most targets
  for (const uint32_t stored : stored_under(*plan.recipe, root)) fn(stored);
}

std::vector<uint32_t> order_of(const Plan& plan) {
  const Recipe& recipe = *plan.recipe;
  std::vector<uint32_t> order;
  std::vector<uint32_t> first(recipe.targets.size(), UINT32_MAX);
  for (uint32_t t = 0; t < recipe.targets.size(); ++t) {
    if (recipe.is_alias(t) && !recipe.is_compared(t)) continue;
    order.push_back(t);
    for_each_source(plan, t, [&](uint32_t stored) { first[t] = std::min(first[t], stored); });
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return first[a] < first[b]; });
  return order;
}

std::vector<Tie> ties_of(const Recipe& recipe) {
  std::vector<Tie> ties;
  for (uint32_t t = 0; t < recipe.targets.size(); ++t) {
    if (recipe.is_compared(t)) ties.push_back({t, recipe.nodes[recipe.targets[t].root].from});
  }
  return ties;
}

// The first pass counts each tensor's targets; the second fills them in, in the plan's order.
Uses uses_of(const Plan& plan) {
  const auto for_each_use = [&](const auto& fn) {
    for (const uint32_t t : plan.order) {
      for_each_source(plan, t, [&](uint32_t stored) {
        fn(stored, t);
        if (const auto scale = scale_for(plan, t, stored)) fn(*scale, t);
      });
    }
  };
  Uses uses;
  uses.begins.resize(plan.manifest->tensors.size() + 1);
  for_each_use([&](uint32_t stored, uint32_t) { ++uses.begins[stored + 1]; });
  std::partial_sum(uses.begins.begin(), uses.begins.end(), uses.begins.begin());
  uses.targets.resize(uses.begins.back());
  std::vector<uint32_t> next = uses.begins;
  for_each_use([&](uint32_t stored, uint32_t target) { uses.targets[next[stored]++] = target; });
  return uses;
}

// Elements smaller than a byte can only be copied in stored order, in runs that end on a byte.
void refuse_unsupported(const Plan& plan) {
  for (const uint32_t t : plan.order) {
    const Target& target = plan.recipe->targets[t];
    if (bits_per_element(target.spec.dtype) % 8 == 0) continue;
    const Node& root = plan.recipe->nodes[plan.recipe->read_node(t)];
    if (root.op != Op::stored) {
      fail(Category::unsupported, "a recipe rearranges elements smaller than a byte",
           {.tensor = target.spec.fqn});
    }
    for (int rank = 0; rank < plan.ranks(); ++rank) {
      for_each_transfer_from(plan, rank, root.from, [&](const Transfer& transfer) {
        const Runs& runs = transfer.runs;
        // extent_of throws if a run does not begin and end on a byte. If the first two runs do, the
        // stride is whole bytes, so all runs do.
        for (int64_t k = 0; k < std::min<int64_t>(2, runs.count); ++k) {
          extent_of(plan.manifest->tensors[root.from], runs.first + k * runs.stride, runs.length);
        }
      });
    }
  }
}

void refuse_unreadable(const Plan& plan) {
  if (!plan.manifest->only_rank_0) return;
  for (int rank = 1; rank < plan.ranks(); ++rank) {
    if (!reads_storage(plan, rank)) continue;
    fail(Category::usage, "only rank 0 can read the stored tensors",
         {.expected = "node-reader", .got = std::string(plan.strategy().name)});
  }
}

// Whether a target with Destination::copy has another dtype than one of its stored tensors.
bool casts(const Plan& plan) {
  const Recipe& recipe = *plan.recipe;
  for (uint32_t t = 0; t < recipe.targets.size(); ++t) {
    if (destination_of(plan, t) != Destination::copy || recipe.is_alias(t)) continue;
    for (const uint32_t stored : stored_under(recipe, recipe.targets[t].root)) {
      const DType dtype = plan.manifest->tensors[stored].spec.dtype;
      if (dtype != recipe.targets[t].spec.dtype) return true;
    }
  }
  return false;
}

// The least part of a Gather, of two halves: each has a list of 16 bytes or more per rank, and a
// slot of a page.
uint64_t least_gather_part(const Plan& plan) {
  constexpr uint64_t kHeadBytes = 256, kListBytes = 16;
  const auto ranks = static_cast<uint64_t>(ranks_per_node(plan));
  return round_up(kHeadBytes + 2 * (kListBytes * ranks + kPageBytes), kPageBytes);
}

Staging divide_staging(const Plan& plan) {
  const PlanOptions& options = plan.options;
  const Strategy& strategy = plan.strategy();
  const auto group = static_cast<uint64_t>(exchange_group(plan, 0).size());
  const bool streams = strategy.of_reader == Window::none;
  bool copies = options.destination == Destination::copy;
  for (const Destination to : options.destination_of) copies |= to == Destination::copy;
  Staging staging;
  staging.exchanges = group > 1;
  uint64_t left = round_up(options.staging_bytes, kPageBytes);
  if (staging.exchanges && !options.caller_sends) {
    // One ring for the group. Each rank commits, and is charged, an equal part of it, so that the
    // charge is the memory that the kernel counts for the rank.
    staging.ring_part_bytes = std::max(kPageBytes, left / group / kPageBytes * kPageBytes);
    left -= std::min(left, staging.ring_part_bytes);
  }
  if (options.gathers && gathers(plan)) {  // a quarter of the rest; the slots get the other three
    staging.gather_part_bytes = left / 4 / kPageBytes * kPageBytes;
    if (staging.gather_part_bytes < least_gather_part(plan)) staging.gather_part_bytes = 0;
    left -= staging.gather_part_bytes;
  }
  staging.total_bytes = staging.ring_part_bytes + staging.gather_part_bytes;
  if (!streams && !copies) return staging;
  staging.total_bytes += left;
  staging.table_bytes = streams ? round_up(kReadTableRows * sizeof(Transfer), kPageBytes) : 0;
  staging.slot_bytes = std::min(kSlotBytes, (left - staging.table_bytes) / kPageBytes * kPageBytes);
  staging.tile_bytes = staging.slot_bytes;
  if (casts(plan)) {
    // A cast within the slot needs room for its input (the tile) and its output, which is at most
    // four times as large. So the tile is a fifth of the slot.
    staging.tile_bytes = staging.slot_bytes / 5 / 64 * 64;
  } else if (copies) {
    staging.tile_bytes -= std::min(kLineRoomBytes, staging.slot_bytes / 2);
  }
  const uint64_t workers = left / (staging.table_bytes + staging.slot_bytes);
  staging.workers = streams && group > 1 ? 1 : static_cast<int>(workers);
  return staging;
}

// The phases of a promise. Each rank adds its charges to all of them, in their order.
class Phases {
 public:
  void begin_rank() noexcept { next_ = 0; }
  void add(const std::string& name, Footprint of_rank, int threads) {
    of_rank[Purpose::process] += thread_bytes(threads);
    if (next_ == phases_.size()) phases_.push_back({name, {}});
    phases_[next_++].of_rank.push_back(of_rank);
  }
  std::vector<Phase> take() noexcept { return std::move(phases_); }

 private:
  std::vector<Phase> phases_;
  size_t next_ = 0;
};

// What every rank holds from the start, and what its read of a state adds.
struct CommonCharges {
  explicit CommonCharges(const Plan& plan) {
    open[Purpose::header] = plan.manifest->held_bytes();
    open[Purpose::plan] = plan.held_bytes();
    if (!plan.options.resume) return;
    open += *plan.options.resume;
    std::swap(open[Purpose::staging], resume[Purpose::staging]);
  }

  Footprint open, resume;
};

// The charges of a save on top of those of the phase before it.
Footprint save_charges(const PlanOptions& options) {
  Footprint save = *options.save;
  uint64_t& staging = save[Purpose::staging];
  if (staging == 0) staging = round_up(options.staging_bytes, kPageBytes);
  return save;
}

Promise promise_of(const Plan& plan) {
  const PlanOptions& options = plan.options;
  // Strategies with windows have all ranks read, or rank 0 only. So rank 0 has a reader's window,
  // and the last rank has that of the other ranks, if there are any.
  const uint64_t of_reader = RankWindow(plan, 0).bytes();
  const uint64_t of_others = RankWindow(plan, plan.ranks() - 1).bytes();
  std::map<uint64_t, uint64_t> shards_of_class;
  const CommonCharges common(plan);
  Phases phases;
  for (int rank = 0; rank < plan.ranks(); ++rank) {
    Footprint open = common.open;
    if (!options.baseline_of.empty()) {
      open[Purpose::process] = options.baseline_of.at(static_cast<size_t>(rank));
    }
    Footprint hold = open;
    const auto [shards, is_new] = shards_of_class.try_emplace(buffer_class(plan.layout, rank), 0);
    if (is_new) shards->second = round_up(arena_begins(plan, rank).back(), kPageBytes);
    hold[Purpose::shards] = shards->second;
    if (options.fork == Fork::inherited) hold[Purpose::fork] = shards->second;
    Footprint load = hold;
    load[Purpose::window] = reads_storage(plan, rank) ? of_reader : of_others;
    load[Purpose::staging] = plan.staging.total_bytes;
    load[Purpose::init] = options.init_bytes;
    phases.begin_rank();
    phases.add("open", open, 1);
    phases.add("load", load, plan.staging.workers_of(options.threads));
    phases.add("hold", hold, 1);
    // The ring's shared pages stay until the launcher ends.
    hold[Purpose::staging] = plan.staging.ring_part_bytes;
    Footprint last = hold;
    for (const Phase& after : options.after) {
      last = hold;
      last += after.of_rank.at(static_cast<size_t>(rank));
      phases.add(after.name, last, options.threads);
    }
    if (options.save) {
      Footprint save = last;
      save += save_charges(options);
      const uint64_t workers = std::max<uint64_t>(1, options.staging_bytes / kSlotBytes);
      const auto threads = static_cast<uint64_t>(options.threads);
      phases.add("save", save, static_cast<int>(std::min(workers, threads)));
    }
    if (options.resume) {
      Footprint read = last;
      read += common.resume;
      phases.add("resume", read, options.threads);
    }
  }
  const uint64_t of_each = options.baseline_of.empty() ? options.baseline_bytes : 0;
  return make_promise(phases.take(), of_each, ranks_per_node(plan));
}

// Refuses a plan whose sums over ranks may have saturated: its promise would be wrong.
void refuse_uncountable(const Plan& plan) {
  for (const uint64_t peak : plan.promise.node_peaks()) {
    if (peak <= uint64_t{INT64_MAX}) continue;
    const auto bytes = [](const Target& t) {
      return bytes_of(t.spec.dtype, numel_of(t.spec.shape));
    };
    const auto& targets = plan.recipe->targets;
    const auto largest =
        std::max_element(targets.begin(), targets.end(),
                         [&](const Target& a, const Target& b) { return bytes(a) < bytes(b); });
    fail(Category::mismatch, "the ranks of a node would hold more bytes than can be counted",
         {.tensor = largest == targets.end() ? "" : largest->spec.fqn,
          .expected = fmt::format("at most {} bytes", INT64_MAX),
          .got = peak == UINT64_MAX ? "2^64 or more" : fmt::format("{}", peak)});
  }
}

Digest digest_inputs(const Plan& plan) {
  Hasher hasher;
  hasher.add(plan.manifest->identity.high).add(plan.manifest->identity.low);
  digest_recipe(*plan.recipe, hasher);
  digest_layout(plan.layout, hasher);
  const PlanOptions& o = plan.options;
  hasher.add(o.strategy->name).add(o.ranks_per_node).add(o.destination);
  hasher.add(o.staging_bytes).add(o.baseline_bytes).add(o.init_bytes).add(o.caller_sends);
  hasher.add(o.gathers).add(o.from_first.size());
  for (const bool is_from_first : o.from_first) hasher.add(is_from_first);
  hasher.add(o.fork);
  hasher.add(o.destination_of.size());
  for (const Destination to : o.destination_of) hasher.add(to);
  hasher.add(o.baseline_of.size());
  for (const uint64_t bytes : o.baseline_of) hasher.add(bytes);
  hasher.add(o.after.size());
  for (const std::optional<Footprint>& footprint : {o.save, o.resume}) {
    hasher.add(footprint.has_value());
    for (const uint64_t bytes : footprint.value_or(Footprint{}).bytes) hasher.add(bytes);
  }
  for (const Phase& phase : o.after) {
    hasher.add(phase.name).add(phase.of_rank.size());
    for (const Footprint& of_rank : phase.of_rank) {
      for (const uint64_t bytes : of_rank.bytes) hasher.add(bytes);
    }
  }
  return hasher.digest();
}

}  // namespace

uint64_t Plan::held_bytes() const noexcept {
  return recipe->held_bytes() + layout.held_bytes() +
         buffer_count(*this) * kBookkeepingBytesPerBuffer +
         heap_block_bytes((order.size() + uses.targets.size()) * sizeof(uint32_t)) +
         heap_block_bytes(ties.size() * (sizeof(Tie) + kBookkeepingBytesPerTie)) +
         // The 8 bytes more per stored tensor are for RankWindow's places.
         heap_block_bytes(uses.begins.size() * (sizeof(uint32_t) + sizeof(uint64_t)));
}

Plan make_plan(const Manifest& manifest, const Recipe& recipe, Layout layout, PlanOptions options) {
  MODICUM_ASSERT(options.strategy != nullptr);
  if (layout.kinds.empty()) fail(Category::usage, "a plan needs at least one rank");
  if (options.staging_bytes < kMinStagingBytes) {
    fail(Category::usage, "staging is too small to stream through",
         {.expected = fmt::format("at least {} bytes", kMinStagingBytes),
          .got = fmt::format("{}", options.staging_bytes)});
  }
  Plan plan;
  plan.manifest = &manifest;
  plan.recipe = &recipe;
  plan.layout = std::move(layout);
  plan.options = options;
  plan.order = order_of(plan);
  plan.ties = ties_of(recipe);
  plan.uses = uses_of(plan);
  prove_scales(plan);
  refuse_unsupported(plan);
  refuse_unreadable(plan);
  plan.staging = divide_staging(plan);
  plan.promise = promise_of(plan);
  refuse_uncountable(plan);
  plan.inputs = digest_inputs(plan);
  return plan;
}

Promise full_per_rank_promise(const Plan& plan) {
  Plan other = plan;
  other.options.strategy = &strategy_named("full-per-rank");
  other.staging = divide_staging(other);
  return promise_of(other);
}

}  // namespace modicum
