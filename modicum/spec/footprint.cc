#include "modicum/spec/footprint.h"

#include <algorithm>

#include "modicum/base/base.h"

namespace modicum {
namespace {

constexpr std::array<std::string_view, static_cast<size_t>(Purpose::count)> kNames = {
    "process", "page_tables", "header",  "plan", "shards",   "window", "master",
    "grad",    "moments",     "staging", "init", "snapshot", "fork"};

}  // namespace

std::string_view purpose_name(Purpose purpose) noexcept {
  return kNames[static_cast<size_t>(purpose)];
}

uint64_t Footprint::total() const noexcept {
  uint64_t sum = 0;
  for (const uint64_t b : bytes) sum = saturating_add(sum, b);
  return sum;
}

uint64_t Footprint::ledger_total() const noexcept {
  Footprint ledger = *this;
  ledger[Purpose::process] = ledger[Purpose::page_tables] = 0;
  return ledger.total();
}

Footprint& Footprint::operator+=(const Footprint& other) noexcept {
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = saturating_add(bytes[i], other.bytes[i]);
  return *this;
}

std::vector<Owner> owners_of(const Footprint& footprint) {
  std::vector<Owner> owners;
  for (size_t p = 0; p < footprint.bytes.size(); ++p) {
    if (footprint.bytes[p] == 0) continue;
    owners.push_back({std::string(purpose_name(static_cast<Purpose>(p))), footprint.bytes[p]});
  }
  sort_by_bytes(owners);
  return owners;
}

void sort_by_bytes(std::vector<Owner>& owners) {
  std::stable_sort(owners.begin(), owners.end(),
                   [](const Owner& a, const Owner& b) { return a.bytes > b.bytes; });
}

int Promise::nodes() const noexcept {
  return node_of_rank.empty() ? 0 : static_cast<int>(node_of_rank.back()) + 1;
}

Promise make_promise(std::vector<Phase> charged, uint64_t process_bytes, int ranks_per_node) {
  Promise promise{.phases = std::move(charged), .launcher_bytes = kLauncherBytes};
  for (Phase& phase : promise.phases) {
    for (Footprint& of_rank : phase.of_rank) {
      of_rank[Purpose::process] += process_bytes;
      of_rank[Purpose::page_tables] = page_table_bytes(of_rank.ledger_total());
    }
  }
  const auto ranks = static_cast<uint32_t>(promise.phases.front().of_rank.size());
  const uint32_t per_node = ranks_per_node > 0 ? static_cast<uint32_t>(ranks_per_node) : ranks;
  for (uint32_t rank = 0; rank < ranks; ++rank) promise.node_of_rank.push_back(rank / per_node);
  return promise;
}

bool Promise::is_on(int node, int rank) const {
  return node_of_rank[static_cast<size_t>(checked_rank(rank, ranks()))] ==
         static_cast<uint32_t>(node);
}

const Phase& Promise::peak_phase(int rank) const {
  checked_rank(rank, ranks());
  const auto total = [rank](const Phase& phase) {
    return phase.of_rank[static_cast<size_t>(rank)].total();
  };
  return *std::max_element(phases.begin(), phases.end(),
                           [&](const Phase& a, const Phase& b) { return total(a) < total(b); });
}

uint64_t Promise::rank_peak_bytes(int rank) const {
  return peak_phase(rank).of_rank[static_cast<size_t>(rank)].total();
}

uint64_t Promise::ledger_limit_bytes(int rank) const {
  checked_rank(rank, ranks());
  uint64_t most = 0;
  for (const Phase& phase : phases) {
    most = std::max(most, phase.of_rank[static_cast<size_t>(rank)].ledger_total());
  }
  return most;
}

Footprint Promise::on_node(int node, const Phase* phase) const {
  Footprint sum;
  sum[Purpose::process] = launcher_bytes;
  // make_promise numbers the nodes in the order of the ranks.
  const auto of_node =
      std::equal_range(node_of_rank.begin(), node_of_rank.end(), static_cast<uint32_t>(node));
  for (auto at = of_node.first; at != of_node.second; ++at) {
    const auto rank = static_cast<int>(at - node_of_rank.begin());
    sum += (phase != nullptr ? *phase : peak_phase(rank)).of_rank[static_cast<size_t>(rank)];
  }
  return sum;
}

uint64_t Promise::node_peak_bytes(int node) const { return on_node(node).total(); }

std::vector<uint64_t> Promise::node_peaks() const {
  std::vector<uint64_t> peaks(static_cast<size_t>(nodes()), launcher_bytes);
  for (int rank = 0; rank < ranks(); ++rank) {
    uint64_t& peak = peaks[node_of_rank[static_cast<size_t>(rank)]];
    peak = saturating_add(peak, rank_peak_bytes(rank));
  }
  return peaks;
}

uint64_t thread_bytes(int threads) noexcept {
  return static_cast<uint64_t>(std::max(0, threads - kBaselineThreads)) * kThreadBytes;
}

uint64_t page_table_bytes(uint64_t mapped_bytes) noexcept {
  const uint64_t entries = round_up(mapped_bytes / 512, kPageBytes);
  const uint64_t tables = mapped_bytes / kGiB + (mapped_bytes % kGiB != 0 ? 1 : 0);
  return entries + tables * kPageBytes;
}

uint64_t heap_bytes(const std::string& text) noexcept {
  constexpr size_t kInPlace = 15;  // libstdc++ stores such short texts inside the string
  return text.size() <= kInPlace ? 0 : heap_block_bytes(text.size() + 1);
}

uint64_t heap_bytes(const TensorSpec& spec) noexcept {
  return heap_bytes(spec.fqn) + heap_block_bytes(spec.shape.size() * sizeof(int64_t));
}

}  // namespace modicum
