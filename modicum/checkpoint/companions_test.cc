#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdio.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <thread>

#include "modicum/checkpoint/test_files_doubles.h"
#include "modicum/io/temp_dir_double.h"

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
    EXPECT_EQ(config_of(from, {.form = NewForm{DType::bf16}}).text, to);
  }
}

// Catches: FP8 codes that are saved without the `quantization_config` that is needed to read them.
TEST(ConfigOf, SavedFp8CodesKeepQuantizationConfig) {
  EXPECT_EQ(config_of(R"({"dtype": "float16", "quantization_config": {"dtype": "float16"}})",
                      {.form = NewForm{DType::bf16, true}})
                .text,
            R"({"dtype": "bfloat16", "quantization_config": {"dtype": "float16"}})");
}

// Catches: a number of another part of the model that changes; a text without the member, which
// keeps the class's default; an old text whose outer config has the member; a change of the dtype
// at the same place that removes the new member.
TEST(ConfigOf, SetsTheVocabularyOfTheTextModel) {
  const ConfigChange change{.form = {},
                            .vocabulary = Vocabulary{"vocab_size", 140, "text", "whole"}};
  for (const auto& [from, to] : std::vector<std::pair<std::string, std::string>>{
           {R"({"dtype": "float32", "model_type": "text", "vocab_size": 131
})",
            R"({"dtype": "float32", "model_type": "text", "vocab_size": 140
})"},
           {R"({"vocab_size":131,"model_type":"text"})",
            R"({"vocab_size":140,"model_type":"text"})"},
           {R"({"model_type": "whole", "vocab_size": 7, "audio": {"vocab_size": 131},
 "text_config": {"model_type": "text", "vocab_size": 131}})",
            R"({"model_type": "whole", "vocab_size": 7, "audio": {"vocab_size": 131},
 "text_config": {"model_type": "text", "vocab_size": 140}})"},
           {R"({"text_config": {"model_type": "text"}})",
            R"({"text_config": {"vocab_size": 140,"model_type": "text"}})"},
           {R"({"model_type": "whole", "vocab_size": 131})",
            R"({"model_type": "whole", "vocab_size": 140})"}}) {
    const NewConfig config = config_of(from, change);
    EXPECT_EQ(config.text, to);
    EXPECT_TRUE(config.has_vocabulary);
  }
  for (const std::string& text : {std::string("[1"), std::string(R"({"vocab_size": 131})"),
                                  std::string(R"({"model_type": "whole"})")}) {
    EXPECT_EQ(config_of(text, change).text, text);
    EXPECT_FALSE(config_of(text, change).has_vocabulary);
  }
  const ConfigChange both{.form = NewForm{DType::bf16}, .vocabulary = change.vocabulary};
  EXPECT_EQ(config_of(R"({"quantization_config": 1, "model_type": "text"})", both).text,
            R"({"vocab_size": 140,"model_type": "text"})");
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
  return copy_companions(source, companion_files(source), {}, files, "/out");
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
  EXPECT_EQ(all.copied[0], (CheckpointFile{"empty.txt", 0, 0, digest_of("")}));
  EXPECT_EQ(all.copied[1],
            (CheckpointFile{"tokenizer.json", text.size(), text.size(), digest_of(text)}));
  EXPECT_EQ(under.get("/out/tokenizer.json"), text);
  check_digest(files, "/out", all.copied[1]);
  for (const IoCall& call : files.calls()) {
    if (call.file != "tokenizer.json") continue;
    EXPECT_LE(call.end - call.begin, 64 * kKiB) << call.what;
  }
}

// Catches: a name that no manifest.json can hold, so that the checkpoint could not be read.
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
      files.before_call(is_config ? 6 : 8, [&] { under.put(std::string("/in/") + name, later); });
      if (is_config) {
        EXPECT_THROW(copied(recorded, under), Error);
        continue;
      }
      const Companions all = copied(recorded, under);
      EXPECT_EQ(files.calls()[7].what, "read");
      EXPECT_GT(files.calls()[7].begin, 0);
      EXPECT_TRUE(all.copied.empty());
      EXPECT_EQ(all.warnings,
                std::vector<std::string>{"log.txt was not copied: it was being written"});
      EXPECT_EQ(under.list("/out"), std::vector<std::string>());
    }
  }
}

// A checkpoint in a directory of the disk, next to which there is a file of somebody else.
class LinkedCompanions : public testing::Test {
 protected:
  explicit LinkedCompanions(const std::string& directory = "hub") : in(temp / directory) {
    std::filesystem::create_directories(in);
    std::filesystem::create_directory(temp / "out");
    put(in + "/model.safetensors", file_with({{"w", 8}}));
    put(temp / "secret.txt", "a private key");
  }

  static void put(const std::string& path, const std::string& text) { std::ofstream(path) << text; }
  void link(const std::string& to, const std::string& name) const {
    std::filesystem::create_symlink(to, in + "/" + name);
  }
  Companions copy(const std::string& from) {
    const Checkpoint source = open_checkpoint(files, from);
    return copy_companions(source, companion_files(source), {}, files, temp / "out");
  }
  std::string copied_text(const std::string& name) {
    return read_text(*files.open(temp / ("out/" + name)), kLongestText, Category::io);
  }

