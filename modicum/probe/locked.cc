#include "modicum/io/io.h"
#include "modicum/probe/kernel_text.h"
#include "modicum/probe/probe.h"

namespace modicum {
namespace {

// The word that follows `label`; empty where the label isn't there.
std::string_view word_after(std::string_view text, std::string_view label) {
  const size_t at = text.find(label);
  if (at == std::string_view::npos) return {};
  const std::string_view rest = text.substr(at + label.size());
  const size_t begin = rest.find_first_not_of(" \t");
  if (begin == std::string_view::npos) return {};
  return rest.substr(begin, rest.find_first_of(" \t\n", begin) - begin);
}

// CAP_IPC_LOCK is bit 14 of the effective set: the fourth hexadecimal digit from the right.
bool is_above_limits(std::string_view status) {
  const std::string_view digits = word_after(status, "CapEff:");
  if (digits.size() < 4) return false;
  return std::string_view("4567cdef").find(digits[digits.size() - 4]) != std::string_view::npos;
}

}  // namespace

uint64_t lockable_bytes(const std::string& root) {
  const std::string status = read_kernel_text(root + "/proc/self/status").value_or("");
  if (is_above_limits(status)) return UINT64_MAX;
  const std::string limits = read_kernel_text(root + "/proc/self/limits").value_or("");
  const auto limit = parse_kernel_number(word_after(limits, "Max locked memory"));
  if (!limit) return UINT64_MAX;  // "unlimited", or a kernel that doesn't say
  const uint64_t locked = parse_kernel_number(word_after(status, "VmLck:")).value_or(0) * kKiB;
  return *limit > locked ? *limit - locked : 0;
}

}  // namespace modicum
