// What the JSON records of checkpoints and of conversions have in common. Internal to `checkpoint`.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "modicum/checkpoint/run.h"
#include "modicum/json/json.h"

namespace modicum {

constexpr const char* kManifest = "manifest.json";
// The subdirectories that a checkpoint may have.
constexpr std::array<const char*, 2> kDirectories = {kStateDirectory, kExtraDirectory};

std::string hex(uint64_t number);                         // 16 digits
std::optional<uint64_t> from_hex(std::string_view text);  // empty unless `text` is 16 hex digits
// A digest of 64 bits. Throws INTEGRITY, naming the file, unless the value is 16 hex digits.
uint64_t hex_value(JsonValue& value, std::string_view file);

// The sums of chunks: writes them as a member of the current object, and reads the member's value.
void sums_member(JsonWriter& out, std::string_view key, std::span<const uint64_t> sums);
std::vector<uint64_t> sums_value(JsonValue& value, std::string_view file);

// Throws UNSUPPORTED if `version`, a member of the record `file`, is later than `known`. It must be
// the first member that is read: the others of a later version may have any form.
void require_version(int64_t version, int64_t known, const std::string& file);

// Writes the fields of a SaveOwner as members of the current object.
void owner_members(JsonWriter& out, const SaveOwner& owner);
// Stores the member in `owner` if `key` names a field of SaveOwner; else does nothing.
void read_owner_member(std::string_view key, JsonValue& member, SaveOwner& owner);

}  // namespace modicum
