#include <gtest/gtest.h>

#include "modicum/checkpoint/test_files_doubles.h"

namespace modicum {
namespace {

// Catches: a comma too many or too few; an edit of the same name inside a string or a list; a key
// that is found only if it is written without escapes.
TEST(ConfigOf, ChangesOnlyDtypeAndQuantizationConfig) {
  for (const auto& [from, to] : std::vector<std::pair<std::string, std::string>>{
           {R"({"dtype": "float32", "a": 1.0e-5})", R"({"dtype": "bfloat16", "a": 1.0e-5})"},
           {R"({"a": [1, {"dtype": "float8"}], "torch_dtype":"float32"})",
            R"({"a": [1, {"dtype": "float8"}], "torch_dtype":"bfloat16"})"},
           {R"({"text_config": {"dtype": "float32"}})",
            R"({"text_config": {"dtype": "bfloat16"}})"},
           {R"({"thinker": {"text": {"dtype": "float32", "quantization_config": 1}}})",
            R"({"thinker": {"text": {"dtype": "bfloat16"}}})"},
           {R"({"quantization_config": {"b": ["}", "\"]"]}, "a": 1})", R"({"a": 1})"},
           {R"({"a": "quantization_config", "quantization_config": null})",
            R"({"a": "quantization_config"})"},
           {R"({"a": 1, "quantization_config" : [2] , "b": 2})", R"({"a": 1, "b": 2})"},
           {R"({"quantization_config": 5})", R"({})"},
           {R"({"a": 1, "quantization\u005fconfig": 2})", R"({"a": 1})"},
           {R"({"dtype": null})", R"({"dtype": null})"},
           {"[1", "[1"}}) {
    EXPECT_EQ(config_of(from, {DType::bf16}), to);
  }
}

// Catches: FP8 codes that are saved without the `quantization_config` that is needed to read them.
TEST(ConfigOf, SavedFp8CodesKeepQuantizationConfig) {
  EXPECT_EQ(config_of(R"({"dtype": "float16", "quantization_config": {"dtype": "float16"}})",
                      {DType::bf16, true}),
            R"({"dtype": "bfloat16", "quantization_config": {"dtype": "float16"}})");
}

// A directory with a model of one tensor, and with these other files.
Checkpoint checkpoint_with(MemoryFileSystem& under, FileSystem& files,
                           const std::map<std::string, std::string>& others) {
  under.put("/in/model.safetensors", file_with({{"w", 8}}));
  for (const auto& [name, text] : others) under.put("/in/" + name, text);
  under.make_directory("/out");
  return open_checkpoint(files, "/in");
}

Companions copied(const Checkpoint& source, FileSystem& files) {
  return copy_companions(source, companion_files(source), std::nullopt, files, "/out");
}

// Catches: a file that is read in one piece, whose memory nothing counts; a digest that differs
// from that of the whole text.
TEST(CopyCompanions, CopiesInSmallBlocks) {
  std::string text(100'000, 'a');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>('a' + i % 23);
  MemoryFileSystem under;
  RecordingFileSystem files(under);
  const Checkpoint source =
      checkpoint_with(under, files, {{"tokenizer.json", text}, {"empty.txt", ""}});
  const Companions all = copied(source, files);
  EXPECT_EQ(all.warnings, std::vector<std::string>());
  ASSERT_EQ(all.copied.size(), 2);
  EXPECT_EQ(all.copied[0], (StepFile{"empty.txt", 0, 0, digest_of("")}));
  EXPECT_EQ(all.copied[1], (StepFile{"tokenizer.json", text.size(), text.size(), digest_of(text)}));
  EXPECT_EQ(under.get("/out/tokenizer.json"), text);
  check_digest(files, "/out", all.copied[1]);
  for (const IoCall& call : files.calls()) {
    if (call.file != "tokenizer.json") continue;
    EXPECT_LE(call.end - call.begin, 64 * kKiB) << call.what;
  }
}

// Catches: a name that no manifest.json can hold, so that the step could not be read.
TEST(CopyCompanions, LeavesOutANameThatIsNotUtf8) {
  MemoryFileSystem files;
  const Checkpoint source =
      checkpoint_with(files, files, {{"caf\xe9.txt", "a"}, {"caf\u00e9.txt", "b"}});
  const Companions all = copied(source, files);
  ASSERT_EQ(all.copied.size(), 1);
  EXPECT_EQ(all.copied[0].name, "caf\u00e9.txt");
  ASSERT_EQ(all.warnings.size(), 1);
  EXPECT_NE(all.warnings[0].find("was not copied: its name is not UTF-8"), std::string::npos);
  EXPECT_EQ(files.list("/out"), std::vector<std::string>{"caf\u00e9.txt"});
}

// Another program appends to a file, or empties it, while it is copied. Catches: a save that fails
// for it, and half a file that stays; a config.json that is left out.
TEST(CopyCompanions, LeavesOutAFileThatChanges) {
  const std::string text(40'000, 'x');
  for (const std::string& later : {text + "y", std::string()}) {
    for (const char* name : {"log.txt", "config.json"}) {
      MemoryFileSystem under;
      const Checkpoint source = checkpoint_with(under, under, {{name, text}});
      RecordingFileSystem files(under);
      Checkpoint recorded = source;
      recorded.files = &files;
      const bool is_config = name == std::string("config.json");
      files.before_call(is_config ? 5 : 7, [&] { under.put(std::string("/in/") + name, later); });
      if (is_config) {
        EXPECT_THROW(copied(recorded, under), Error);
        continue;
      }
      const Companions all = copied(recorded, under);
      EXPECT_EQ(files.calls()[6].what, "read");
      EXPECT_GT(files.calls()[6].begin, 0);
      EXPECT_TRUE(all.copied.empty());
      EXPECT_EQ(all.warnings,
                std::vector<std::string>{"log.txt was not copied: it was being written"});
      EXPECT_EQ(under.list("/out"), std::vector<std::string>());
    }
  }
}

// Catches: a file that can't be read and that is left out without an error.
TEST(CopyCompanions, AnUnreadableFileIsAnError) {
  MemoryFileSystem under;
  const Checkpoint source = checkpoint_with(under, under, {{"tokenizer.json", "a"}});
  RecordingFileSystem probe(under);
  Checkpoint recorded = source;
  recorded.files = &probe;
  copied(recorded, under);
  under.remove("/out/tokenizer.json");
  for (size_t call = 1; call <= probe.calls().size(); ++call) {
    RecordingFileSystem files(under, static_cast<int64_t>(call));
    recorded.files = &files;
    EXPECT_THROW(copied(recorded, under), Error) << call;
    if (under.exists("/out/tokenizer.json")) under.remove("/out/tokenizer.json");
  }
}

}  // namespace
}  // namespace modicum
