#include <gtest/gtest.h>
#include <pwd.h>
#include <unistd.h>

#include <cstdlib>
#include <map>

#include "modicum/checkpoint/test_files_doubles.h"
#include "modicum/json/json_values_double.h"

namespace modicum {
namespace {

const std::string kSmall = file_with({{"a", 2}});

// Sets an environment variable, and restores the old value in the destructor.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* const old = std::getenv(name)) old_ = old;
    set(value);
  }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;
  ~Variable() { set(old_ ? old_->c_str() : nullptr); }

 private:
  void set(const char* value) const {
    if (value != nullptr) {
      setenv(name_, value, 1);
    } else {
      unsetenv(name_);
    }
  }
  const char* name_;
  std::optional<std::string> old_;
};

TEST(Open, TheOnlyFileOfADirectoryIsTheCheckpoint) {
  MemoryFileSystem files;
  files.put("/m/weights.safetensors", kSmall);
  files.put("/m/pytorch_model.bin", "x");
  const Checkpoint checkpoint = open_checkpoint(files, "/m");
  EXPECT_EQ(checkpoint.directory, "/m");
  EXPECT_EQ(checkpoint.manifest.files.at(0).name, "weights.safetensors");
  EXPECT_EQ(checkpoint.manifest.tensors.size(), 1U);
}

TEST(Open, ModelSafetensorsWinsOverItsNeighbours) {
  MemoryFileSystem files;
  files.put("/m/model.safetensors", kSmall);
  files.put("/m/optimizer.safetensors", kSmall);
  EXPECT_EQ(open_checkpoint(files, "/m").manifest.files.at(0).name, "model.safetensors");
}

TEST(Open, SeveralFilesWithoutAnIndexAreAmbiguousUnlessOneIsNamed) {
  MemoryFileSystem files;
  files.put("/m/x.safetensors", kSmall);
  files.put("/m/y.safetensors", kSmall);
  const auto error = failure(files, "/m");
  ASSERT_TRUE(error);
  EXPECT_EQ(error->category(), Category::index_ambiguous);
  EXPECT_NE(error->what_happened().find("x.safetensors, y.safetensors"), std::string::npos);
  EXPECT_FALSE(failure(files, "/m/y.safetensors"));
}

TEST(Open, AnIndexAndASingleFileAreAmbiguousUnlessOneIsNamed) {
  MemoryFileSystem files;
  const std::string index = "/m/model.safetensors.index.json";
  files.put("/m/model.safetensors", kSmall);
  files.put("/m/one.safetensors", kSmall);
  files.put(index, index_with({{"a", "one.safetensors"}}, 2));
  const auto error = failure(files, "/m");
  ASSERT_TRUE(error);
  EXPECT_EQ(error->category(), Category::index_ambiguous);
  EXPECT_EQ(open_checkpoint(files, "/m/model.safetensors").manifest.files.at(0).name,
            "model.safetensors");
  EXPECT_EQ(open_checkpoint(files, index).manifest.files.at(0).name, "one.safetensors");
  files.put(index, index_with({{"a", "model.safetensors"}}, 2));
  EXPECT_FALSE(failure(files, "/m"));
  files.put("/m/other.safetensors.index.json", "{}");
  EXPECT_EQ(failure(files, "/m")->category(), Category::index_ambiguous);
}

TEST(Open, PickleIsNeverRead) {
  MemoryFileSystem files;
  files.put("/m/pytorch_model.bin", kSmall);
  files.put("/m/config.json", "{}");
  RecordingFileSystem recording(files);
  for (const char* path : {"/m", "/m/pytorch_model.bin"}) {
    const auto error = failure(recording, path);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->category(), Category::format_pickle);
    EXPECT_EQ(error->facts().file, "pytorch_model.bin");
  }
  EXPECT_EQ(recording.bytes_read(), 0U);
}

