#include "modicum/watch/oom_log.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <utility>

#include "modicum/base/base.h"
#include "modicum/probe/probe.h"

namespace modicum {
namespace {

// The number that follows `label`.
std::optional<uint64_t> number_after(std::string_view text, std::string_view label) {
  const size_t at = text.find(label);
  if (at == std::string_view::npos) return std::nullopt;
  const char* const begin = text.data() + at + label.size();
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(begin, text.data() + text.size(), number);
  return error == std::errc() ? std::optional(number) : std::nullopt;
}

}  // namespace

std::optional<OomKill> oom_kill_in(std::string_view message) {
  constexpr std::string_view kLabel = "Killed process ";
  const auto pid = number_after(message, kLabel);
  const auto anon = number_after(message, " anon-rss:");
  if (!pid || !anon) return std::nullopt;
  // The name may contain parentheses: it ends at the last ") total-vm:".
  const size_t begin = message.find('(', message.find(kLabel));
  const size_t end = message.rfind(") total-vm:");
  if (end == std::string_view::npos || begin >= end) return std::nullopt;
  const uint64_t shmem = number_after(message, " shmem-rss:").value_or(0);
  return OomKill{.pid = static_cast<int>(*pid),
                 .name = std::string(message.substr(begin + 1, end - begin - 1)),
                 .held_bytes = (*anon + shmem) * kKiB};
}

std::optional<std::string> oom_group_in(std::string_view message) {
  constexpr std::string_view kLabel = ",oom_memcg=";
  const size_t at = message.find(kLabel);
  if (at == std::string_view::npos || message.find("oom-kill:") > at) return std::nullopt;
  const size_t begin = at + kLabel.size();
  return std::string(message.substr(begin, message.find(",task_memcg=", begin) - begin));
}

OomLog::OomLog(const std::string& root) {
  if (pid_namespace(root) != kInitialPidNamespace) return;
  fd_ = open((root + "/dev/kmsg").c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (fd_ >= 0) lseek(fd_, 0, SEEK_END);
}

OomLog::~OomLog() {
  if (fd_ >= 0) close(fd_);
}

std::vector<OomKill> OomLog::next() {
  std::vector<OomKill> kills;
  std::array<char, 8192> message;  // one read returns one message, which is not longer
  while (fd_ >= 0) {
    const ssize_t got = read(fd_, message.data(), message.size());
    if (got < 0 && (errno == EINTR || errno == EPIPE)) continue;  // EPIPE: messages were lost
    if (got <= 0) break;
    const std::string_view text(message.data(), static_cast<size_t>(got));
    if (auto group = oom_group_in(text)) group_ = *std::move(group);
    auto kill = oom_kill_in(text);
    if (!kill) continue;
    kill->group = std::exchange(group_, "");
    kills.push_back(*std::move(kill));
  }
  return kills;
}

}  // namespace modicum
