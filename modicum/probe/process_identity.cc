// Identifies a process by more than its pid, which is reused and unique only within a container.
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "modicum/io/io.h"
#include "modicum/probe/kernel_text.h"
#include "modicum/probe/probe.h"

namespace modicum {
namespace {

// What /proc/PID/stat says of a process.
struct ProcessStart {
  bool is_known = false;       // false if the file can't be read: no such process, or it is hidden
  std::optional<uint64_t> at;  // in clock ticks since the boot; empty if it has ended (a zombie)
};

// Field 22 of the file is the start time. Field 2, the name, is in parentheses, and may contain
// parentheses itself.
ProcessStart start_of(const std::string& root, const std::string& pid) {
  const auto text = read_kernel_text(fmt::format("{}/proc/{}/stat", root, pid));
  if (!text || text->rfind(')') == std::string::npos) return {};
  const auto fields = split_kernel_text(std::string_view(*text).substr(text->rfind(')') + 1), ' ');
  // `fields` begins with field 3, the first after the name.
  constexpr size_t kState = 3 - 3, kStart = 22 - 3;
  if (fields.size() <= kStart) return {};
  if (fields[kState] == "Z" || fields[kState] == "X") return {.is_known = true};
  return {true, parse_kernel_number(fields[kStart])};
}

std::string first_line(const std::string& path) {
  const auto text = read_kernel_text(path);
  if (!text) return {};
  const auto lines = split_kernel_text(*text, '\n');
  return lines.empty() ? std::string() : std::string(lines.front());
}

bool is_name_char(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.';
}

}  // namespace

ProcessIdentity identify_process(int64_t pid, const std::string& root) {
  ProcessIdentity found{.pid = pid};
  // The start time of process 1 distinguishes containers on one host.
  found.host = fmt::format("{}.{}.{}", first_line(root + "/proc/sys/kernel/hostname"),
                           first_line(root + "/proc/sys/kernel/random/boot_id"),
                           start_of(root, "1").at.value_or(0));
  std::replace_if(
      found.host.begin(), found.host.end(), [](char c) { return !is_name_char(c); }, '_');
  found.started = start_of(root, std::to_string(pid)).at.value_or(0);
  return found;
}

uint64_t pid_namespace(const std::string& root) {
  std::array<char, 64> text{};
  const std::string link = root + "/proc/self/ns/pid";  // as "pid:[4026531836]"
  const ssize_t length = ::readlink(link.c_str(), text.data(), text.size());
  if (length <= 0) return 0;
  const std::string_view name(text.data(), static_cast<size_t>(length));
  constexpr std::string_view kBefore = "pid:[";
  if (!name.starts_with(kBefore) || !name.ends_with(']')) return 0;
  return parse_kernel_number(name.substr(kBefore.size(), name.size() - kBefore.size() - 1))
      .value_or(0);
}

bool process_exists(int64_t pid) {
  return ::kill(static_cast<pid_t>(pid), 0) == 0 || errno != ESRCH;
}

bool is_dead(const ProcessIdentity& process, const std::string& root,
             const std::function<bool(int64_t pid)>& exists) {
  if (process.started == 0 || identify_process(process.pid, root).host != process.host) {
    return false;
  }
  const ProcessStart now = start_of(root, std::to_string(process.pid));
  if (!now.is_known) return !exists(process.pid);
  return now.at.value_or(0) != process.started;
}

}  // namespace modicum
