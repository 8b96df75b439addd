// The pids and the resident private pages of a process and its descendants.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "modicum/io/io.h"
#include "modicum/probe/kernel_text.h"
#include "modicum/probe/mappings.h"
#include "modicum/probe/probe.h"

namespace modicum {
namespace {

// Further bits of an entry of /proc/PID/pagemap.
constexpr uint64_t kExclusive = uint64_t{1} << 56;    // mapped by one process only
constexpr uint64_t kFrame = (uint64_t{1} << 55) - 1;  // frame number; 0 without CAP_SYS_ADMIN
constexpr uint64_t kBlockPages = 65536;               // pages per read

std::string directory_of(int pid, const std::string& root) {
  return root + "/proc/" + std::to_string(pid);
}

// The parent's pid: the second word after the process name, which may contain any character.
int parent_of(const std::string& stat) {
  const size_t end = stat.rfind(')');
  if (end == std::string::npos) return 0;
  const auto words = split_kernel_text(std::string_view(stat).substr(end + 1), ' ');
  return words.size() < 2 ? 0 : static_cast<int>(parse_kernel_number(words[1]).value_or(0));
}

// ---- address space

// A private mapping of a process.
struct Area {
  AddressRange at;
  bool is_inherited = true;  // without MADV_DONTFORK
};

// Calls `line` with each line of a file of a process. Throws IO if it can't be read.
void for_each_line(int pid, const std::string& file, const std::string& root,
                   FunctionRef<void(std::string_view)> line) {
  if (for_each_kernel_line(directory_of(pid, root) + "/" + file, line)) return;
  fail(Category::io, "cannot read the memory map of the process",
       {.file = file, .culprit_pid = pid});
}

// The areas of a process with a resident page.
std::vector<Area> areas_of(int pid, const std::string& root) {
  std::vector<Area> areas;
  std::optional<ProcessMapping> mapping;
  bool is_resident = false;
  for_each_line(pid, "smaps", root, [&](std::string_view text) {
    if (auto next = mapping_of(text)) {
      mapping = std::move(next);
      is_resident = false;
    } else if (text.starts_with("Rss:")) {
      is_resident = kernel_number_after(text, "Rss:").value_or(0) > 0;
    } else if (text.starts_with("VmFlags:") && mapping && mapping->is_private() && is_resident) {
      // The last line of an area. "dc": do not copy at fork (MADV_DONTFORK).
      const bool is_left_out = text.find(" dc") != std::string_view::npos;
      areas.push_back({mapping->at, !is_left_out});
    }
  });
  return areas;
}

// The mapped ranges, adjacent ones merged.
std::vector<AddressRange> mapped_of(int pid, const std::string& root) {
  std::vector<AddressRange> mapped;
  for_each_line(pid, "maps", root, [&](std::string_view text) {
    const auto mapping = mapping_of(text);
    if (!mapping) return;
    if (!mapped.empty() && mapped.back().end == mapping->at.begin) {
      mapped.back().end = mapping->at.end;
    } else {
      mapped.push_back(mapping->at);
    }
  });
  return mapped;
}

bool covers(const std::vector<AddressRange>& mapped, const AddressRange& range) {
  return std::any_of(mapped.begin(), mapped.end(), [&](const AddressRange& mapping) {
    return mapping.begin <= range.begin && range.end <= mapping.end;
  });
}

// ---- pages
//
// Below, the first process is the root process of read_tree, or the parent in read_fork_copies.

// The pagemap entries of one process.
class Pages {
 public:
  Pages(int pid, const std::string& root)
      : file_(PosixFileSystem().open(directory_of(pid, root) + "/pagemap")),
        mapped_(mapped_of(pid, root)) {}

  // Whether this process can have inherited an area of the first process. If the area is excluded
  // from forks (MADV_DONTFORK), only a child that was forked before the exclusion has inherited it,
  // and maps the whole area. A child that was forked later has a gap there, and may have mapped
  // other memory into a part of the gap.
  bool may_show(const Area& area) const { return area.is_inherited || covers(mapped_, area.at); }

  void read(uint64_t address, std::span<uint64_t> entries) {
    file_->read(std::as_writable_bytes(entries), address / kPageBytes * sizeof(uint64_t));
  }

