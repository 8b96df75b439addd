#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "modicum/io/io.h"
#include "modicum/probe/kernel_text.h"
#include "modicum/probe/probe.h"

namespace modicum {
namespace {

// A mounted cgroup hierarchy.
struct Mount {
  int version = 1;
  std::string root;   // the cgroup that is visible at the mount point
  std::string point;  // the mount point
};

using Level = MemoryCgroup;  // a level of the chain of either controller, "memory" or "cpu"

bool has_word(std::string_view list, std::string_view word) {
  const std::vector<std::string_view> words = split_kernel_text(list, ',');
  return std::find(words.begin(), words.end(), word) != words.end();
}

// mountinfo writes spaces, tabs, newlines and backslashes as three octal digits: \040.
std::string unescaped(std::string_view text) {
  const auto is_octal = [](char c) { return c >= '0' && c <= '7'; };
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 3 < text.size() && is_octal(text[i + 1]) && is_octal(text[i + 2]) &&
        is_octal(text[i + 3])) {
      out +=
          static_cast<char>((text[i + 1] - '0') * 64 + (text[i + 2] - '0') * 8 + text[i + 3] - '0');
      i += 3;
    } else {
      out += text[i];
    }
  }
  return out;
}

// A line is "ID PARENT DEVICE ROOT POINT OPTIONS [TAGS...] - TYPE SOURCE SUPER_OPTIONS".
std::optional<Mount> parse_mount(std::string_view line, std::string_view controller) {
  const std::vector<std::string_view> words = split_kernel_text(line, ' ');
  const auto dash = std::find(words.begin(), words.end(), "-");
  if (dash - words.begin() < 6 || words.end() - dash < 4) return std::nullopt;
  Mount mount{.root = unescaped(words[3]), .point = unescaped(words[4])};
  if (dash[1] == "cgroup2") {
    mount.version = 2;
    return mount;
  }
  if (dash[1] == "cgroup" && has_word(dash[3], controller)) return mount;
  return std::nullopt;
}

// The process's own cgroup: "4:memory:/a/b" in v1, "0::/a/b" in v2.
std::optional<std::string> own_path(std::string_view cgroup_text, int version,
                                    std::string_view controller) {
  for (const std::string_view line : split_kernel_text(cgroup_text, '\n')) {
    const size_t first = line.find(':');
    const size_t second = first == line.npos ? first : line.find(':', first + 1);
    if (second == line.npos) continue;
    const std::string_view controllers = line.substr(first + 1, second - first - 1);
    const bool is_it = version == 2 ? line.substr(0, first) == "0" && controllers.empty()
                                    : has_word(controllers, controller);
    if (is_it) return std::string(line.substr(second + 1));
  }
  return std::nullopt;
}

// The components of `path` below `root`; nullopt if `path` is not below it. In a cgroup namespace
// the kernel writes both relative to the namespace's root, so they can be compared even if they
// begin with "..". A later ".." leads out of the mount.
std::optional<std::vector<std::string_view>> below(std::string_view path, std::string_view root) {
  std::vector<std::string_view> parts = split_kernel_text(path, '/');
  const std::vector<std::string_view> prefix = split_kernel_text(root, '/');
  if (parts.size() < prefix.size()) return std::nullopt;
  const auto rest = parts.begin() + static_cast<std::ptrdiff_t>(prefix.size());
  if (!std::equal(prefix.begin(), prefix.end(), parts.begin())) return std::nullopt;
  if (std::find(rest, parts.end(), "..") != parts.end()) return std::nullopt;
  parts.erase(parts.begin(), rest);
  return parts;
}

// The cgroups from the mount point down along `parts`, the innermost first.
std::vector<Level> levels_of(const Mount& mount, const std::vector<std::string_view>& parts,
                             const std::string& test_root) {
  Level level{.version = mount.version,
              .name = mount.root == "/" ? "" : mount.root,
              .directory = test_root + (mount.point == "/" ? "" : mount.point)};
  std::vector<Level> levels = {level};
  for (const std::string_view part : parts) {
    level.name += fmt::format("/{}", part);
    level.directory += fmt::format("/{}", part);
    levels.push_back(level);
  }
  if (levels.front().name.empty()) levels.front().name.push_back('/');
  std::reverse(levels.begin(), levels.end());
  return levels;
}

// The levels of the process's cgroup chain. If its hierarchy is mounted several times, takes the
// mount that shows the most levels. If no mount shows the process's cgroup (a container with a
// foreign namespace), returns only the cgroup at a mount point.
std::vector<Level> levels_below(int version, const std::string& path, std::string_view controller,
                                std::string_view mount_text, const std::string& test_root) {
  std::vector<Level> most;
  std::vector<Level> last_resort;
  for (const std::string_view line : split_kernel_text(mount_text, '\n')) {
    const std::optional<Mount> mount = parse_mount(line, controller);
    if (!mount || mount->version != version) continue;
    const auto parts = below(path, mount->root);
    std::vector<Level> seen =
        levels_of(*mount, parts.value_or(std::vector<std::string_view>()), test_root);
    if (!parts) {
      last_resort = std::move(seen);
    } else if (seen.size() > most.size()) {
      most = std::move(seen);
    }
  }
  return most.empty() ? last_resort : most;
}

