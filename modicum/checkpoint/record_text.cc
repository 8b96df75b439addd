#include "modicum/checkpoint/record_text.h"

#include <fmt/format.h>

#include <charconv>

namespace modicum {

std::string hex(uint64_t number) { return fmt::format("{:016x}", number); }

std::optional<uint64_t> from_hex(std::string_view text) {
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number, 16);
  if (text.size() != 16 || error != std::errc() || end != text.data() + text.size()) return {};
  return number;
}

uint64_t hex_value(JsonValue& value, std::string_view file) {
  if (const auto number = from_hex(value.string())) return *number;
  fail(Category::integrity, "a digest is not 16 hex digits", {.file = std::string(file)});
}

void sums_member(JsonWriter& out, std::string_view key, std::span<const uint64_t> sums) {
  out.key(key).begin_array();
  for (const uint64_t sum : sums) out.value(hex(sum));
  out.end_array();
}

std::vector<uint64_t> sums_value(JsonValue& value, std::string_view file) {
  std::vector<uint64_t> sums;
  value.array([&](JsonValue& sum) { sums.push_back(hex_value(sum, file)); });
  return sums;
}

void require_version(int64_t version, int64_t known, const std::string& file) {
  if (version <= known) return;
  fail(Category::unsupported, "the file was written by a later Modicum",
       {.file = file,
        .expected = fmt::format("version {}", known),
        .got = fmt::format("version {}", version)});
}

void owner_members(JsonWriter& out, const SaveOwner& owner) {
  out.member("host", owner.host).member("pid", owner.pid).member("started", owner.started);
}

void read_owner_member(std::string_view key, JsonValue& member, SaveOwner& owner) {
  if (key == "host") owner.host = member.string();
  if (key == "pid") owner.pid = member.integer();
  if (key == "started") owner.started = static_cast<uint64_t>(member.integer());
}

}  // namespace modicum