TEST(Open, CheckpointsOfOtherProgramsNameTheirImporter) {
  MemoryFileSystem files;
  files.put("/dcp/.metadata", kSmall);
  files.put("/dcp/__0_0.distcp", kSmall);
  files.put("/dcp/data.pt", kSmall);
  files.put("/accelerate/pytorch_model_fsdp_0/.metadata", kSmall);
  files.put("/zero/latest", "global_step8");
  files.put("/zero/global_step8/mp_rank_00_model_states.pt", kSmall);
  files.put("/zero/global_step8/zero_pp_rank_0_mp_rank_00_optim_states.pt", kSmall);
  for (const char* path : {"/dcp", "/accelerate", "/zero", "/zero/global_step8"}) {
    const auto error = failure(files, path);
    ASSERT_TRUE(error) << path;
    EXPECT_EQ(error->category(), Category::unsupported) << path;
    EXPECT_NE(error->what_happened().find("modicum.imports.import_checkpoint"), std::string::npos);
  }
  files.put("/dcp/model.safetensors", kSmall);
  EXPECT_FALSE(failure(files, "/dcp"));
}

TEST(Open, AMissingPathIsAnIoError) {
  MemoryFileSystem files;
  files.put("/m/readme.md", "x");
  const auto empty = failure(files, "/m");
  ASSERT_TRUE(empty);
  EXPECT_EQ(empty->category(), Category::io);
  EXPECT_NE(empty->what_happened().find("no safetensors file in"), std::string::npos);
  EXPECT_EQ(empty->facts().got, "readme.md");
  files.put("/run/step-9/model.safetensors", kSmall);
  files.put("/run/step-20/model.safetensors", kSmall);
  EXPECT_TRUE(
      failure(files, "/run")->facts().expected.starts_with("one checkpoint, such as step-20"));
  for (const char* path : {"/nowhere", "/m/x.safetensors", "org/name", "org/../name", ""}) {
    const auto error = failure(files, path);
    ASSERT_TRUE(error) << path;
    EXPECT_EQ(error->category(), Category::io) << error->what();
  }
  EXPECT_NE(failure(files, "/nowhere")->what_happened().find("ENOENT"), std::string::npos);
}

// Catches: an error that does not say what takes config.json alone.
TEST(Open, ADirectoryWithConfigJsonAloneIsRefused) {
  MemoryFileSystem files;
  files.put("/m/config.json", R"({"model_type":"llama"})");
  const auto error = failure(files, "/m");
  ASSERT_TRUE(error);
  EXPECT_EQ(error->category(), Category::io) << error->what();
  EXPECT_NE(error->facts().expected.find("`modicum plan` needs config.json alone"),
            std::string::npos)
      << error->what();
}

TEST(Open, ConfigJsonIsAloneWithoutWeights) {
  MemoryFileSystem files;
  files.put("/m/config.json", "{}");
  files.put("/m/tokenizer.json", "{}");
  EXPECT_EQ(config_alone(files, "/m"), "/m/config.json");
  EXPECT_EQ(config_alone(files, "/m/config.json"), "/m/config.json");
  EXPECT_EQ(config_alone(files, "/m/none.json"), std::nullopt);
  for (const char* file : {"a.safetensors", "a.safetensors.index.json", "pytorch_model.bin",
                           "step-3/COMMIT", ".metadata"}) {
    const std::string folder = std::string("/with-") + file;
    files.put(folder + "/config.json", "{}");
    files.put(folder + "/" + file, "x");
    EXPECT_EQ(config_alone(files, folder), std::nullopt) << file;
  }
  files.put("/m/model.safetensors.index.json", "{}");
  EXPECT_EQ(config_alone(files, "/m/model.safetensors.index.json"), std::nullopt);
}

// Catches: an error for a mistyped path that says only ENOENT.
TEST(Open, TheErrorForAnUnknownPathListsTheValidForms) {
  MemoryFileSystem files;
  const Variable hub("HF_HUB_CACHE", "/hub");
  for (const char* path : {"org/name", "name@main", "https://huggingface.co/org/name"}) {
    const auto error = failure(files, path);
    ASSERT_TRUE(error) << path;
    EXPECT_EQ(error->facts().expected,
              std::string("a directory, a file, or ORG/NAME that hf download has put into /hub") +
                  (path == std::string_view("org/name")
                       ? " (of any other, `uvx modicum plan` reads the headers)"
                       : ""));
    EXPECT_EQ(error->facts().got, path);
  }
}

