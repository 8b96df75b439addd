#include "modicum/probe/kernel_text.h"

#include <algorithm>
#include <charconv>

namespace modicum {
namespace {

constexpr std::string_view kWhiteSpace = " \t\n";

std::string_view trimmed(std::string_view text) noexcept {
  const size_t begin = text.find_first_not_of(kWhiteSpace);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kWhiteSpace) + 1 - begin);
}

}  // namespace

std::vector<std::string_view> split_kernel_text(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const size_t end = std::min(text.find(separator), text.size());
    if (end != 0) parts.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

std::optional<uint64_t> parse_kernel_number(std::string_view text, int base) noexcept {
  const std::string_view digits = trimmed(text);
  const char* const end = digits.data() + digits.size();
  uint64_t value = 0;
  const auto [at, error] = std::from_chars(digits.data(), end, value, base);
  if (digits.empty() || error != std::errc() || at != end) return std::nullopt;
  return value;
}

std::optional<uint64_t> kernel_number_after(std::string_view text,
                                            std::string_view label) noexcept {
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (!line.starts_with(label)) continue;
    line.remove_prefix(label.size());
    if (line.empty() || kWhiteSpace.find(line[0]) == std::string_view::npos) continue;
    if (line.ends_with(" kB")) line.remove_suffix(3);
    return parse_kernel_number(line);
  }
  return std::nullopt;
}

}  // namespace modicum
