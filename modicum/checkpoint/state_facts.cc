#include <fmt/format.h>

#include <charconv>

#include "modicum/checkpoint/step.h"
#include "modicum/json/json.h"

namespace modicum {
namespace {

// A whole number of 64 bits, more than a JSON integer of the house can be.
uint64_t number_of(const std::string& text) {
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error == std::errc() && end == text.data() + text.size()) return number;
  fail(Category::integrity, "the seed is not a number", {.file = kStateFile});
}

}  // namespace

std::string state_json(const StateFacts& facts) {
  JsonWriter out;
  out.begin_object()
      .member("optimizer", "adamw")
      .member("state_format", row_of(facts.format).name)
      .member("seed", std::to_string(facts.seed))
      .member("steps", facts.steps);
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
  try {
    read_json(text, [&](JsonValue& root) {
      root.object([&](std::string_view key, JsonValue& member) {
        if (key == "optimizer") optimizer = member.string();
        if (key == "state_format") facts.format = state_format_named(member.string()).format;
        if (key == "seed") facts.seed = number_of(member.string());
        if (key == "steps") facts.steps = member.integer();
        if (key == "without_state") {
          member.array([&](JsonValue& name) { facts.without_state.push_back(name.string()); });
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
    fail(Category::unsupported, "the state is not one of AdamW",
         {.file = kStateFile, .expected = "adamw", .got = printable(optimizer)});
  }
  return facts;
}

}  // namespace modicum
