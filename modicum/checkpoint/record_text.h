// Functions for the JSON records of both steps and conversions. Internal to `checkpoint`.
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

// Writes a StepOwner's members; reads a member into `owner` if it is one of them.
void owner_members(JsonWriter& out, const StepOwner& owner);
void read_owner_member(std::string_view key, JsonValue& member, StepOwner& owner);

}  // namespace modicum
