#include "modicum/probe/kinds.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>

#include "modicum/io/io.h"
#include "modicum/probe/kernel_text.h"
#include "modicum/probe/mappings.h"
#include "modicum/probe/probe.h"

namespace modicum {
namespace {

// glibc reserves the addresses of a heap as a whole, aligned to its size, and makes the part in use
// readable and writable.
constexpr uint64_t kHeapAddresses = 64 * kMiB;
// Below a thread's stack glibc leaves a guard without access. Another mapping may follow the stack
// without a gap, and the kernel joins the two: at most this much counts as a stack.
constexpr uint64_t kLargestGuard = 64 * kKiB;
constexpr uint64_t kLargestStack = 8 * kMiB;
constexpr uint64_t kBlockBytes = 2 * kMiB;  // as much as the kernel walks at a time

struct Part {
  AddressRange at;
  MemoryKind kind;
};

// Whether `rest` holds the unused addresses of the last heap in `used`, mapped without access.
// The kernel merges adjacent mappings: `used` may consist of several heaps, the earlier ones full,
// and `rest` may continue into an adjacent reservation.
bool is_rest_of(const ProcessMapping& used, const ProcessMapping& rest) {
  return rest.access == "---p" && rest.name.empty() && rest.at.begin == used.at.end &&
         rest.at.end % kHeapAddresses == 0;
}

bool is_guard(const ProcessMapping& guard, const ProcessMapping& stack) {
  return guard.access == "---p" && guard.name.empty() && guard.at.end == stack.at.begin &&
         guard.at.end - guard.at.begin <= kLargestGuard;
}

// The loader protects a part of a library's data after it has written it ("relro"): the mapping
// before that of the data.
bool is_written_file(const std::vector<ProcessMapping>& mappings, size_t at) {
  const ProcessMapping& mapping = mappings[at];
  if (mapping.access[1] == 'w') return true;
  if (mapping.access != "r--p" || at + 1 == mappings.size()) return false;
  const ProcessMapping& next = mappings[at + 1];
  return next.name == mapping.name && next.at.begin == mapping.at.end && next.access[1] == 'w';
}

// The part of a mapping whose pages are counted; none for large blocks, which are the rest.
std::optional<Part> part_of(const std::vector<ProcessMapping>& mappings, size_t at) {
  const ProcessMapping& mapping = mappings[at];
  if (!mapping.is_private()) return std::nullopt;
  if (mapping.name == "[heap]") return Part{mapping.at, MemoryKind::malloc_heap};
  if (mapping.name == "[stack]") return Part{mapping.at, MemoryKind::stacks};
  if (!mapping.name.empty()) {
    if (mapping.name[0] != '/' || !is_written_file(mappings, at)) return std::nullopt;
    return Part{mapping.at, MemoryKind::file_copies};
  }
  if (arena_heaps_in(mappings, at) > 0) return Part{mapping.at, MemoryKind::malloc_arenas};
  if (mapping.access != "rw-p" || at == 0 || !is_guard(mappings[at - 1], mapping)) {
    return std::nullopt;
  }
  const uint64_t size = std::min(mapping.at.end - mapping.at.begin, kLargestStack);
  return Part{{mapping.at.begin, mapping.at.begin + size}, MemoryKind::stacks};
}

uint64_t blocks_in(const Part& part) {
  return (part.at.end - part.at.begin + kBlockBytes - 1) / kBlockBytes;
}

// Counts the resident private pages of the parts, in every n-th block.
MemoryKinds count_pages(const std::vector<Part>& parts, File& pagemap) {
  const uint64_t blocks =
      std::transform_reduce(parts.begin(), parts.end(), uint64_t{0}, std::plus<>(), blocks_in);
  const uint64_t every = std::max<uint64_t>(1, (blocks + kMaxKindBlocks - 1) / kMaxKindBlocks);
  MemoryKinds kinds;
  std::array<uint64_t, kBlockBytes / kPageBytes> entries{};
  uint64_t block = 0;
  for (const Part& part : parts) {
    for (uint64_t at = part.at.begin; at < part.at.end; at += kBlockBytes, ++block) {
      if (block % every != 0) continue;
      const uint64_t pages = std::min(kBlockBytes, part.at.end - at) / kPageBytes;
      const auto read = std::span(entries).first(pages);
      pagemap.read(std::as_writable_bytes(read), at / kPageBytes * sizeof(uint64_t));
      const auto resident = std::count_if(read.begin(), read.end(), is_private_memory);
      kinds[part.kind] += static_cast<uint64_t>(resident) * kPageBytes * every;
    }
  }
  return kinds;
}

}  // namespace

std::optional<ProcessMapping> mapping_of(std::string_view line) {
  const auto words = split_kernel_text(line, ' ');
  if (words.size() < 2 || words[1].size() != 4) return std::nullopt;
  const size_t dash = words[0].find('-');
  if (dash == std::string_view::npos) return std::nullopt;
  const auto begin = parse_kernel_number(words[0].substr(0, dash), 16);
  const auto end = parse_kernel_number(words[0].substr(dash + 1), 16);
  if (!begin || !end || *begin >= *end) return std::nullopt;
  ProcessMapping mapping{{*begin, *end}, std::string(words[1]), ""};
  if (words.size() > 5 && !words[5].starts_with("[anon:")) mapping.name = words[5];
  return mapping;
}

std::optional<std::vector<ProcessMapping>> read_mappings(int pid, const std::string& root) {
  std::vector<ProcessMapping> mappings;
  const bool is_read =
      for_each_kernel_line(fmt::format("{}/proc/{}/maps", root, pid), [&](auto line) {
        if (auto mapping = mapping_of(line)) mappings.push_back(std::move(*mapping));
      });
  return is_read ? std::optional(std::move(mappings)) : std::nullopt;
}

// A mapping consists of heaps of threads if it is anonymous and writable, begins at a multiple of
// kHeapAddresses, and ends at one or is followed by the unused rest of its last heap.
uint64_t arena_heaps_in(const std::vector<ProcessMapping>& mappings, size_t at) {
  const ProcessMapping& used = mappings[at];
  const bool is_aligned = used.at.begin % kHeapAddresses == 0;
  if (!is_aligned || !used.name.empty() || used.access != "rw-p") return 0;
  const bool is_full = used.at.end % kHeapAddresses == 0;
  if (!is_full && !(at + 1 < mappings.size() && is_rest_of(used, mappings[at + 1]))) return 0;
  return (round_up(used.at.end, kHeapAddresses) - used.at.begin) / kHeapAddresses;
}

std::string_view memory_kind_name(MemoryKind kind) noexcept {
  constexpr std::array<std::string_view, kMemoryKinds> kNames = {
      "malloc_heap", "malloc_arenas", "stacks", "file_copies", "anonymous", "shared_memory"};
  return kNames[static_cast<size_t>(kind)];
}

uint64_t MemoryKinds::total() const noexcept {
  return std::accumulate(bytes.begin(), bytes.end(), uint64_t{0});
}

namespace {

std::optional<ProcessKinds> read_process_kinds(int pid, const std::string& root) {
  if (is_in_parents_memory(pid, root)) return std::nullopt;
  const auto mappings = read_mappings(pid, root);
  if (!mappings || mappings->empty()) return std::nullopt;
  std::vector<Part> parts;
  for (size_t at = 0; at < mappings->size(); ++at) {
    if (const auto part = part_of(*mappings, at)) parts.push_back(*part);
  }
  ProcessKinds process{.pid = pid};
  MemoryKinds& kinds = process.kinds;
  try {
    kinds =
        count_pages(parts, *PosixFileSystem().open(fmt::format("{}/proc/{}/pagemap", root, pid)));
  } catch (const Error&) {
    return std::nullopt;
  }
  const auto status = read_status(pid, root);
  if (!status || !status->is_alive) return std::nullopt;
  // Every n-th block, or pages that were freed meanwhile, may add up to more than there is.
  const uint64_t counted = kinds.total();
  if (counted > status->rss_anon) {
    for (uint64_t& bytes : kinds.bytes) {
      bytes = static_cast<uint64_t>(static_cast<double>(bytes) / static_cast<double>(counted) *
                                    static_cast<double>(status->rss_anon));
    }
  }
  kinds[MemoryKind::anonymous] = status->rss_anon - std::min(status->rss_anon, kinds.total());
  kinds[MemoryKind::shared_memory] = status->rss_shmem;
  kinds.file_bytes = status->rss_file;
  process.name = status->name;
  return process;
}

}  // namespace

std::optional<MemoryKinds> read_memory_kinds(int pid, const std::string& root) {
  const auto process = read_process_kinds(pid, root);
  return process ? std::optional(process->kinds) : std::nullopt;
}

std::vector<ProcessKinds> read_tree_kinds(int pid, const std::string& root) {
  std::vector<int> pids = {pid};
  const std::vector<int> below = descendants(pid, root);
  pids.insert(pids.end(), below.begin(), below.end());
  std::vector<ProcessKinds> tree;
  for (const int member : pids) {
    if (auto process = read_process_kinds(member, root)) tree.push_back(std::move(*process));
  }
  return tree;
}

}  // namespace modicum
