// What a load will read and send, counted by the generators that it follows.
#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

#include "modicum/plan/plan.h"

namespace modicum {
namespace {

// What is read in turn by those who hold the same; by one alone, where nobody does.
Traffic traffic_of_reads(const Plan& plan, int rank) {
  Traffic sum;
  std::vector<Transfer> table(kReadTableRows);
  const std::vector<int> group = exchange_group(plan, rank);
  size_t turn = 0;
  for_each_read(plan, rank, table, [&](const Read& read) {
    const uint64_t bytes = read.end - read.begin + read.scale.bytes();
    const bool reads = group[turn++ % group.size()] == rank;
    (reads ? sum.storage_read_bytes : sum.exchanged_bytes) += bytes;
    sum.reads += !reads ? 0 : read.scale.bytes() > 0 ? 2 : 1;
    sum.transfers += read.transfers.size();
    sum.needed_bytes += read.scale.bytes();
    for (const Transfer& t : read.transfers) sum.needed_bytes += bytes_of(t.from_dtype, t.numel());
  });
  return sum;
}

// Targets that are cut and read alike, if one is taken as it is stored: how much that comes to does
// not depend on where it stands.
using Alike = std::tuple<const Sharding*, DType, DType, std::vector<int64_t>>;

std::optional<Alike> alike(const Plan& plan, uint32_t target) {
  const Node& root = plan.recipe->nodes[plan.recipe->read_node(target)];
  const uint32_t holder = holder_of(plan, target);
  if (root.op != Op::stored || plan.layout.is_flat(holder)) return std::nullopt;
  std::vector<int64_t> shapes = root.shape;
  if (const auto& scale = plan.manifest->tensors[root.from].scale) {
    const TensorSpec& scales = plan.manifest->tensors[scale->tensor].spec;
    shapes.insert(shapes.end(), {-1, static_cast<int64_t>(scales.dtype)});
    shapes.insert(shapes.end(), scale->block.begin(), scale->block.end());
    shapes.insert(shapes.end(), scales.shape.begin(), scales.shape.end());
  }
  return Alike{&plan.layout.sharding_of(holder), root.dtype,
               plan.recipe->targets[target].spec.dtype, std::move(shapes)};
}

// Of each rank of a node whose leader reads.
std::vector<Traffic> traffic_on_node(const Plan& plan, int leader) {
  std::vector<Traffic> sums(exchange_group(plan, leader).size());
  std::vector<Traffic> of_target(sums.size());
  std::map<Alike, std::vector<Traffic>> known;
  const auto count = [&](const NodeRead& read) {
    of_target[0].storage_read_bytes += read.bytes();
    of_target[0].reads += read.scale.bytes() > 0 ? 2 : 1;
    for (size_t r = 1; r < of_target.size(); ++r) {
      of_target[r].exchanged_bytes += read.wanted[r].bytes();
    }
  };
  for (const uint32_t target : plan.order) {
    const auto kind = alike(plan, target);
    const auto seen = kind ? known.find(*kind) : known.end();
    if (seen != known.end()) {
      of_target = seen->second;
    } else {
      std::fill(of_target.begin(), of_target.end(), Traffic{});
      for_each_node_read_of(plan, leader, target, count);
      if (kind) known.emplace(*kind, of_target);
    }
    for (size_t r = 0; r < sums.size(); ++r) sums[r] += of_target[r];
  }
  return sums;
}

// Of one rank, where whole tensors are read.
Traffic traffic_of_window(const Plan& plan, int rank) {
  Traffic sum;
  const RankWindow window(plan, rank);
  window.for_each_read([&](const RankWindow::Read& read) {
    sum.storage_read_bytes += read.at.bytes();
    sum.reads += 1;
  });
  if (reads_storage(plan, rank)) return sum;
  const auto receive = [&](const RankWindow::Whole& of) {
    sum.exchanged_bytes += plan.manifest->tensors[of.stored].at.bytes();
  };
  window.for_each_tensor([&](const RankWindow::Tensor& tensor) {
    receive(tensor.elements);
    if (tensor.scale) receive(*tensor.scale);
  });
  return sum;
}

}  // namespace

Traffic traffic_of_rank(const Plan& plan, int rank) {
  if (plan.strategy().of_reader != Window::none) return traffic_of_window(plan, rank);
  if (plan.strategy().reader != Reader::node_leader) return traffic_of_reads(plan, rank);
  const int leader = exchange_group(plan, rank).front();
  return traffic_on_node(plan, leader)[static_cast<size_t>(rank - leader)];
}

Traffic& Traffic::operator+=(const Traffic& other) noexcept {
  const auto add = [](uint64_t& sum, uint64_t bytes) { sum = saturating_add(sum, bytes); };
  add(storage_read_bytes, other.storage_read_bytes);
  add(exchanged_bytes, other.exchanged_bytes);
  add(reads, other.reads);
  add(transfers, other.transfers);
  add(needed_bytes, other.needed_bytes);
  return *this;
}

Traffic traffic(const Plan& plan) {
  Traffic sum;
  if (plan.strategy().of_reader != Window::none) {
    // As in the promise: two kinds of ranks.
    const Traffic of_reader = traffic_of_window(plan, 0);
    const Traffic of_others = traffic_of_window(plan, plan.ranks() - 1);
    for (int rank = 0; rank < plan.ranks(); ++rank) {
      sum += reads_storage(plan, rank) ? of_reader : of_others;
    }
    return sum;
  }
  const bool by_node = plan.strategy().reader == Reader::node_leader;
  const int step = by_node ? static_cast<int>(exchange_group(plan, 0).size()) : 1;
  const int units = static_cast<int>(ceil_div(plan.ranks(), step));
  std::mutex mutex;
  const int workers = std::min(units, usable_cpus());
  run_workers(workers, [&](int worker) {
    for (int unit = worker; unit < units; unit += workers) {
      const int rank = unit * step;
      const std::vector<Traffic> of =
          by_node ? traffic_on_node(plan, rank) : std::vector{traffic_of_reads(plan, rank)};
      const std::lock_guard lock(mutex);
      for (const Traffic& one : of) sum += one;
    }
  });
  return sum;
}

}  // namespace modicum