 private:
  std::unique_ptr<File> file_;
  std::vector<AddressRange> mapped_;
};

// Counts of the different pages that the processes map at one address (see RangeMemory).
struct DistinctPages {
  uint64_t own_pages = 0;
  uint64_t copied = 0;
  uint64_t shared = 0;  // part of own
};

// Whether two processes map one private page, so that a write by either copies it. Without access
// to frame numbers, which are then 0, two pages count as one if both are shared with some process.
bool is_same_page(uint64_t first, uint64_t other) {
  const auto is_shared = [](uint64_t entry) {
    return is_private_memory(entry) && (entry & kExclusive) == 0;
  };
  return is_shared(first) && is_shared(other) && ((first ^ other) & kFrame) == 0;
}

// The pages at one address that are not exclusive to a process, by frame.
class SharedPages {
 public:
  struct Row {
    uint64_t frame = 0;
    int shown_by = 0;       // how many processes map it
    bool by_first = false;  // whether the first process does
  };

  // Adds the entry of a process. The first process must be added before all others. Returns the
  // index of its row. If the table is full, all further frames share the last row.
  size_t add(uint64_t entry, bool is_first) noexcept {
    const uint64_t frame = entry & kFrame;
    size_t at = 0;
    while (at < n_ && rows_[at].frame != frame) ++at;
    if (at == n_ && n_ < rows_.size()) rows_[n_++] = {frame, 0, is_first};
    at = std::min(at, rows_.size() - 1);
    ++rows_[at].shown_by;
    return at;
  }
  std::span<const Row> rows() const noexcept { return {rows_.data(), n_}; }

 private:
  std::array<Row, 8> rows_{};
  size_t n_ = 0;
};

// The number of different pages that the processes map at one address. `entries` has one entry per
// process, the first process's first. Without access to frame numbers, all shared mappings count as
// one page. A page that is not exclusive, though only one of the processes maps it, is not counted:
// it is the zero page, or is shared with a process outside of the tree.
DistinctPages distinct(std::span<const uint64_t> entries) {
  SharedPages shared;
  DistinctPages pages;
  for (size_t i = 0; i < entries.size(); ++i) {
    if (!is_private_memory(entries[i])) continue;
    if ((entries[i] & kExclusive) != 0) {
      ++(i == 0 ? pages.own_pages : pages.copied);
    } else {
      shared.add(entries[i], i == 0);
    }
  }
  for (const SharedPages::Row& row : shared.rows()) {
    if (row.shown_by > 1) ++(row.by_first ? pages.own_pages : pages.copied);
  }
  return pages;
}

// Adds each process's part of the copied pages to its element of `bytes`, except for the first
// process.
void add_copies(std::span<const uint64_t> entries, std::span<uint64_t> bytes) {
  SharedPages shared;
  for (size_t i = 0; i < entries.size(); ++i) {
    if (!is_private_memory(entries[i])) continue;
    if ((entries[i] & kExclusive) == 0) {
      shared.add(entries[i], i == 0);
    } else if (i != 0) {
      bytes[i] += kPageBytes;
    }
  }
  for (const SharedPages::Row& row : shared.rows()) {
    if (row.shown_by < 2 || row.by_first) continue;
    for (size_t i = 1; i < entries.size(); ++i) {
      const bool is_sharer = is_private_memory(entries[i]) && (entries[i] & kExclusive) == 0;
      if (is_sharer && (entries[i] & kFrame) == row.frame) {
        bytes[i] += kPageBytes / static_cast<uint64_t>(row.shown_by);
      }
    }
  }
}

// Sums bytes by range. Pages are added in ascending order.
class Account {
 public:
  explicit Account(std::span<const AddressRange> ranges) : asked_(ranges), ranges_(ranges.size()) {
    for (size_t i = 0; i < ranges.size(); ++i) {
      const uint64_t after = i == 0 ? 0 : ranges[i - 1].end;
      if (ranges[i].begin >= after && ranges[i].begin <= ranges[i].end) continue;
      fail(Category::usage, "address ranges must be ascending and disjoint");
    }
  }

  void add(uint64_t address, const DistinctPages& pages) {
    while (next_ < asked_.size() && asked_[next_].end <= address) ++next_;
    const uint64_t end = address + kPageBytes;
    uint64_t left = kPageBytes;
    for (size_t i = next_; i < asked_.size() && asked_[i].begin < end; ++i) {
      const uint64_t n = std::min(asked_[i].end, end) - std::max(asked_[i].begin, address);
      put(ranges_[i], pages, n);
      left -= n;
    }
    put(rest_, pages, left);
  }

  std::vector<RangeMemory> ranges() { return std::move(ranges_); }
  RangeMemory rest() const { return rest_; }

 private:
  static void put(RangeMemory& to, const DistinctPages& pages, uint64_t bytes) {
    to.own_bytes += pages.own_pages * bytes;
    to.copied_bytes += pages.copied * bytes;
    to.shared_bytes += pages.shared * bytes;
  }