// Catches: the first bytes of another format that are mistaken for the length of a header.
TEST(Open, FilesOfOtherFormatsAreNamed) {
  MemoryFileSystem files;
  const auto got = [&files](const std::string& text) {
    files.put("/m/model.safetensors", text);
    const auto error = failure(files, "/m");
    EXPECT_EQ(error->category(), Category::format_limit);
    EXPECT_EQ(error->facts().expected, "a safetensors file");
    return error->facts().got;
  };
  EXPECT_EQ(got("version https://git-lfs.github.com/spec/v1\n"),
            "a Git LFS pointer; `git lfs pull` gets the file");
  EXPECT_EQ(got(std::string("GGUF\x03\0\0\0more", 12)), "a GGUF file");
  EXPECT_EQ(got("<!DOCTYPE html><html>"), "an HTML or XML page; download the file again");
  EXPECT_EQ(got("PK\x03\x04\x14____"), "a zip archive, as torch.save writes");
}

TEST(Open, ModelNamesAreResolvedInTheHuggingFaceCache) {
  MemoryFileSystem files;
  const std::string model = "/hub/models--org--tiny-1.0";
  files.put(model + "/refs/main", "abc123\n");
  files.put(model + "/snapshots/abc123/model.safetensors", kSmall);
  const Variable hub("HF_HUB_CACHE", "/hub");
  const Variable home("HF_HOME", nullptr);
  const Checkpoint checkpoint = open_checkpoint(files, "org/tiny-1.0");
  EXPECT_EQ(checkpoint.directory, model + "/snapshots/abc123");
  EXPECT_EQ(checkpoint.hub->name, "org/tiny-1.0");
  EXPECT_EQ(checkpoint.hub->revision, "abc123");
  EXPECT_FALSE(open_checkpoint(files, checkpoint.directory).hub);
  EXPECT_FALSE(is_uncached_name(files, "org/tiny-1.0"));
  EXPECT_TRUE(is_uncached_name(files, "org/other"));
  for (const char* name : {"tokenizer.json", "model.safetensors.index.json"}) {  // no weights yet
    const std::string partial = "/hub/models--org--partial";
    files.put(partial + "/refs/main", "abc123");
    files.put(partial + "/snapshots/abc123/" + name, "{}");
    EXPECT_TRUE(is_uncached_name(files, "org/partial")) << name;
    const auto error = failure(files, "org/partial");
    EXPECT_EQ(error->what_happened(), "the cache has only a part of the model");
    EXPECT_EQ(error->facts().expected,
              "the files that `hf download org/partial` puts into /hub (without them `uvx modicum "
              "plan` reads the headers)");
  }
  EXPECT_EQ(failure(files, "org/other")->category(), Category::io);
  files.put(model + "/refs/main", "../../elsewhere");
  EXPECT_FALSE(is_uncached_name(files, "org/tiny-1.0"));
  EXPECT_EQ(failure(files, "org/tiny-1.0")->category(), Category::io);
  files.put(model + "/refs/main", "");
  EXPECT_EQ(failure(files, "org/tiny-1.0")->category(), Category::io);
}