std::vector<Level> levels_with(std::string_view controller, int pid, const std::string& root) {
  const std::string process = pid == 0 ? "self" : fmt::format("{}", pid);
  const std::string cgroup_text =
      read_kernel_text(fmt::format("{}/proc/{}/cgroup", root, process)).value_or("");
  // The caller's mounts, also for a process in a container: the kernel writes /proc/PID/cgroup as
  // the caller sees it.
  const std::string mount_text = read_kernel_text(root + "/proc/self/mountinfo").value_or("");
  std::vector<Level> levels;
  for (const int version : {1, 2}) {
    const std::optional<std::string> path = own_path(cgroup_text, version, controller);
    if (!path) continue;
    const std::vector<Level> found = levels_below(version, *path, controller, mount_text, root);
    levels.insert(levels.end(), found.begin(), found.end());
  }
  return levels;
}

std::optional<uint64_t> number_in(const Level& level, std::string_view file) {
  const auto text = read_kernel_text(fmt::format("{}/{}", level.directory, file));
  return text ? parse_kernel_number(*text) : std::nullopt;
}

std::optional<uint64_t> limit_of(const Level& level) {
  if (level.version == 1) {
    // "No limit" is the largest multiple of the page size below 2^63.
    constexpr uint64_t kNoLimit = uint64_t{1} << 62;
    const std::optional<uint64_t> limit = number_in(level, "memory.limit_in_bytes");
    return limit && *limit < kNoLimit ? limit : std::nullopt;
  }
  // Above memory.high the kernel throttles the processes to a standstill, so it is a limit too.
  const std::optional<uint64_t> max = number_in(level, "memory.max");
  const std::optional<uint64_t> high = number_in(level, "memory.high");
  return max && high ? std::min(*max, *high) : max ? max : high;
}

std::optional<MemoryLimit> memory_limit_of(const Level& level) {
  const std::optional<uint64_t> limit = limit_of(level);
  if (!limit) return std::nullopt;
  const uint64_t usage = charged_to(level);
  MemoryLimit found{.source = fmt::format("cgroup v{} {}", level.version, level.name),
                    .limit_bytes = *limit};
  const MemoryCharges charges = memory_charges(level).value_or(MemoryCharges());
  found.page_cache_bytes = charges.page_cache_bytes;
  found.shmem_bytes = charges.shmem_bytes;
  const uint64_t firm = usage - std::min(usage, found.page_cache_bytes);
  found.available_bytes = *limit - std::min(*limit, firm);
  return found;
}

std::optional<MemoryLimit> node_limit(const std::string& root) {
  const auto text = read_kernel_text(root + "/proc/meminfo");
  if (!text) return std::nullopt;
  const std::optional<uint64_t> total_kib = kernel_number_after(*text, "MemTotal:");
  const std::optional<uint64_t> available_kib = kernel_number_after(*text, "MemAvailable:");
  if (!total_kib || !available_kib) return std::nullopt;
  const auto bytes = [&](std::string_view label) {
    return kernel_number_after(*text, label).value_or(0) * kKiB;
  };
  return MemoryLimit{
      .source = "MemAvailable",
      .limit_bytes = *total_kib * kKiB,
      .available_bytes = *available_kib * kKiB,
      .page_cache_bytes = bytes("Active(file):") + bytes("Inactive(file):"),
      .shmem_bytes = bytes("Shmem:"),
  };
}

// The CPU quota in CPUs, rounded up; nullopt without a quota. v2 has "QUOTA PERIOD" or "max PERIOD"
// in one file; v1 has one file for each, in which a quota of -1 means none.
std::optional<int> cpu_quota_of(const Level& level) {
  std::optional<uint64_t> quota, period;
  if (level.version == 1) {
    quota = number_in(level, "cpu.cfs_quota_us");
    period = number_in(level, "cpu.cfs_period_us");
  } else if (const auto text = read_kernel_text(level.directory + "/cpu.max")) {
    const std::vector<std::string_view> words = split_kernel_text(*text, ' ');
    if (words.size() != 2) return std::nullopt;
    quota = parse_kernel_number(words[0]);
    period = parse_kernel_number(words[1]);
  }
  if (!quota || period.value_or(0) == 0) return std::nullopt;
  const uint64_t cpus = *quota / *period + (*quota % *period != 0 ? 1 : 0);
  return static_cast<int>(std::clamp<uint64_t>(cpus, 1, INT32_MAX));
}

}  // namespace

int granted_cpus(const std::string& root) {
  int cpus = usable_cpus();
  for (const Level& level : levels_with("cpu", 0, root)) {
    cpus = std::min(cpus, cpu_quota_of(level).value_or(cpus));
  }
  return cpus;
}