  std::span<const AddressRange> asked_;
  std::vector<RangeMemory> ranges_;
  RangeMemory rest_;
  size_t next_ = 0;
};

// Calls `page` with the address of each page of an area and the entries of all processes, 0 for
// processes that can't have inherited it.
void for_each_page(const Area& area, std::vector<Pages>& processes,
                   FunctionRef<void(uint64_t address, std::span<const uint64_t> entries)> page) {
  const uint64_t all = (area.at.end - area.at.begin) / kPageBytes;
  std::vector<std::vector<uint64_t>> entries(processes.size());
  std::vector<uint64_t> at_one(processes.size());
  for (uint64_t done = 0; done < all; done += kBlockPages) {
    const uint64_t begin = area.at.begin + done * kPageBytes;
    const uint64_t n = std::min(kBlockPages, all - done);
    for (size_t i = 0; i < processes.size(); ++i) {
      entries[i].assign(n, 0);
      if (i != 0 && !processes[i].may_show(area)) continue;
      try {
        processes[i].read(begin, entries[i]);
      } catch (const Error&) {
        if (i == 0) throw;  // a child that has ended meanwhile has no pages
      }
    }
    for (uint64_t at = 0; at < n; ++at) {
      for (size_t i = 0; i < processes.size(); ++i) at_one[i] = entries[i][at];
      page(begin + at * kPageBytes, at_one);
    }
  }
}

// exec gives a process a new auxiliary vector (it contains random addresses); fork keeps it.
bool is_fork_of(int pid, const std::string& auxv, const std::string& root) {
  return !auxv.empty() && read_kernel_text(directory_of(pid, root) + "/auxv") == auxv;
}

}  // namespace

std::vector<int> descendants(int pid, const std::string& root) {
  std::vector<std::pair<int, int>> parents;  // process, its parent
  for (const std::string& name : PosixFileSystem().list(root + "/proc")) {
    const auto number = parse_kernel_number(name);
    if (!number) continue;
    const int child = static_cast<int>(*number);
    parents.emplace_back(
        child, parent_of(read_kernel_text(directory_of(child, root) + "/stat").value_or("")));
  }
  std::vector<int> found = {pid == 0 ? static_cast<int>(::getpid()) : pid};
  for (size_t i = 0; i < found.size(); ++i) {
    for (const auto& [child, parent] : parents) {
      const bool is_new = std::find(found.begin(), found.end(), child) == found.end();
      if (parent == found[i] && is_new) found.push_back(child);
    }
  }
  found.erase(found.begin());
  std::sort(found.begin(), found.end());
  return found;
}

TreeMemory read_tree(int pid, std::span<const AddressRange> ranges, const std::string& root) {
  const int first = pid == 0 ? static_cast<int>(::getpid()) : pid;
  const std::string directory = directory_of(first, root);
  const std::string auxv = read_kernel_text(directory + "/auxv").value_or("");
  Account account(ranges);
  TreeMemory tree;
  tree.processes.push_back({first, false, read_process_memory(first, root)});
  std::vector<Pages> pages;
  std::vector<size_t> process_of = {0};  // by element of `pages`
  pages.emplace_back(first, root);
  for (const int child : descendants(first, root)) {
    try {
      const ProcessMemory memory = read_process_memory(child, root);
      // Without memory it is in its parent's, whose auxiliary vector it shows, too.
      const bool is_forked = memory.rss > 0 && is_fork_of(child, auxv, root);
      tree.processes.push_back({child, is_forked, memory});
      if (!is_forked) continue;
      pages.emplace_back(child, root);
      process_of.push_back(tree.processes.size() - 1);
    } catch (const Error&) {
      continue;  // the child has ended
    }
  }
  for (const Area& area : areas_of(first, root)) {
    for_each_page(area, pages, [&](uint64_t address, std::span<const uint64_t> entries) {
      DistinctPages found = distinct(entries);
      for (size_t i = 1; i < entries.size(); ++i) {
        if (!is_same_page(entries[0], entries[i])) continue;
        tree.processes[process_of[i]].shared_bytes += kPageBytes;
        found.shared = 1;
      }
      account.add(address, found);
    });
  }
  tree.ranges = account.ranges();
  tree.rest = account.rest();
  return tree;
}

namespace {

// A process of a tree and its parent, if it was forked.
struct ForkedProcess {
  int pid = 0;
  std::optional<size_t> from;  // index of its parent; none: the root, or it has run exec since
  std::vector<Area> areas;
};

// The processes of the tree, each after its parent.
std::vector<ForkedProcess> forks_of(int pid, const std::string& root) {
  std::vector<ForkedProcess> found;
  std::vector<std::string> auxvs;
  std::vector<int> pids = {pid == 0 ? static_cast<int>(::getpid()) : pid};
  const std::vector<int> below = descendants(pid, root);
  pids.insert(pids.end(), below.begin(), below.end());
  std::vector<int> parents;
  for (const int candidate : pids) {
    const std::string directory = directory_of(candidate, root);
    parents.push_back(parent_of(read_kernel_text(directory + "/stat").value_or("")));
    auxvs.push_back(read_kernel_text(directory + "/auxv").value_or(""));
  }
  std::vector<size_t> order = {0};
  for (size_t next = 0; next < order.size(); ++next) {
    const size_t parent = order[next];
    for (size_t i = 1; i < pids.size(); ++i) {
      if (parents[i] == pids[parent]) order.push_back(i);
    }
  }
  for (const size_t i : order) {
    ForkedProcess process{.pid = pids[i]};
    for (size_t k = 0; k < found.size(); ++k) {
      const auto at = std::find(pids.begin(), pids.end(), found[k].pid) - pids.begin();
      const bool is_parent = i != 0 && found[k].pid == parents[i];
      if (!is_parent || auxvs[i].empty() || auxvs[i] != auxvs[static_cast<size_t>(at)]) continue;
      if (!is_in_parents_memory(pids[i], root)) process.from = k;
    }
    found.push_back(std::move(process));
  }
  return found;
}

// The parts of `areas` outside of `others`; both ascend.
std::vector<Area> without(const std::vector<Area>& areas, const std::vector<Area>& others) {
  std::vector<Area> left;
  auto next = others.begin();
  for (Area area : areas) {
    while (next != others.end() && next->at.end <= area.at.begin) ++next;
    for (auto at = next; at != others.end() && at->at.begin < area.at.end; ++at) {
      const Area& other = *at;
      if (other.at.begin > area.at.begin) {
        left.push_back({{area.at.begin, other.at.begin}, area.is_inherited});
      }
      area.at.begin = std::min(other.at.end, area.at.end);
    }
    if (area.at.begin < area.at.end) left.push_back(area);
  }
  return left;
}

// A process and its forked descendants, each after its parent.
std::vector<size_t> family_of(const std::vector<ForkedProcess>& forks, size_t first) {
  std::vector<size_t> members = {first};
  for (size_t i = first + 1; i < forks.size(); ++i) {
    const auto from = forks[i].from;
    if (from && std::find(members.begin(), members.end(), *from) != members.end()) {
      members.push_back(i);
    }
  }
  return members;
}

// Adds to `bytes` the copies of pages of process `parent` that its forked descendants hold.
void add_copies_of(std::vector<ForkedProcess>& forks, size_t parent, std::vector<uint64_t>& bytes,
                   const std::string& root) {
  const std::vector<size_t> members = family_of(forks, parent);
  if (members.size() < 2) return;
  const std::vector<Area> areas = areas_of(forks[parent].pid, root);
  // Copies in an ancestor's areas are counted by the call for that ancestor.
  std::vector<Area> unshared = areas;
  forks[parent].areas = areas;
  for (auto from = forks[parent].from; from; from = forks[*from].from) {
    unshared = without(unshared, forks[*from].areas);
  }
  std::vector<Pages> pages;
  std::vector<size_t> readable;  // the members of `pages`
  for (const size_t member : members) {
    try {
      pages.emplace_back(forks[member].pid, root);
      readable.push_back(member);
    } catch (const Error&) {
      if (member == parent) throw;  // a child that has ended holds no copies
    }
  }
  std::vector<uint64_t> of_member(readable.size());
  for (const Area& area : unshared) {
    for_each_page(area, pages, [&](uint64_t, std::span<const uint64_t> entries) {
      add_copies(entries, of_member);
    });
  }
  for (size_t i = 1; i < readable.size(); ++i) bytes[readable[i]] += of_member[i];
}

}  // namespace

std::vector<ForkCopies> read_fork_copies(int pid, const std::string& root,
                                         const std::function<bool(int family)>& may_read) {
  std::vector<ForkedProcess> forks = forks_of(pid, root);
  std::vector<uint64_t> bytes(forks.size());
  std::vector<ForkCopies> copies;
  for (size_t first = 0; first < forks.size(); ++first) {
    if (forks[first].from) continue;
    const std::vector<size_t> family = family_of(forks, first);
    if (family.size() < 2 || (may_read && !may_read(forks[first].pid))) continue;
    for (const size_t parent : family) {
      try {
        add_copies_of(forks, parent, bytes, root);
      } catch (const Error&) {
        continue;  // the parent has ended meanwhile
      }
    }
    for (const size_t i : std::span(family).subspan(1)) {
      copies.push_back({forks[i].pid, forks[*forks[i].from].pid, bytes[i]});
    }
  }
  return copies;
}

}  // namespace modicum