// Catches: a download that has ended early, and counts as the model.
TEST(Open, AModelOfWhichTheCacheHasAPartIsUncached) {
  const Variable hub("HF_HUB_CACHE", "/hub");
  const auto put_files = [](MemoryFileSystem& files, const std::vector<std::string>& names) {
    files.put("/hub/models--o--n/refs/main", "r");
    for (const std::string& name : names) {
      files.put("/hub/models--o--n/snapshots/r/" + name,
                name.ends_with(".json")
                    ? R"({"weight_map":{"a":"m-1.safetensors","b":"m-2.safetensors"}})"
                    : kSmall);
    }
  };
  const std::string index = "model.safetensors.index.json";
  const std::vector<std::vector<std::string>> whole = {
      {index, "m-1.safetensors", "m-2.safetensors"},
      {"pytorch_model.bin"},
      {"model-00001-of-00001.safetensors"}};
  for (const auto& names : whole) {
    MemoryFileSystem files;
    put_files(files, names);
    EXPECT_FALSE(is_uncached_name(files, "o/n")) << names.back();
  }
  const std::vector<std::vector<std::string>> parts = {
      {index, "m-1.safetensors"},
      {index, "m-2.safetensors", "training_args.bin"},
      {"training_args.bin", "optimizer.pt"},
      {"model-00001-of-00002.safetensors"},
      {"model-00002-of-00010.safetensors"}};
  for (const auto& names : parts) {
    MemoryFileSystem files;
    put_files(files, names);
    EXPECT_TRUE(is_uncached_name(files, "o/n")) << names.back();
    EXPECT_EQ(failure(files, "o/n")->what_happened(), "the cache has only a part of the model");
  }
}

TEST(Open, ACachedModelMayHaveNoOrganisation) {
  MemoryFileSystem files;
  const Variable hub("HF_HUB_CACHE", "/hub");
  files.put("/hub/models--gpt2/refs/main", "r");
  files.put("/hub/models--gpt2/snapshots/r/model.safetensors", kSmall);
  EXPECT_EQ(open_checkpoint(files, "gpt2").hub->name, "gpt2");
  EXPECT_FALSE(is_uncached_name(files, "gpt2"));
  EXPECT_FALSE(is_uncached_name(files, "gpt3"));
  files.put("gpt2/model.safetensors", kSmall);
  EXPECT_EQ(open_checkpoint(files, "gpt2").directory, "gpt2");
}

TEST(Open, AnAmbiguousModelOfTheHubSaysWhereItsFilesAre) {
  MemoryFileSystem files;
  const Variable hub("HF_HUB_CACHE", "/hub");
  files.put("/hub/models--o--n/refs/main", "r");
  for (const char* name : {"/hub/models--o--n/snapshots/r/", "/m/"}) {
    files.put(std::string(name) + "a.safetensors", kSmall);
    files.put(std::string(name) + "b.safetensors", kSmall);
  }
  EXPECT_EQ(failure(files, "o/n")->facts().expected,
            "a file, such as /hub/models--o--n/snapshots/r/a.safetensors");
  EXPECT_EQ(failure(files, "/m")->facts().expected, "");
  files.put("/m/.headers-only", "o/n@r\n");
  EXPECT_EQ(failure(files, "/m")->facts().expected,
            "a file in the directory that `hf download o/n` prints");
}

