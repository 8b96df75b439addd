#include "modicum/probe/settings.h"

#include <fmt/format.h>

#include <algorithm>

#include "modicum/base/base.h"
#include "modicum/io/io.h"
#include "modicum/probe/kernel_text.h"

namespace modicum {
namespace {

// A line is "Max locked memory         8388608              unlimited            bytes".
std::optional<ResourceLimit> limit_in(std::string_view text, std::string_view label) {
  for (const std::string_view line : split_kernel_text(text, '\n')) {
    if (!line.starts_with(label)) continue;
    const auto words = split_kernel_text(line.substr(label.size()), ' ');
    if (words.size() < 2) return std::nullopt;
    const auto number = [](std::string_view word) -> std::optional<uint64_t> {
      return word == "unlimited" ? UINT64_MAX : parse_kernel_number(word);
    };
    const auto soft = number(words[0]);
    const auto hard = number(words[1]);
    if (!soft || !hard) return std::nullopt;
    return ResourceLimit{*soft, *hard};
  }
  return std::nullopt;
}

// "always [madvise] never" has the setting in brackets.
std::string chosen_in(const std::string& path) {
  const std::string text = read_kernel_text(path).value_or("");
  const size_t begin = text.find('[');
  const size_t end = text.find(']');
  if (begin == std::string::npos || end == std::string::npos || end < begin) return {};
  return text.substr(begin + 1, end - begin - 1);
}

std::optional<uint64_t> number_in(const std::string& path) {
  const auto text = read_kernel_text(path);
  return text ? parse_kernel_number(*text) : std::nullopt;
}

// The kernel respects the capability in the initial user namespace only, not in the namespace of a
// rootless container.
bool has_ipc_lock(std::string_view status, std::string_view uid_map) {
  constexpr std::string_view kLabel = "CapEff:";
  constexpr int kIpcLock = 14;
  const auto words = split_kernel_text(uid_map.substr(0, uid_map.find('\n')), ' ');
  // uid_map of the initial namespace; the file is absent on a kernel without user namespaces.
  const std::vector<std::string_view> initial = {"0", "0", "4294967295"};
  if (!words.empty() && words != initial) return false;
  for (const std::string_view line : split_kernel_text(status, '\n')) {
    if (!line.starts_with(kLabel)) continue;
    return (parse_kernel_number(line.substr(kLabel.size()), 16).value_or(0) >> kIpcLock & 1) != 0;
  }
  return false;
}

void read_meminfo(Settings& settings, const std::string& root) {
  const std::string text = read_kernel_text(root + "/proc/meminfo").value_or("");
  const auto bytes = [&](std::string_view label) -> std::optional<uint64_t> {
    const auto kib = kernel_number_after(text, label);
    return kib ? checked_mul(*kib, kKiB) : std::nullopt;
  };
  settings.swap_bytes = bytes("SwapTotal:");
  settings.swap_free_bytes = bytes("SwapFree:").value_or(0);
  settings.commit_limit_bytes = bytes("CommitLimit:").value_or(0);
  settings.committed_bytes = bytes("Committed_AS:").value_or(0);
}

}  // namespace

Settings read_settings(int pid, const std::string& root) {
  const std::string process =
      root + (pid == 0 ? std::string("/proc/self") : fmt::format("/proc/{}", pid));
  const std::string limits = read_kernel_text(process + "/limits").value_or("");
  const std::string huge_pages = root + "/sys/kernel/mm/transparent_hugepage";
  Settings settings{
      .locked_memory = limit_in(limits, "Max locked memory"),
      .open_files = limit_in(limits, "Max open files"),
      .address_space = limit_in(limits, "Max address space"),
      .may_lock_all = has_ipc_lock(read_kernel_text(process + "/status").value_or(""),
                                   read_kernel_text(process + "/uid_map").value_or("")),
      .huge_pages = chosen_in(huge_pages + "/enabled"),
      .shmem_huge_pages = chosen_in(huge_pages + "/shmem_enabled"),
      .overcommit = number_in(root + "/proc/sys/vm/overcommit_memory"),
      .max_map_count = number_in(root + "/proc/sys/vm/max_map_count"),
  };
  read_meminfo(settings, root);
  // A process in a container has another /dev/shm than the caller.
  auto shm = space_of(process + "/root/dev/shm");
  if (!shm) shm = space_of(root + "/dev/shm");
  if (shm) {
    settings.shm_bytes = shm->size_bytes;
    settings.shm_free_bytes = shm->free_bytes;
  }
  return settings;
}

}  // namespace modicum
