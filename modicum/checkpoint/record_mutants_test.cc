// 100,000 mutants of the texts that a reader of checkpoints meets: COMMIT, manifest.json,
// state.json and the journal of a conversion. Each must be read or refused with a category, in less
// than 5 s and without an allocation of more than 16 times the text and 16 MiB.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <ctime>
#include <random>

#include "modicum/base/allocations_double.h"
#include "modicum/base/base.h"
#include "modicum/base/sanitizers_double.h"
#include "modicum/checkpoint/checkpoint.h"
#include "modicum/io/file_doubles.h"

namespace modicum {
namespace {

const SaveOwner kSomebody{"host", 7, 11};

CheckpointRecord record_of_a_checkpoint() {
  CheckpointRecord record{
      .step = 3, .uuid = std::string(32, 'a'), .world_size = 2, .tool = "modicum"};
  record.files = {{"model.safetensors", 5, 3, digest_of("abc")},
                  {"optimizer/state.json", 4, 4, digest_of("abcd")}};
  record.tensors = {{{"w", Role::param, DType::bf16, {1024, 4096}}, {1, 2}, {3, 4}},
                    {{"\u00e9\"", Role::param, DType::f32, {}}, {0x0123456789abcdef}, {6}}};
  record.state = {{{"w.exp_avg", Role::param, DType::u8, {4}}, {5}, {}}};
  return record;
}

StateFacts facts_of_a_state() {
  return {.format = StateFormat::int8_moments,
          .seed = UINT64_MAX,
          .steps = 12,
          .steps_of = {{"b", 3}},
          .without_state = {"a", "c"},
          .digest = 77};
}

// Changes a text at one to four random places.
std::string mutant_of(const std::string& text, std::mt19937_64& random) {
  static constexpr std::array<std::string_view, 20> kTokens = {"{",
                                                               "}",
                                                               "[",
                                                               "]",
                                                               "\"",
                                                               ",",
                                                               ":",
                                                               "null",
                                                               "true",
                                                               "-1",
                                                               "0",
                                                               "1e999",
                                                               "9223372036854775807",
                                                               "9223372036854775808",
                                                               "\\ud800",
                                                               "\"\"",
                                                               "{}",
                                                               "[[[[[[[[",
                                                               "\xff",
                                                               "0.5"};
  std::string changed = text;
  for (uint64_t left = 1 + random() % 4; left > 0; --left) {
    const size_t at = random() % (changed.size() + 1);
    const size_t count = std::min<size_t>(random() % 24, changed.size() - at);
    switch (random() % 6) {
      case 0: changed.insert(at, kTokens[random() % kTokens.size()]); break;
      case 1: changed.replace(at, count, kTokens[random() % kTokens.size()]); break;
      case 2: changed.erase(at, count); break;
      case 3: changed.insert(at, changed.substr(at, count)); break;
      case 4: changed.resize(at); break;
      default:
        if (at < changed.size()) changed[at] = static_cast<char>(changed[at] ^ 1 << random() % 8);
    }
  }
  return changed;
}

// Calls `read` with the text. Anything but success and an Error fails.
void expect_typed(const std::string& text, FunctionRef<void(const std::string& text)> read) {
  const std::clock_t begin = std::clock();  // of the CPU: other processes don't count
  largest_allocation = 0;
  try {
    read(text);
  } catch (const Error& error) {
    EXPECT_NE(error.category(), Category::internal) << error.what();
  }
  EXPECT_LE(largest_allocation, 16 * text.size() + (size_t{16} << 20)) << text.substr(0, 1000);
  EXPECT_LT((std::clock() - begin) / CLOCKS_PER_SEC, kIsSanitized ? 20 : 5);
}

void expect_typed_mutants(const std::string& good, int mutants,
                          FunctionRef<void(const std::string& text)> read) {
  std::mt19937_64 random(good.size());
  read(good);
  for (int i = 0; i < mutants; ++i) expect_typed(mutant_of(good, random), read);
}

void read_manifest(const std::string& text) {
  const CheckpointRecord record = parse_record(text);
  EXPECT_EQ(parse_record(record_json(record)), record);
}

void read_state(const std::string& text) {
  const std::string again = state_json(parse_state(text));
  EXPECT_EQ(state_json(parse_state(again)), again);
}

void read_journal(const std::string& text) {
  MemoryFileSystem files;
  files.put("/.out.journal", text);
  files.put("/.out.partial/a", "four");
  Hasher hasher;
  hasher.add("inputs");
  ConversionJournal journal(files, "/out",
                            {hasher.digest(), kSomebody, [](const SaveOwner&) { return true; }});
  const ConvertedFile* const file = journal.finished("a", 4);
  EXPECT_TRUE(file == nullptr || file->bytes == 4);
  journal.recorded();
}

std::string journal_text() {
  MemoryFileSystem files;
  Hasher hasher;
  hasher.add("inputs");
  ConversionJournal journal(files, "/out",
                            {hasher.digest(), kSomebody, [](const SaveOwner&) { return true; }});
  files.put("/.out.partial/a", "four");
  journal.add({"a", 4, 7, std::vector<TensorLoss>{{"w", "f", {3, 4, 5, -6.5, 7}}}});
  return files.get("/.out.journal");
}

TEST(RecordMutants, OfCommit) {
  MemoryFileSystem files;
  CheckpointInFlight step = begin_checkpoint(files, "/root", 3, kSomebody);
  publish_checkpoint(files, step, {.step = 3, .uuid = step.uuid, .tool = "modicum"});
  const std::string path = "/root/step-3/COMMIT";
  expect_typed_mutants(files.get(path), 20'000, [&](const std::string& text) {
    files.put(path, text);
    EXPECT_EQ(open_run_checkpoint(files, "/root/step-3").record.uuid, step.uuid);
  });
}

TEST(RecordMutants, OfManifest) {
  expect_typed_mutants(record_json(record_of_a_checkpoint()), 40'000, read_manifest);
}

TEST(RecordMutants, OfState) {
  expect_typed_mutants(state_json(facts_of_a_state()), 20'000, read_state);
}

TEST(RecordMutants, OfJournal) { expect_typed_mutants(journal_text(), 20'000, read_journal); }

// The shortest entries that each list could have, four million bytes of them. Catches: an entry
// without a text of its own, which takes as much memory as any other.
TEST(RecordMutants, ShortEntriesTakeLittleMemory) {
  const auto many = [](const std::string& before, const std::string& entry,
                       const std::string& after) {
    std::string text = before;
    while (text.size() < 4'000'000) text += entry + ",";
    return text + entry + after;
  };
  for (const char* const list : {"files", "tensors", "state"}) {
    for (const char* const entry : {"{}", "{\"name\":\"a\"}", "{\"dtype\":\"U8\",\"shape\":[0]}"}) {
      expect_typed(many(fmt::format("{{\"version\":1,\"{}\":[", list), entry, "]}"), read_manifest);
    }
  }
  expect_typed(many("{\"version\":1,\"tensors\":[{\"shape\":[", "0", "]}]}"), read_manifest);
  expect_typed(many("{\"optimizer\":\"adamw\",\"without_state\":[", "\"\"", "]}"), read_state);
  for (const char* const entry : {"{}", "{\"name\":\"a\",\"losses\":[]}"}) {
    expect_typed(many("{\"files\":[", entry, "]}"), read_journal);
  }
  expect_typed(many("{\"files\":[{\"name\":\"a\",\"losses\":[", "{}", "]}]}"), read_journal);
}

}  // namespace
}  // namespace modicum