TEST(Open, EnvironmentVariablesLocateTheCache) {
  MemoryFileSystem files;
  for (const char* hub :
       {"/home/.cache/huggingface/hub", "/xdg/huggingface/hub", "/hf/hub", "/old", "/cache"}) {
    files.put(std::string(hub) + "/models--o--n/refs/main", "r");
    files.put(std::string(hub) + "/models--o--n/snapshots/r/model.safetensors", kSmall);
  }
  const std::string snapshot = "/models--o--n/snapshots/r";
  const Variable home("HOME", "/home");
  const Variable no_hub("HF_HUB_CACHE", nullptr);
  const Variable no_old_hub("HUGGINGFACE_HUB_CACHE", nullptr);
  const Variable no_hf("HF_HOME", nullptr);
  const Variable no_xdg("XDG_CACHE_HOME", nullptr);
  EXPECT_EQ(open_checkpoint(files, "o/n").directory, "/home/.cache/huggingface/hub" + snapshot);
  const Variable xdg("XDG_CACHE_HOME", "/xdg");
  EXPECT_EQ(open_checkpoint(files, "o/n").directory, "/xdg/huggingface/hub" + snapshot);
  {
    const Variable in_home("HF_HOME", "~/.cache/huggingface");
    EXPECT_EQ(open_checkpoint(files, "o/n").directory, "/home/.cache/huggingface/hub" + snapshot);
  }
  {
    const Variable base("BASE", "/h");
    const Variable no_home("HOME", nullptr);
    const passwd& user = *getpwuid(getuid());
    const std::string in_home = std::string(user.pw_dir) + "/models";
    const std::map<std::string, std::string> homes = {
        {"${BASE}f", "/hf"},
        {"/a/$BASE/$NO_SUCH", "/a//h/$NO_SUCH"},
        {"~/models", in_home},
        {std::string("~") + user.pw_name + "/models", in_home}};
    for (const auto& [value, path] : homes) {
      const Variable with("HF_HOME", value.c_str());
      files.put(path + "/hub/models--o--n/refs/main", "r");
      files.put(path + "/hub/models--o--n/snapshots/r/model.safetensors", kSmall);
      EXPECT_EQ(open_checkpoint(files, "o/n").directory, path + "/hub" + snapshot) << value;
    }
  }
  const Variable hf("HF_HOME", "/hf");
  EXPECT_EQ(open_checkpoint(files, "o/n").directory, "/hf/hub" + snapshot);
  const Variable old_hub("HUGGINGFACE_HUB_CACHE", "/old");
  EXPECT_EQ(open_checkpoint(files, "o/n").directory, "/old" + snapshot);
  const Variable hub("HF_HUB_CACHE", "/cache");
  EXPECT_EQ(open_checkpoint(files, "o/n").directory, "/cache" + snapshot);
}

// Catches: holes that are loaded as values.
TEST(Open, ADirectoryOfHeadersIsOnlyReadByThoseWhoReadNoValues) {
  MemoryFileSystem files;
  files.put("/m/model.safetensors", kSmall);
  files.put("/m/.headers-only", "org/tiny-1.0@abc123\n");
  for (const char* path : {"/m", "/m/model.safetensors"}) {
    const auto error = failure(files, path);
    ASSERT_TRUE(error) << path;
    EXPECT_EQ(error->category(), Category::unsupported);
    EXPECT_EQ(error->what_happened(),
              "the directory has only the headers of org/tiny-1.0, no values");
    const Checkpoint checkpoint = open_checkpoint(files, path, Record::compared, Content::headers);
    EXPECT_EQ(checkpoint.hub->name, "org/tiny-1.0");
    EXPECT_EQ(checkpoint.hub->revision, "abc123");
  }
  for (const char* line : {"", "org/tiny", "org@abc", "../x@abc", "org/tiny@../x", "org/tiny@"}) {
    files.put("/m/.headers-only", line);
    const auto error = failure(files, "/m");
    ASSERT_TRUE(error) << line;
    EXPECT_EQ(error->category(), Category::format_schema) << line;
  }
}

// Catches: a request to the hub for a path of another form, or for a file.
TEST(Open, OnlyAFreeNameOfTwoPartsIsAnUncachedName) {
  MemoryFileSystem files;
  const Variable hub("HF_HUB_CACHE", "/hub");
  files.put("org/local/model.safetensors", kSmall);
  for (const char* path : {"org/local", "name", "a/b/c", "/m/x", "./x", "../x", "org/", "/x",
                           "org/x.safetensors/", "org/na me", "org/..", "--json", ""}) {
    EXPECT_FALSE(is_uncached_name(files, path)) << path;
  }
  EXPECT_TRUE(is_uncached_name(files, "Qwen/Qwen3-0.6B"));
}

