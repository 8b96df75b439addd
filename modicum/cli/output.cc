#include "modicum/cli/output.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "modicum/ranks/ranks.h"
#include "modicum/report/report.h"

namespace modicum {
namespace {

constexpr int kForever = -1;

// Returns whether all of `text` was written. Otherwise errno is set: ETIMEDOUT if a full pipe
// stayed full for `wait_ms`. Async-signal-safe.
bool write_all(int fd, const char* text, size_t size, int wait_ms) noexcept {
  while (size > 0) {
    pollfd writable{fd, POLLOUT, 0};
    const int ready = poll(&writable, 1, wait_ms);
    if (ready == 0) errno = ETIMEDOUT;
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) return false;
    // A pipe for which poll returns POLLOUT takes PIPE_BUF bytes without blocking.
    const ssize_t written = write(fd, text, std::min<size_t>(size, PIPE_BUF));
    if (written < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (written <= 0) return false;
    text += written;
    size -= static_cast<size_t>(written);
  }
  return true;
}

// The output of the signal handler, formatted in advance: a handler must not allocate.
struct LastWords {
  std::array<char, 512> line{};
  std::array<char, 512> document{};
  int code = 0;
};
LastWords on_int, on_term;
std::atomic<bool> has_begun_stdout{false};

template <size_t N>
void copy_text(const std::string& text, std::array<char, N>& out) noexcept {
  std::memcpy(out.data(), text.data(), std::min(text.size(), N - 1));
}

LastWords last_words(int signal, bool json) {
  const Error error = stop_error(signal);
  LastWords words{.code = exit_code(error.category())};
  copy_text(fmt::format("modicum: {}\n", error.what()), words.line);
  if (json) copy_text(error_json(error) + "\n", words.document);
  return words;
}

// The signals whose actions this file changes, and their previous actions.
constexpr std::array<int, 4> kChanged = {SIGPIPE, SIGXFSZ, SIGINT, SIGTERM};
std::array<struct sigaction, kChanged.size()> before{};

extern "C" void exit_immediately(int signal) {
  const LastWords& words = signal == SIGINT ? on_int : on_term;
  if (!has_begun_stdout.load()) {  // else the result may be partly written
    write_all(STDOUT_FILENO, words.document.data(), std::strlen(words.document.data()), 0);
  }
  write_all(STDERR_FILENO, words.line.data(), std::strlen(words.line.data()), 0);
  _exit(words.code);
}

}  // namespace

void guard_standard_descriptors() noexcept {
  for (size_t i = 0; i < kChanged.size(); ++i) sigaction(kChanged[i], nullptr, &before[i]);
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    // open() returns the lowest free descriptor, which is `fd`: the lower ones are open.
    if (fcntl(fd, F_GETFD) < 0 && errno == EBADF) static_cast<void>(open("/", O_PATH));
  }
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);
}

void restore_signal_actions() noexcept {
  for (size_t i = 0; i < kChanged.size(); ++i) sigaction(kChanged[i], &before[i], nullptr);
}

void exit_on_stop_signals(bool json) {
  on_int = last_words(SIGINT, json);
  on_term = last_words(SIGTERM, json);
  for (const int stop : {SIGINT, SIGTERM}) {
    if (signal(stop, exit_immediately) == SIG_IGN) signal(stop, SIG_IGN);
  }
}

void print(std::string_view text) {
  has_begun_stdout = true;
  if (!write_all(STDOUT_FILENO, text.data(), text.size(), kForever)) {
    fail(Category::io, fmt::format("cannot write to standard output: {}",
                                   std::generic_category().message(errno)));
  }
  signal(SIGINT, SIG_IGN);
  signal(SIGTERM, SIG_IGN);
}

void print_error(std::string_view text, int wait_ms) noexcept {
  static_cast<void>(write_all(STDERR_FILENO, text.data(), text.size(), wait_ms));
}

}  // namespace modicum
