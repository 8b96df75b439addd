// Cheap readings of one process: its status, its rank, its children.
#include <fmt/format.h>
#include <linux/kcmp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <utility>

#include "modicum/io/io.h"
#include "modicum/probe/kernel_text.h"
#include "modicum/probe/probe.h"

namespace modicum {
namespace {

std::string file_of(int pid, std::string_view file, const std::string& root) {
  return fmt::format("{}/proc/{}/{}", root, pid, file);
}

std::string_view word_after(std::string_view text, std::string_view label) {
  const size_t at = text.starts_with(label) ? 0 : text.find(fmt::format("\n{}", label));
  if (at == text.npos) return {};
  std::string_view rest = text.substr(at + label.size() + (at == 0 ? 0 : 1));
  rest = rest.substr(0, rest.find('\n'));
  const size_t begin = rest.find_first_not_of('\t');
  return begin == rest.npos ? std::string_view() : rest.substr(begin);
}

uint64_t bytes_in(std::string_view text, std::string_view label) {
  const uint64_t kib = kernel_number_after(text, label).value_or(0);
  return checked_mul(kib, kKiB).value_or(0);
}

// Field `number` of /proc/PID/stat; the first field is 1. Only for fields after the name (field 2),
// which may contain any character.
std::optional<uint64_t> stat_number(const std::optional<std::string>& text, size_t number) {
  if (!text || text->rfind(')') == text->npos) return std::nullopt;
  const auto fields = split_kernel_text(std::string_view(*text).substr(text->rfind(')') + 1), ' ');
  constexpr size_t kFirst = 3;  // the first field after the name
  if (fields.size() <= number - kFirst) return std::nullopt;
  return parse_kernel_number(fields[number - kFirst]);
}

// The value of a variable in a list "NAME=value\0NAME=value\0", if it is a number.
std::optional<int> number_of(std::string_view variables, std::string_view name) {
  for (const std::string_view variable : split_kernel_text(variables, '\0')) {
    if (!variable.starts_with(name) || variable.size() <= name.size() ||
        variable[name.size()] != '=')
      continue;
    const auto number = parse_kernel_number(variable.substr(name.size() + 1));
    return number && *number <= INT32_MAX ? std::optional(static_cast<int>(*number)) : std::nullopt;
  }
  return std::nullopt;
}

std::vector<std::string> threads_of(int pid, const std::string& root) {
  try {
    return PosixFileSystem().list(file_of(pid, "task", root));
  } catch (const Error&) {
    return {};  // the process has ended
  }
}

bool is_alive(std::string_view status) {
  const std::string_view state = word_after(status, "State:");
  return !state.starts_with('Z') && !state.starts_with('X');
}

// `status` of process `pid`, or that of one of its living threads if its main thread has ended,
// which shows no memory.
std::string living_status(int pid, std::string status, const std::string& root) {
  if (is_alive(status)) return status;
  for (const std::string& thread : threads_of(pid, root)) {
    auto other = read_kernel_text(file_of(pid, "task/" + thread + "/status", root));
    if (other && is_alive(*other)) return std::move(*other);
  }
  return status;
}

bool has_equal_memory(const ProcessStatus& status, const ProcessStatus& other) noexcept {
  return status.rss_anon == other.rss_anon && status.rss_shmem == other.rss_shmem &&
         status.rss_file == other.rss_file && status.peak_rss == other.peak_rss &&
         status.page_tables == other.page_tables && status.locked == other.locked;
}

}  // namespace

std::optional<ProcessStatus> read_status(int pid, const std::string& root) {
  const auto first = read_kernel_text(file_of(pid, "status", root));
  if (!first) return std::nullopt;
  const std::string text = living_status(pid, *first, root);
  return ProcessStatus{.parent = static_cast<int>(kernel_number_after(text, "PPid:").value_or(0)),
                       .name = std::string(word_after(*first, "Name:")),
                       .is_alive = is_alive(text),
                       .rss_anon = bytes_in(text, "RssAnon:"),
                       .rss_shmem = bytes_in(text, "RssShmem:"),
                       .rss_file = bytes_in(text, "RssFile:"),
                       .peak_rss = bytes_in(text, "VmHWM:"),
                       .page_tables = bytes_in(text, "VmPTE:"),
                       .locked = bytes_in(text, "VmLck:")};
}

bool is_descendant(int pid, int ancestor, const std::string& root) {
  for (int at = pid; at > 1;) {
    const auto status = read_status(at, root);
    // Its parent has ended, so it gets another one. One that is hidden lives, and is another
    // user's.
    if (!status || !status->is_alive) return at != pid && !process_exists(at);
    if (status->parent == ancestor) return true;
    at = status->parent;
  }
  return false;
}

bool is_in_parents_memory(int pid, const std::string& root) {
  constexpr int kAttempts = 3;  // another thread of the parent may allocate between two readings
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const auto status = read_status(pid, root);
    if (!status || !status->is_alive || status->parent == 0) return false;
    if (root.empty()) {
      const long order = syscall(SYS_kcmp, pid, status->parent, KCMP_VM, 0, 0);
      if (order >= 0) return order == 0;
    }
    const auto of_parent = read_status(status->parent, root);
    if (!of_parent) return false;
    if (has_equal_memory(*status, *of_parent)) return true;
  }
  return false;
}