TEST(Open, ConfigAndMetadataAreRead) {
  MemoryFileSystem files;
  files.put("/m/model.safetensors", file_bytes(R"({"__metadata__":{"format":"pt"}})", 0));
  EXPECT_EQ(open_checkpoint(files, "/m").config.model_type, "");
  files.put("/m/config.json",
            R"({"model_type":"qwen3","architectures":["Qwen3ForCausalLM"],"x":[1.5,{}],)"
            R"("tie_word_embeddings":true})");
  const Checkpoint checkpoint = open_checkpoint(files, "/m/model.safetensors");
  EXPECT_EQ(checkpoint.config.model_type, "qwen3");
  EXPECT_EQ(checkpoint.config.architectures, std::vector<std::string>{"Qwen3ForCausalLM"});
  EXPECT_TRUE(checkpoint.config.tie_word_embeddings);
  EXPECT_EQ(checkpoint.metadata.at("format"), "pt");
  EXPECT_TRUE(checkpoint.warnings.empty());
}

TEST(Open, EmbeddingsAreTiedOnlyIfTheConfigTiesThem) {
  MemoryFileSystem files;
  files.put("/m/model.safetensors", kSmall);
  auto is_tied = [&](const char* config) {
    files.put("/m/config.json", config);
    return open_checkpoint(files, "/m").config.tie_word_embeddings;
  };
  EXPECT_TRUE(is_tied(R"({"text_config":{"model_type":"x","tie_word_embeddings":true}})"));
  EXPECT_FALSE(is_tied(R"({"text_config":{"tie_word_embeddings":false}})"));
  EXPECT_FALSE(is_tied(R"({"vision_config":{"tie_word_embeddings":true}})"));
  EXPECT_FALSE(is_tied(R"({"tie_word_embeddings":"true","text_config":null})"));
  EXPECT_FALSE(is_tied("{}"));
}

// Catches: an unreadable config that is treated as a missing one.
TEST(Open, AnInvalidConfigIsAWarningAndAFault) {
  using Fault = std::pair<const char*, Category>;
  MemoryFileSystem files;
  files.put("/m/model.safetensors", kSmall);
  for (const auto& [config, category] :
       {Fault{"", Category::format_json}, Fault{"{", Category::format_json},
        Fault{"{} 1", Category::format_json}, Fault{"[]", Category::format_schema},
        Fault{"{\"a\":\"\xff\"}", Category::format_utf8},
        Fault{"{\"model_type\":\"a\",\"model_type\":\"b\"}", Category::format_dup}}) {
    files.put("/m/config.json", config);
    const Checkpoint checkpoint = open_checkpoint(files, "/m");
    ASSERT_EQ(checkpoint.warnings.size(), 1U) << config;
    EXPECT_TRUE(checkpoint.warnings[0].starts_with("config.json: ")) << checkpoint.warnings[0];
    EXPECT_EQ(checkpoint.config.model_type, "");
    ASSERT_TRUE(checkpoint.config.tie_fault && checkpoint.config.block_size_fault) << config;
    EXPECT_EQ(checkpoint.config.tie_fault->category(), category) << config;
    EXPECT_EQ(checkpoint.config.tie_fault->facts().file, "config.json");
  }
  files.put("/m/config.json", std::string(16 * kMiB + 1, ' '));
  EXPECT_EQ(open_checkpoint(files, "/m").config.tie_fault->category(), Category::format_limit);
}

// config.json is a directory here. A FIFO or a dangling link fails in the same way, by IO.
TEST(Open, AConfigThatIsNotAFileIsAWarning) {
  MemoryFileSystem files;
  files.put("/m/model.safetensors", kSmall);
  files.make_directory("/m/config.json");
  const Checkpoint checkpoint = open_checkpoint(files, "/m");
  EXPECT_EQ(checkpoint.warnings.size(), 1U);
  EXPECT_EQ(checkpoint.config.block_size_fault->category(), Category::io);
}

