#include <fmt/format.h>

#include <utility>

#include "modicum/io/io.h"
#include "modicum/probe/kernel_text.h"
#include "modicum/probe/probe.h"

namespace modicum {
namespace {

std::optional<uint64_t> bytes_after(const std::string& text, std::string_view label) {
  const std::optional<uint64_t> kib = kernel_number_after(text, label);
  return kib ? checked_mul(*kib, kKiB) : std::nullopt;
}

}  // namespace

ProcessMemory read_process_memory(int pid, const std::string& root) {
  // Determined first: a child that has left its parent's memory never returns to it.
  if (pid != 0 && is_in_parents_memory(pid, root)) return {};
  const std::string directory =
      root + (pid == 0 ? std::string("/proc/self") : fmt::format("/proc/{}", pid));
  Facts facts{.file = "status"};
  if (pid != 0) facts.culprit_pid = pid;

  const std::optional<std::string> status = read_kernel_text(directory + "/status");
  if (!status) fail(Category::io, "cannot read the status of the process", std::move(facts));
  const auto bytes = [&](std::string_view label) { return bytes_after(*status, label); };
  // The status of a zombie lacks these lines.
  if (!bytes("VmRSS:")) fail(Category::io, "the process has ended", std::move(facts));

  ProcessMemory memory{.rss_anon = bytes("RssAnon:").value_or(0),
                       .rss_shmem = bytes("RssShmem:").value_or(0),
                       .rss = *bytes("VmRSS:"),
                       .peak_rss = bytes("VmHWM:").value_or(0),
                       .page_tables = bytes("VmPTE:").value_or(0)};
  // smaps_rollup exists since Linux 4.14 and has these two lines since 5.4; another user's can't be
  // read. Without them shared pages count in full, which may be too much, but not too little.
  const std::string rollup = read_kernel_text(directory + "/smaps_rollup").value_or("");
  memory.pss_anon = bytes_after(rollup, "Pss_Anon:").value_or(memory.rss_anon);
  memory.pss_shmem = bytes_after(rollup, "Pss_Shmem:").value_or(memory.rss_shmem);
  return memory;
}

bool reset_peak_rss() { return write_kernel_text("/proc/self/clear_refs", "5"); }

}  // namespace modicum