std::optional<MappingSums> read_mapping_sums(int pid, const std::string& root) {
  const auto text = read_kernel_text(file_of(pid, "smaps_rollup", root));
  if (!text || !kernel_number_after(*text, "Pss_Anon:")) return std::nullopt;
  return MappingSums{
      .pss_anon = bytes_in(*text, "Pss_Anon:"),
      .pss_shmem = bytes_in(*text, "Pss_Shmem:"),
      .huge_pages = bytes_in(*text, "AnonHugePages:") + bytes_in(*text, "ShmemPmdMapped:")};
}

std::optional<uint64_t> read_pss(int pid, const std::string& root) {
  const auto sums = read_mapping_sums(pid, root);
  return sums ? std::optional(sums->pss_anon + sums->pss_shmem) : std::nullopt;
}

uint64_t read_minor_faults(int pid, const std::string& root) {
  constexpr size_t kMinorFaults = 10;  // proc(5): minflt
  return stat_number(read_kernel_text(file_of(pid, "stat", root)), kMinorFaults).value_or(0);
}

std::optional<int> read_wait_status(int pid, const std::string& root) {
  const auto text = read_kernel_text(file_of(pid, "stat", root));
  constexpr size_t kExitCode = 52;  // proc(5): exit_code
  if (!text || text->rfind(") Z ") == text->npos) return std::nullopt;
  if (text->rfind(") Z ") != text->rfind(')')) return std::nullopt;  // a part of the name
  const auto status = stat_number(text, kExitCode);
  return status ? std::optional(static_cast<int>(*status)) : std::nullopt;
}

std::optional<GivenRank> rank_of(int pid, const std::string& root) {
  const auto variables = read_kernel_text(file_of(pid, "environ", root));
  if (!variables || variables->empty()) return std::nullopt;
  for (const char* const name : {"RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "LOCAL_RANK"}) {
    if (const auto rank = number_of(*variables, name)) return GivenRank{*rank, name};
  }
  return GivenRank{};
}

std::vector<int> children_of(int pid, const std::string& root) {
  std::vector<int> children;
  for (const std::string& thread : threads_of(pid, root)) {
    const std::string text =
        read_kernel_text(file_of(pid, "task/" + thread + "/children", root)).value_or("");
    for (const std::string_view word : split_kernel_text(text, ' ')) {
      if (const auto child = parse_kernel_number(word)) {
        children.push_back(static_cast<int>(*child));
      }
    }
  }
  std::sort(children.begin(), children.end());
  return children;
}

uint64_t last_pid(const std::string& root) {
  const auto text = read_kernel_text(root + "/proc/loadavg");
  if (!text) return 0;
  const auto words = split_kernel_text(*text, ' ');
  return words.empty() ? 0 : parse_kernel_number(words.back()).value_or(0);
}

}  // namespace modicum