std::vector<MemoryLimit> memory_limits(const std::string& root, int pid) {
  std::vector<MemoryLimit> limits;
  for (const Level& level : levels_with("memory", pid, root)) {
    if (auto limit = memory_limit_of(level)) limits.push_back(std::move(*limit));
  }
  if (auto limit = node_limit(root)) limits.push_back(std::move(*limit));
  std::stable_sort(limits.begin(), limits.end(), [](const MemoryLimit& a, const MemoryLimit& b) {
    return a.available_bytes < b.available_bytes;
  });
  return limits;
}

uint64_t charged_to(const MemoryCgroup& group) {
  const char* const file = group.version == 1 ? "memory.usage_in_bytes" : "memory.current";
  return number_in(group, file).value_or(0);
}

uint64_t peak_charged_to(const MemoryCgroup& group) {
  const char* const file = group.version == 1 ? "memory.max_usage_in_bytes" : "memory.peak";
  return number_in(group, file).value_or(0);
}

namespace {

// "some avg10=0.00 avg60=0.00 avg300=0.00 total=1234\nfull avg10=... total=567\n"
std::optional<MemoryPressure> pressure_in(const std::string& file, std::string source) {
  const auto text = read_kernel_text(file);
  if (!text || !text->starts_with("some ")) return std::nullopt;
  MemoryPressure found{.source = std::move(source)};
  for (const std::string_view line : split_kernel_text(*text, '\n')) {
    constexpr std::string_view kTotal = " total=";
    const size_t at = line.find(kTotal);
    if (at == line.npos) continue;
    const uint64_t total = parse_kernel_number(line.substr(at + kTotal.size())).value_or(0);
    if (line.starts_with("some ")) found.some_us = total;
    if (line.starts_with("full ")) found.full_us = total;
  }
  return found;
}

}  // namespace

std::optional<MemoryPressure> memory_pressure(std::span<const MemoryCgroup> groups,
                                              const std::string& root) {
  for (const MemoryCgroup& group : groups) {
    const std::string name = fmt::format("cgroup v{} {}", group.version, group.name);
    if (auto found = pressure_in(group.directory + "/memory.pressure", name)) return found;
  }
  return pressure_in(root + "/proc/pressure/memory", "node");
}

CgroupPeak::CgroupPeak(std::string root) : root_(std::move(root)), before_(now()) {}

std::optional<uint64_t> CgroupPeak::bytes() const {
  const uint64_t peak = now();
  return peak > before_ ? std::optional(peak) : std::nullopt;
}

uint64_t CgroupPeak::now() const {
  const std::vector<MemoryCgroup> chain = memory_cgroups(root_);
  return chain.empty() ? 0 : peak_charged_to(chain.front());
}

// In v1 the figures without the prefix "total_" exclude child cgroups. The kernel reclaims page
// cache before it refuses memory or kills.
std::optional<MemoryCharges> memory_charges(const MemoryCgroup& group) {
  const auto stat = read_kernel_text(group.directory + "/memory.stat");
  if (!stat) return std::nullopt;
  const bool is_v1 = group.version == 1;
  const auto count = [&](std::string_view name) {
    const std::string label = fmt::format("{}{}", is_v1 ? "total_" : "", name);
    return kernel_number_after(*stat, label).value_or(0);
  };
  return MemoryCharges{.anon_bytes = count(is_v1 ? "rss" : "anon"),
                       .shmem_bytes = count("shmem"),
                       .page_cache_bytes = count("inactive_file") + count("active_file")};
}

namespace {

std::string kill_counter_of(const MemoryCgroup& group) {
  const char* const file = group.version == 1 ? "memory.oom_control" : "memory.events";
  return fmt::format("{}/{}", group.directory, file);
}

}  // namespace

uint64_t oom_kills_in(const MemoryCgroup& group) {
  const auto text = read_kernel_text(kill_counter_of(group));
  return text ? kernel_number_after(*text, "oom_kill").value_or(0) : 0;
}

std::vector<MemoryCgroup> memory_cgroups(const std::string& root) {
  std::vector<MemoryCgroup> levels = levels_with("memory", 0, root);
  if (levels.empty()) return levels;
  std::erase_if(levels, [version = levels.front().version](const MemoryCgroup& level) {
    return level.version != version;
  });
  return levels;
}

std::optional<MemoryCgroup> counting_group(std::span<const MemoryCgroup> chain) {
  for (const MemoryCgroup& group : chain) {
    if (read_kernel_text(kill_counter_of(group))) return group;
  }
  return std::nullopt;
}

uint64_t oom_kills_in_group(const std::string& root) {
  const auto group = counting_group(memory_cgroups(root));
  return group ? oom_kills_in(*group) : 0;
}

uint64_t oom_kill_count(const std::string& root, int pid) {
  uint64_t sum = 0;
  for (const Level& level : levels_with("memory", pid, root)) sum += oom_kills_in(level);
  return sum;
}

}  // namespace modicum