  TempDir temp;
  PosixFileSystem files;
  const std::string in;
};

// Catches: a link out of the directory that is copied, and published with the output; a warning
// that does not say what to do.
TEST_F(LinkedCompanions, FilesElsewhereAreLeftOut) {
  link("../secret.txt", "direct.txt");
  link("direct.txt", "twice.txt");
  link(temp / "secret.txt", "absolute.txt");
  link("..", "up");
  link("up/secret.txt", "through.txt");
  link("/dev/zero", "endless.txt");
  const Companions all = copy(in);
  EXPECT_TRUE(all.copied.empty());
  EXPECT_TRUE(std::filesystem::is_empty(temp / "out"));
  ASSERT_EQ(all.warnings.size(), 5);
  EXPECT_EQ(all.warnings[1],
            "direct.txt was not copied: it is a link to ../secret.txt, out of the checkpoint's "
            "directory; copy the file itself into the directory");
}

TEST_F(LinkedCompanions, AConfigElsewhereIsAnError) {
  put(temp / "secret.txt", "{}");
  link("../secret.txt", "config.json");
  try {
    copy(in);
    FAIL() << "config.json was copied";
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), Category::io);
    EXPECT_EQ(error.facts().file, "config.json");
  }
  EXPECT_TRUE(std::filesystem::is_empty(temp / "out"));
}

// Also as Kubernetes mounts a ConfigMap, and if the directory itself is reached through a link.
TEST_F(LinkedCompanions, FilesInTheDirectoryAreCopied) {
  std::filesystem::create_directory(in + "/..2026");
  put(in + "/..2026/tokenizer.json", "tokens");
  link("..2026", "..data");
  link("..data/tokenizer.json", "tokenizer.json");
  link(in + "/..2026/tokenizer.json", "absolute.json");
  std::filesystem::create_directory_symlink(in, temp / "link");
  const Companions all = copy(temp / "link");
  EXPECT_EQ(all.warnings, std::vector<std::string>());
  ASSERT_EQ(all.copied.size(), 2);
  EXPECT_EQ(copied_text("tokenizer.json"), "tokens");
  EXPECT_EQ(copied_text("absolute.json"), "tokens");
}

class CachedCompanions : public LinkedCompanions {
 protected:
  CachedCompanions() : LinkedCompanions("models--o--n/snapshots/rev") {
    std::filesystem::create_directory(temp / "models--o--n/blobs");
    std::filesystem::create_directory(temp / "models--o--other");
    put(temp / "models--o--n/blobs/12ab", "tokens");
    put(temp / "models--o--other/12ab", "of another model");
  }
};

TEST_F(CachedCompanions, BlobsAreCopied) {
  link("../../blobs/12ab", "tokenizer.json");
  link("../../../models--o--other/12ab", "other.json");
  const Companions all = copy(in);
  ASSERT_EQ(all.copied.size(), 1);
  EXPECT_EQ(copied_text("tokenizer.json"), "tokens");
  EXPECT_EQ(all.warnings.size(), 1);
}

// Catches: `blobs` next to any directory named snapshots.
TEST_F(LinkedCompanions, OnlyTheCacheHasBlobs) {
  std::filesystem::create_directories(temp / "blobs");
  std::filesystem::create_directories(temp / "snapshots/rev");
  std::filesystem::rename(in + "/model.safetensors", temp / "snapshots/rev/model.safetensors");
  put(temp / "blobs/key", "a private key");
  std::filesystem::create_symlink("../../blobs/key", temp / "snapshots/rev/key.txt");
  EXPECT_TRUE(copy(temp / "snapshots/rev").copied.empty());
}

// Another process exchanges the directory through which a link leads while the link is followed.
// Catches: a check of one file and an open of another.
TEST_F(LinkedCompanions, NoExchangeOfLinksGetsAFileOut) {
  constexpr int kTimes = 20'000;
  std::filesystem::create_directory(in + "/sub");
  put(in + "/sub/secret.txt", "harmless");
  std::filesystem::create_directory_symlink(temp.path(), in + "/outside");
  link("sub/secret.txt", "notes.txt");
  const std::vector<std::string> directories = own_directories(files, in);
  std::atomic<bool> is_done = false;
  std::thread other([&] {
    while (!is_done) {
      renameat2(AT_FDCWD, (in + "/sub").c_str(), AT_FDCWD, (in + "/outside").c_str(),
                RENAME_EXCHANGE);
    }
  });
  int opened = 0;
  for (int i = 0; i < kTimes; ++i) {
    try {
      const std::unique_ptr<File> file = files.open_own(in + "/notes.txt", directories);
      if (file == nullptr) continue;
      EXPECT_EQ(read_text(*file, kLongestText, Category::io), "harmless");
      ++opened;
    } catch (const Error&) {
      continue;
    }
  }
  is_done = true;
  other.join();
  EXPECT_GT(opened, 0);
  EXPECT_LT(opened, kTimes);
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