TEST(Open, AValueOfTheWrongTypeAffectsOnlyItsKey) {
  MemoryFileSystem files;
  files.put("/m/model.safetensors", kSmall);
  const auto config_of = [&](const std::string& config) {
    files.put("/m/config.json", config);
    return open_checkpoint(files, "/m");
  };
  for (const char* value : {"\"true\"", "1", "[]", "{}"}) {
    for (const char* around :
         {R"({"tie_word_embeddings":)", R"({"text_config":{"tie_word_embeddings":)"}) {
      const bool is_nested = std::string(around).starts_with("{\"text");
      const Checkpoint checkpoint =
          config_of(around + std::string(value) + (is_nested ? "}}" : "}"));
      ASSERT_TRUE(checkpoint.config.tie_fault.has_value()) << value;
      EXPECT_EQ(checkpoint.config.tie_fault->category(), Category::format_schema);
      EXPECT_FALSE(checkpoint.config.block_size_fault.has_value());
      EXPECT_EQ(checkpoint.warnings.size(), 1U);
    }
  }
  const Checkpoint shown = config_of(R"({"model_type":7,"architectures":["A",1]})");
  EXPECT_FALSE(shown.config.tie_fault || shown.config.block_size_fault);
  EXPECT_EQ(shown.warnings.size(), 2U);
  EXPECT_TRUE(config_of(R"({"tie_word_embeddings":null,"text_config":null})").warnings.empty());
}

// Every JSON value at every key that is read, and at an unknown key, gives at most warnings.
TEST(Open, AnyJsonAtAnyKeyOfAConfigIsRead) {
  MemoryFileSystem files;
  files.put("/m/model.safetensors", kSmall);
  const std::vector<std::pair<std::string, std::string>> around = {
      {"", ""},
      {R"({"text_config":)", "}"},
      {R"({"quantization_config":)", "}"},
      {R"({"text_config":{"quantization_config":)", "}}"}};
  for (const auto& [begin, end] : around) {
    for (const char* value : kJsonValues) {
      files.put("/m/config.json", begin + value + end);
      EXPECT_NO_THROW(open_checkpoint(files, "/m")) << begin << value;
      for (const char* key : {"model_type", "architectures", "tie_word_embeddings", "text_config",
                              "quantization_config", "weight_block_size", "other"}) {
        files.put("/m/config.json", begin + "{\"" + std::string(key) + "\": " + value + "}" + end);
        EXPECT_NO_THROW(open_checkpoint(files, "/m")) << begin << key << value;
      }
    }
  }
}

TEST(Open, UnreadWeightsInTheDirectoryAreWarnings) {
  const auto warnings = [](const std::vector<std::string>& names) {
    MemoryFileSystem files;
    for (const std::string& name : names) files.put("/m/" + name, kSmall);
    return open_checkpoint(files, "/m").warnings;
  };
  EXPECT_TRUE(warnings({"model.safetensors", "training_args.bin", "tokenizer.json"}).empty());
  for (const char* extra : {"old.safetensors", "pytorch_model.bin", "adapter_config.json"}) {
    const std::vector<std::string> said = warnings({"model.safetensors", extra});
    ASSERT_EQ(said.size(), 1U) << extra;
    EXPECT_NE(said[0].find(extra), std::string::npos) << said[0];
  }
  const auto adapter = warnings({"adapter_model.safetensors", "adapter_config.json"});
  ASSERT_EQ(adapter.size(), 1U);
  EXPECT_NE(adapter[0].find("adapter's"), std::string::npos) << adapter[0];
  MemoryFileSystem files;
  files.put("/m/one.safetensors", kSmall);
  files.put("/m/two.safetensors", kSmall);
  files.put("/m/model.safetensors.index.json", index_with({{"a", "one.safetensors"}}, 2));
  const std::vector<std::string> left_over = open_checkpoint(files, "/m").warnings;
  ASSERT_EQ(left_over.size(), 1U);
  EXPECT_NE(left_over[0].find("two.safetensors"), std::string::npos);
}

