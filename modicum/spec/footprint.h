// Memory as a value: bytes per purpose. A promise consists of such values.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "modicum/base/base.h"
#include "modicum/spec/tensor.h"

namespace modicum {

// The purpose of a byte of host memory. `process` and `page_tables` are never in the ledger; all
// other purposes are charged there.
enum class Purpose : uint8_t {
  process,      // a rank process before Modicum allocates, and its threads
  page_tables,  // page tables of all mapped memory
  header,       // the manifest
  plan,         // recipe, layout and bookkeeping
  shards,       // the local buffers, padding included
  window,       // whole tensors or the whole model, with strategies that hold them
  master,       // master weights, or their low bits, that are not in the shards
  grad,         // accumulated gradients
  moments,      // exp_avg, exp_avg_sq and their scales
  staging,      // read slots, cast slots and exchange ring of a load; gradients as they arrive
  init,         // tensors that a PyTorch model initialises during the load
  snapshot,     // copies of values that training steps overwrite during a background save
  fork,         // copy-on-write duplicates of inherited memory that forked children may keep
  count
};

std::string_view purpose_name(Purpose purpose) noexcept;

struct Footprint {
  std::array<uint64_t, static_cast<size_t>(Purpose::count)> bytes{};

  uint64_t& operator[](Purpose purpose) noexcept { return bytes[static_cast<size_t>(purpose)]; }
  uint64_t operator[](Purpose purpose) const noexcept {
    return bytes[static_cast<size_t>(purpose)];
  }
  uint64_t total() const noexcept;
  uint64_t ledger_total() const noexcept;  // without process and page_tables
  Footprint& operator+=(const Footprint& other) noexcept;
  bool operator==(const Footprint&) const = default;
};

// Purposes with their bytes, largest first; those without bytes are left out.
std::vector<Owner> owners_of(const Footprint& footprint);
// Sorts the largest first; equal ones keep their order.
void sort_by_bytes(std::vector<Owner>& owners);

// A phase of a run, with one footprint per rank.
struct Phase {
  std::string name;                // "open", "load", "hold", "step", ...
  std::vector<Footprint> of_rank;  // indexed by rank
};

// The memory that a run will hold, by phase and rank, known before it starts. Its functions throw
// USAGE for a rank that the run does not have.
struct Promise {
  std::vector<Phase> phases;
  std::vector<uint32_t> node_of_rank;
  uint64_t launcher_bytes = 0;  // per node: the process that starts and watches the ranks

  int ranks() const noexcept { return static_cast<int>(node_of_rank.size()); }
  int nodes() const noexcept;
  bool is_on(int node, int rank) const;
  uint64_t rank_peak_bytes(int rank) const;  // in its highest phase
  // The sum of the launcher and the node's ranks, each in its own peak phase or all in `phase`.
  Footprint on_node(int node, const Phase* phase = nullptr) const;
  // The total of on_node(node). It adds the ranks' own peaks, since ranks may be in different
  // phases at the same time.
  uint64_t node_peak_bytes(int node) const;
  std::vector<uint64_t> node_peaks() const;  // of every node
  const Phase& peak_phase(int rank) const;
  // The limit of a rank's ledger: its highest phase without process and page tables.
  uint64_t ledger_limit_bytes(int rank) const;
};

// The memory of the launcher, the process that starts and watches the ranks.
constexpr uint64_t kLauncherBytes = 8 * kMiB;
// The memory of a rank process before Modicum allocates.
constexpr uint64_t kBaselineBytes = 2 * kMiB;
// What a thread holds: the touched pages of its stack, and their page table.
constexpr uint64_t kThreadBytes = 24 * kKiB;
// kBaselineBytes has room for this many threads.
constexpr int kBaselineThreads = 64;
// The memory of a rank's `threads` that kBaselineBytes has no room for.
uint64_t thread_bytes(int threads) noexcept;

// Makes a promise of phases that list each rank's charges. Adds `process_bytes` and page tables to
// each rank. With `ranks_per_node` 0, all ranks are on one node.
Promise make_promise(std::vector<Phase> charged, uint64_t process_bytes = kBaselineBytes,
                     int ranks_per_node = 0);

// Bytes of the page tables of `mapped_bytes` of touched memory, in whole pages: 8 bytes per 4 KiB
// page, and a page per GiB for the upper levels. Measured: 0.196 %, also with huge pages.
uint64_t page_table_bytes(uint64_t mapped_bytes) noexcept;

// Heap bytes that a value owns, in the allocator's granules.
uint64_t heap_bytes(const std::string& text) noexcept;
uint64_t heap_bytes(const TensorSpec& spec) noexcept;
// The size of a heap block for `bytes` in glibc: a multiple of 16, with an 8-byte header, at least
// 32.
constexpr uint64_t heap_block_bytes(uint64_t bytes) noexcept {
  return bytes == 0 ? 0 : (bytes + 8 + 15) / 16 * 16 < 32 ? 32 : (bytes + 8 + 15) / 16 * 16;
}

}  // namespace modicum
