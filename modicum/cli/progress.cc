#include <fmt/format.h>

#include "modicum/cli/verbs.h"

namespace modicum {
namespace {

constexpr int64_t kPlainEveryNs = 5 * kNsPerSecond;
constexpr int64_t kRewrittenEveryNs = 200 * kNsPerMs;

}  // namespace

Progress::Progress(const CommonFlags& flags, uint64_t total_bytes, const Surroundings& at)
    : at_(at), total_bytes_(total_bytes), begin_ns_(clock_.now_ns()) {
  if (flags.progress == "plain") mode_ = Mode::plain;
  if (flags.progress == "auto" && !flags.quiet && at.is_terminal) {
    mode_ = Mode::rewritten;
  }
}

Progress::~Progress() {
  if (mode_ == Mode::rewritten && shown_) at_.print_error("\r\x1b[K");
}

void Progress::show(uint64_t bytes) {
  const int64_t now = clock_.now_ns();
  if (mode_ == Mode::none || now < next_ns_) return;
  next_ns_ = now + (mode_ == Mode::plain ? kPlainEveryNs : kRewrittenEveryNs);
  const double elapsed_s = static_cast<double>(now - begin_ns_) / kNsPerSecond;
  const double rate = elapsed_s > 0 ? static_cast<double>(bytes) / elapsed_s : 0;
  std::string text = fmt::format("{} of {}", format_size(bytes), format_size(total_bytes_));
  if (bytes >= total_bytes_) {
    text += ", finishing";  // checks, digests and dumps follow, and are not counted
  } else if (rate > 0) {
    text += fmt::format(", {}/s, {:.0f} s left", format_size(static_cast<uint64_t>(rate)),
                        static_cast<double>(total_bytes_ - bytes) / rate);
  }
  const bool is_line = mode_ == Mode::plain;
  at_.print_error(fmt::format("{}{}{}", is_line ? "" : "\r\x1b[K", text, is_line ? "\n" : ""), 0);
  shown_ = true;
}

}  // namespace modicum