// Catches: an index or config that is overwritten while it is read.
TEST(Open, AFileThatChangesWhileItIsReadIsAConflict) {
  MemoryFileSystem files;
  const std::string index = index_with({{"a", "one.safetensors"}}, 2);
  files.put("/m/one.safetensors", kSmall);
  files.put("/m/model.safetensors.index.json", index);
  files.put("/m/config.json", "{}");
  int conflicts = 0;
  for (int64_t n = 1;; ++n) {
    RecordingFileSystem changing(files);
    changing.before_call(n, [&] {
      files.put("/m/model.safetensors.index.json", index);
      files.put("/m/config.json", "{}");
    });
    std::optional<Error> error;
    std::optional<Checkpoint> opened;
    try {
      opened = open_checkpoint(changing, "/m");
    } catch (const Error& caught) {
      error = caught;
    }
    const std::vector<IoCall> calls = changing.calls();
    if (static_cast<int64_t>(calls.size()) < n) break;
    const IoCall& call = calls[static_cast<size_t>(n) - 1];
    if (call.what != "read" || call.file == "one.safetensors") continue;
    ++conflicts;
    if (call.file == "config.json") {
      ASSERT_TRUE(opened && opened->config.tie_fault);
      EXPECT_EQ(opened->config.tie_fault->category(), Category::conflict);
    } else {
      ASSERT_TRUE(error.has_value());
      EXPECT_EQ(error->category(), Category::conflict);
      EXPECT_EQ(error->facts().file, call.file);
    }
  }
  EXPECT_EQ(conflicts, 2);  // one read of the index, one of config.json
}

TEST(Open, CopiesHaveEqualIdentitiesAndChangedFilesDoNot) {
  MemoryFileSystem files;
  auto identity = [&](const std::string& path, const std::string& bytes) {
    files.put(path, bytes);
    return open_checkpoint(files, path).manifest.identity;
  };
  const Digest original = identity("/a/model.safetensors", kSmall);
  EXPECT_EQ(identity("/b/model.safetensors", kSmall), original);
  EXPECT_NE(identity("/b/other.safetensors", kSmall), original);
  EXPECT_NE(identity("/b/model.safetensors", file_with({{"b", 2}})), original);
  EXPECT_NE(identity("/b/model.safetensors", file_with({{"a", 3}})), original);
  EXPECT_NE(identity("/b/model.safetensors",
                     file_bytes(R"({"a":{"dtype":"I8","shape":[2],"data_offsets":[0,2]}})", 2)),
            original);
  EXPECT_NE(identity("/b/model.safetensors",
                     file_bytes(R"({"a":{"dtype":"U8","shape":[1,2],"data_offsets":[0,2]}})", 2)),
            original);
}

TEST(Open, ADataFileThatHasChangedIsAConflict) {
  MemoryFileSystem files;
  files.put("/m/model.safetensors", kSmall);
  const Checkpoint checkpoint = open_checkpoint(files, "/m");
  EXPECT_EQ(open_data_file(checkpoint, 0)->name(), "model.safetensors");
  files.put("/m/model.safetensors", kSmall);
  try {
    open_data_file(checkpoint, 0);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), Category::conflict);
    EXPECT_EQ(error.facts().file, "model.safetensors");
  }
}

TEST(Open, EachFailingCallIsReported) {
  MemoryFileSystem files;
  files.put("/m/one.safetensors", kSmall);
  files.put("/m/model.safetensors.index.json", index_with({{"a", "one.safetensors"}}, 2));
  files.put("/m/config.json", "{}");
  RecordingFileSystem counting(files);
  open_checkpoint(counting, "/m");
  const auto calls = static_cast<int64_t>(counting.calls().size());
  for (int64_t n = 1; n <= calls; ++n) {
    RecordingFileSystem failing(files, n);
    const auto error = failure(failing, "/m");
    const IoCall call = counting.calls()[static_cast<size_t>(n - 1)];
    // Closing happens in a destructor, which can't report an error.
    if (call.what == "close") continue;
    if (call.file == "config.json") {  // optional
      RecordingFileSystem again(files, n);
      EXPECT_EQ(open_checkpoint(again, "/m").config.tie_fault->category(), Category::io);
      continue;
    }
    ASSERT_TRUE(error) << counting.calls()[static_cast<size_t>(n - 1)].what;
    EXPECT_EQ(error->category(), Category::io) << error->what();
  }
}

}  // namespace
}  // namespace modicum
