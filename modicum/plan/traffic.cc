// The bytes that a load will read and send, counted with the generators that the load runs.
#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "modicum/plan/inside.h"
#include "modicum/plan/plan.h"

namespace modicum {
namespace {

// The traffic of `rank` if it makes all reads that its buffers need.
Traffic traffic_of_reads(const Plan& plan, int rank) {
  Traffic sum;
  std::vector<Transfer> table(kReadTableRows);
  for_each_read(plan, rank, table, [&](const Read& read) {
    sum.storage_read_bytes += read.bytes();
    sum.reads += read.scale.bytes() > 0 ? 2 : 1;  // scales take a second read
    sum.transfers += read.transfers.size();
    sum.needed_bytes += read.scale.bytes();
    for (const Transfer& t : read.transfers) sum.needed_bytes += bytes_of(t.from_dtype, t.numel());
  });
  return sum;
}

// Ranks that hold the same elements of every target, and so make the same reads.
struct Group {
  int first = 0;  // the lowest rank
  uint64_t count = 1;
};

// The traffic of all ranks of a group. With replica-striped one rank makes each read and sends it
// to the others; with own-shard each rank makes all reads.
Traffic traffic_of_group(const Plan& plan, const Group& group) {
  const uint64_t readers = plan.strategy().reader == Reader::replicas ? 1 : group.count;
  const Traffic per_rank = traffic_of_reads(plan, group.first);
  return {.storage_read_bytes = saturating_mul(per_rank.storage_read_bytes, readers),
          .exchanged_bytes = saturating_mul(per_rank.storage_read_bytes, group.count - readers),
          .reads = saturating_mul(per_rank.reads, readers),
          .transfers = saturating_mul(per_rank.transfers, group.count),
          .needed_bytes = saturating_mul(per_rank.needed_bytes, group.count)};
}

// Everything that determines the traffic of a target that is one stored tensor. Targets of one kind
// cause equal reads and sends at different file offsets, so each kind is counted once. A model with
// 60 layers has a dozen kinds.
struct TargetKind {
  struct Scales {
    DType dtype;
    std::array<int64_t, 2> block;
    std::vector<int64_t> shape;
    auto operator<=>(const Scales&) const = default;
  };
  const Sharding* sharding;
  DType stored_dtype;
  DType loaded_dtype;
  std::vector<int64_t> shape;
  std::optional<Scales> scales;
  auto operator<=>(const TargetKind&) const = default;
};

std::optional<TargetKind> kind_of(const Plan& plan, uint32_t target) {
  const Node& root = plan.recipe->nodes[plan.recipe->read_node(target)];
  const uint32_t holder = holder_of(plan, target);
  if (root.op != Op::stored || plan.layout.is_flat(holder)) return std::nullopt;
  TargetKind kind{&plan.layout.sharding_of(holder), root.dtype,
                  plan.recipe->targets[target].spec.dtype, root.shape, std::nullopt};
  if (const auto& scale = plan.manifest->tensors[root.from].scale) {
    const TensorSpec& spec = plan.manifest->tensors[scale->tensor].spec;
    kind.scales = {spec.dtype, scale->block, spec.shape};
  }
  return kind;
}

// The index of each target's kind; kNoKind for a target that must be counted individually.
constexpr uint32_t kNoKind = UINT32_MAX;
std::vector<uint32_t> kinds_of(const Plan& plan) {
  std::map<TargetKind, uint32_t> numbers;
  std::vector<uint32_t> kinds(plan.recipe->targets.size(), kNoKind);
  for (const uint32_t t : plan.order) {
    const auto next = static_cast<uint32_t>(numbers.size());
    if (auto kind = kind_of(plan, t)) {
      kinds[t] = numbers.try_emplace(*std::move(kind), next).first->second;
    }
  }
  return kinds;
}

// The traffic of each rank of a node whose leader reads.
std::vector<Traffic> traffic_on_node(const Plan& plan, int leader,
                                     std::span<const uint32_t> kinds) {
  const NodeRanks node = node_of(plan, leader);
  std::vector<Traffic> sums(static_cast<size_t>(node.end - node.first));
  std::vector<Traffic> of_target(sums.size());
  std::map<uint32_t, std::vector<Traffic>> known;  // by kind
  const auto count = [&](const NodeRead& read) {
    of_target[0].storage_read_bytes += read.bytes();
    of_target[0].reads += read.scale.bytes() > 0 ? 2 : 1;
    for (size_t r = 1; r < of_target.size(); ++r) {
      of_target[r].exchanged_bytes += read.wanted[r].bytes();
    }
  };
  for (const uint32_t target : plan.order) {
    if (const auto seen = known.find(kinds[target]); seen != known.end()) {
      of_target = seen->second;
    } else {
      std::fill(of_target.begin(), of_target.end(), Traffic{});
      for_each_node_read_of(plan, leader, target, count);
      if (kinds[target] != kNoKind) known.emplace(kinds[target], of_target);
    }
    for (size_t r = 0; r < sums.size(); ++r) sums[r] += of_target[r];
  }
  return sums;
}

// The traffic of one rank with a strategy that reads whole tensors.
Traffic traffic_of_window(const Plan& plan, int rank) {
  Traffic sum;
  const RankWindow window(plan, rank);
  window.for_each_read([&](const RankWindow::Read& read) {
    sum.storage_read_bytes += read.at.bytes();
    sum.reads += 1;
  });
  if (reads_storage(plan, rank)) return sum;
  const auto receive = [&](const RankWindow::WholeTensor& whole) {
    sum.exchanged_bytes += plan.manifest->tensors[whole.stored].at.bytes();
  };
  window.for_each_tensor([&](const RankWindow::Tensor& tensor) {
    receive(tensor.elements);
    if (tensor.scale) receive(*tensor.scale);
  });
  return sum;
}

}  // namespace

Traffic& Traffic::operator+=(const Traffic& other) noexcept {
  for (uint64_t Traffic::*const count :
       {&Traffic::storage_read_bytes, &Traffic::exchanged_bytes, &Traffic::reads,
        &Traffic::transfers, &Traffic::needed_bytes}) {
    this->*count = saturating_add(this->*count, other.*count);
  }
  return *this;
}

Traffic traffic(const Plan& plan) {
  Traffic sum;
  if (plan.strategy().of_reader != Window::none) {
    // As in the promise, all reading ranks have equal windows, and so have all other ranks.
    const Traffic of_reader = traffic_of_window(plan, 0);
    const Traffic of_others = traffic_of_window(plan, plan.ranks() - 1);
    for (int rank = 0; rank < plan.ranks(); ++rank) {
      sum += reads_storage(plan, rank) ? of_reader : of_others;
    }
    return sum;
  }
  const bool by_node = plan.strategy().reader == Reader::node_leader;
  std::vector<uint32_t> kinds;
  std::vector<Group> units;  // nodes, by their first rank, or groups of replicas
  if (by_node) {
    kinds = kinds_of(plan);
    for (int rank = 0; rank < plan.ranks(); rank = node_of(plan, rank).end) units.push_back({rank});
  } else {
    for_each_replica_group(plan.layout, [&](std::span<const int> ranks) {
      units.push_back({ranks.front(), ranks.size()});
    });
  }
  std::mutex mutex;
  const auto workers = std::min(units.size(), static_cast<size_t>(usable_cpus()));
  run_workers(static_cast<int>(workers), [&](int worker) {
    for (auto unit = static_cast<size_t>(worker); unit < units.size(); unit += workers) {
      const std::vector<Traffic> counted = by_node
                                               ? traffic_on_node(plan, units[unit].first, kinds)
                                               : std::vector{traffic_of_group(plan, units[unit])};
      const std::lock_guard lock(mutex);
      for (const Traffic& traffic : counted) sum += traffic;
    }
  });
  return sum;
}

}  // namespace modicum
