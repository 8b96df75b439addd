// What the JSON records of steps and conversions share. Internal to `checkpoint`.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "modicum/checkpoint/step.h"
#include "modicum/json/json.h"

namespace modicum {

// The directories within a step.
constexpr std::array<const char*, 2> kDirectories = {kStateDirectory, kExtraDirectory};

std::string hex(uint64_t number);  // 16 digits
std::optional<uint64_t> from_hex(std::string_view text);

void owner_members(JsonWriter& out, const StepOwner& owner);
void read_owner_member(std::string_view key, JsonValue& member, StepOwner& owner);

}  // namespace modicum
