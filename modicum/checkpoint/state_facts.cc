#include <fmt/format.h>

#include <charconv>

#include "modicum/checkpoint/record_text.h"
#include "modicum/checkpoint/run.h"
#include "modicum/json/json.h"

namespace modicum {
namespace {

// The codes of 8-bit moments (docs/internals/numerics.md). State with other codes cannot be read,
// since its bytes have another meaning.
constexpr std::string_view kCodes = "mu-law";

// The seed is stored as a string, since it has 64 bits and the JSON reader's integers have 63.
uint64_t seed_of(const std::string& text) {
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error == std::errc() && end == text.data() + text.size()) return number;
  fail(Category::integrity, "the seed is not a number", {.file = kStateFile});
}

// Without empty names the memory of all names is in proportion to the text.
std::string name_of(JsonValue& value) {
  std::string name = value.string();
  if (name.empty()) fail(Category::integrity, "a tensor has no name", {.file = kStateFile});
  return name;
}

StateFormat format_of(const std::string& name) {
  try {
    return state_format_named(name).format;
  } catch (const Error& error) {  // its category is that of a wrong argument
    Facts facts = error.facts();
    facts.file = kStateFile;
    fail(Category::unsupported, error.what_happened(), std::move(facts));
  }
}

}  // namespace

std::string state_json(const StateFacts& facts) {
  JsonWriter out;
  out.begin_object()
      .member("optimizer", "adamw")
      .member("state_format", row_of(facts.format).name)
      .member("seed", std::to_string(facts.seed))
      .member("steps", facts.steps);
  if (row_of(facts.format).has_scales()) out.member("codes", kCodes);
  if (facts.digest) out.member("digest", hex(*facts.digest));
  out.key("without_state").begin_array();
  for (const std::string& fqn : facts.without_state) out.value(fqn);
  out.end_array();
  if (!facts.steps_of.empty()) {
    out.key("steps_of").begin_object();
    for (const auto& [fqn, steps] : facts.steps_of) out.member(fqn, steps);
    out.end_object();
  }
  out.end_object();
  return out.text();
}

StateFacts parse_state(const std::string& text) {
  StateFacts facts;
  std::string optimizer;
  std::string codes = "none named";
  try {
    read_json(text, [&](JsonValue& root) {
      root.object([&](std::string_view key, JsonValue& member) {
        if (key == "optimizer") optimizer = member.string();
        if (key == "state_format") facts.format = format_of(member.string());
        if (key == "codes") codes = member.string();
        if (key == "seed") facts.seed = seed_of(member.string());
        if (key == "steps") facts.steps = member.integer();
        if (key == "digest") facts.digest = hex_value(member, kStateFile);
        if (key == "without_state") {
          member.array([&](JsonValue& name) { facts.without_state.push_back(name_of(name)); });
        }
        if (key == "steps_of") {
          member.object([&](std::string_view fqn, JsonValue& steps) {
            facts.steps_of[std::string(fqn)] = steps.integer();
          });
        }
      });
    });
  } catch (const JsonError& error) {
    fail(Category::integrity, error.what(), {.file = kStateFile, .offset = error.offset});
  }
  if (optimizer != "adamw") {
    fail(Category::unsupported,
         "the state is of another optimizer, or of one that its import did not name: "
         "--optimizer none, or no optimizer, loads the weights",
         {.file = kStateFile, .expected = "adamw", .got = printable(optimizer)});
  }
  if (row_of(facts.format).has_scales() && codes != kCodes) {
    fail(Category::unsupported, "the 8-bit moments have codes that this version does not read",
         {.file = kStateFile, .expected = std::string(kCodes), .got = printable(codes)});
  }
  return facts;
}

}  // namespace modicum
