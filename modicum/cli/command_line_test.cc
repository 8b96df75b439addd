// What scripts rely on: flags, exit codes, error objects and refusals. A flag that would do nothing
// is refused, and a plan that does not fit names alternatives that do.
//
// Catches: an empty value counts as an absent flag; a regular expression that matches no tensor is
// accepted; a number is parsed as octal; a plan that does not fit ends with exit code 0; a
// suggested alternative does not fit; more ranks than the machine can start are accepted; an error
// lacks its file; an existing output is overwritten; a table is wider than a terminal; synth shows
// no progress.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <regex>
#include <set>
#include <string>
#include <vector>

#include "modicum/cli/program_double.h"
#include "modicum/io/file_doubles.h"
#include "modicum/json/json.h"
#include "modicum/probe/probe.h"

namespace modicum {
namespace {

const std::vector<std::string> kVerbs = {"inspect", "synth",  "plan",   "load",    "rehearse",
                                         "save",    "resume", "verify", "convert", "diff",
                                         "step",    "doctor", "watch"};
const std::vector<std::string> kStrategies = {"own-shard", "node-reader", "replica-striped",
                                              "rank0-broadcast", "full-per-rank"};

// The flags of a verb that take a value, from its help.
std::vector<std::string> flags_with_values(const std::string& help) {
  static const std::regex kFlag(R"(^  (?:-\w,)?(--[\w-]+) \S)");
  std::vector<std::string> flags;
  for (const std::string& line : lines_of(help)) {
    std::smatch found;
    if (std::regex_search(line, found, kFlag)) flags.push_back(found[1]);
  }
  return flags;
}

class CommandLine : public testing::Test {
 protected:
  CommandLine() {
    program.succeed("synth /moe --arch tiny-moe");
    files.put("/dense/model.safetensors",
              checkpoint_file({{"wte.weight", "BF16", {64, 16}},
                               {"h.0.attn.c_attn.weight", "BF16", {16, 48}},
                               {"h.0.attn.c_proj.weight", "BF16", {16, 16}},
                               {"ln_f.weight", "BF16", {16}}}));
  }

  MemoryFileSystem files;
  const ThreadedProgram program{files};
};

// ---- help and usage

TEST_F(CommandLine, HelpListsTheVerbs) {
  const RunResult ended = program.run("--help");
  EXPECT_EQ(ended.code, 0);
  std::set<std::string> first_words;
  for (const std::string& line : lines_of(ended.out)) {
    first_words.insert(line.substr(0, line.find(' ')));
  }
  for (const std::string& verb : kVerbs) EXPECT_TRUE(first_words.contains(verb)) << verb;
  EXPECT_TRUE(program.run("--version").out.starts_with("modicum "));
}

TEST_F(CommandLine, EachVerbHasItsFlags) {
  const std::vector<std::string> kRunFlags = {
      "--ranks",       "--ranks-per-node", "--strategy",  "--layout",        "--shard-dim",
      "--dtype",       "--keep-fp32",      "--recipe",    "--destination",   "--staging",
      "--baseline",    "--untie",          "--optimizer", "--oversubscribe", "--mesh",
      "--round-robin", "--tp-rowwise",     "--tp-packed", "--tp-replicate",  "--expert-mesh",
      "--experts",     "--budget",         "--threads",   "--frozen"};
  const std::vector<std::pair<std::string, std::vector<std::string>>> flags_of = {
      {"plan",
       {"--deepspeed", "--workers", "--persistent-workers", "--protect", "--compare", "--device"}},
      {"plan", kRunFlags},
      {"load", kRunFlags},
      {"rehearse", kRunFlags},
      {"save", kRunFlags},
      {"resume", kRunFlags},
      {"rehearse", {"--steps", "--seed", "--clip", "--save", "--resume-ranks"}},
      {"save", {"--step", "--steps", "--seed", "--shard-size", "--keep", "--grace", "--unused"}},
      {"resume", {"--steps"}},
      {"convert", {"--dtype", "--recipe", "--shard-size", "--sparse"}},
      {"doctor", {"--pid", "--interval"}},
      {"watch", {"--report", "--trace", "--limit", "--compare"}},
      {"load", {"--check", "--digest", "--expect-digest", "--dump"}},
      {"synth", {"--arch", "--layers", "--shard-size", "--dtype", "--sparse", "--edges"}},
      {"step",
       {"--params", "--state-format", "--ranks", "--steps", "--seed", "--clip", "--isa",
        "--loss-scale", "--grad-dtype", "--fork-children", "--no-compare"}}};
  for (const auto& [verb, flags] : flags_of) {
    const std::string help = program.run(verb + " --help-all").out;
    for (const std::string& flag : flags) EXPECT_TRUE(has(help, flag)) << verb << " " << flag;
  }
}

TEST_F(CommandLine, UnknownWordsNameTheNearest) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"lod /moe", "load"},
      {"plan /moe --rank 2", "--ranks"},
      {"load /moe --digset", "--digest"},
      {"load /moe --strategy own-shards", "own-shard"},
      {"plan /moe --layout fsdp", "fsdp2"},
      {"plan /moe --staging 4MiBs", "MiB"},
      {"load /moe --dtype b16", "bfloat16"},
      {"synth /out --arch qwen3-0.6", "qwen3-0.6b"}};
  for (const auto& [line, nearest] : cases) {
    const RunResult ended = program.run(line);
    EXPECT_EQ(ended.code, 2) << line;
    EXPECT_EQ(ended.out, "") << line;
    EXPECT_TRUE(has(ended.err, nearest)) << ended.err;
    EXPECT_EQ(program.refuse(2, line)["category"].text(), "USAGE");
  }
  EXPECT_EQ(program.run("").code, 2);
}

TEST_F(CommandLine, EmptyValuesAreRefused) {
  for (const char* verb : {"inspect", "synth", "plan", "load", "rehearse", "save", "resume",
                           "verify", "convert", "step", "doctor"}) {
    const std::vector<std::string> flags =
        flags_with_values(program.run(std::string(verb) + " --help-all").out);
    EXPECT_GE(flags.size(), 1U) << verb;
    const bool has_directory = std::string(verb) != "step" && std::string(verb) != "doctor";
    std::vector<std::string> words = {verb};
    if (has_directory) words.emplace_back("/moe");
    for (const std::string& flag : flags) {
      for (const std::vector<std::string>& empty :
           std::vector<std::vector<std::string>>{{flag, ""}, {flag + "="}}) {
        std::vector<std::string> all = words;
        all.insert(all.end(), empty.begin(), empty.end());
        const RunResult ended = program.run(all);
        EXPECT_EQ(ended.code, 2) << verb << " " << flag;
        EXPECT_TRUE(has(ended.err, "USAGE") && has(ended.err, flag)) << ended.err;
      }
    }
    if (!has_directory) continue;
    EXPECT_EQ(program.run(std::vector<std::string>{verb, ""}).code, 2) << verb;
  }
}

TEST_F(CommandLine, FlagsThatWouldDoNothingAreRefused) {
  const std::string tp = "--layout tp-fsdp --mesh 1x2 --ranks 2";
  const std::vector<std::string> cases = {tp + " --tp-rowwise nomatch",
                                          tp + " --tp-packed nomatch",
                                          tp + " --tp-replicate nomatch",
                                          tp + " --tp-rowwise attn --tp-replicate nomatch",
                                          "--keep-fp32 nomatch",
                                          "--keep-fp32 nomatch --dtype bfloat16",
                                          "--ranks 2 --expert-mesh 1x2",
                                          "--ranks 2 --expert-mesh 1x2 --experts nomatch",
                                          "--experts attn",
                                          "--layout none --shard-dim 1",
                                          "--layout zero1 --shard-dim 1",
                                          "--layout zero3 --shard-dim 1",
                                          "--layout fsdp2 --mesh 1x1",
                                          "--layout fsdp2 --tp-rowwise attn",
                                          "--layout fsdp2 --round-robin",
                                          "--optimizer adamw:fp32 --frozen nomatch",
                                          "--frozen attn",
                                          "--layout zero3 --round-robin",
                                          "--layout zero1 --expert-mesh 1x1"};
  static const std::regex kFlag(R"(--[\w-]+)");
  for (const std::string& flags : cases) {
    for (const char* verb : {"plan", "load"}) {
      const std::string message =
          program.refuse(2, fmt::format("{} /dense {}", verb, flags))["message"].text();
      bool is_named = false;
      for (std::sregex_iterator flag(flags.begin(), flags.end(), kFlag), end; flag != end; ++flag) {
        is_named |= has(message, flag->str());
      }
      EXPECT_TRUE(is_named) << message;
      EXPECT_EQ(has(message, "nomatch"), has(flags, "nomatch")) << message;
    }
  }
  for (const char* flag : {"--workers 2", "--persistent-workers", "--protect"}) {
    const std::string message =
        program.refuse(2, fmt::format("plan /dense {}", flag))["message"].text();
    EXPECT_TRUE(has(message, std::string(flag).substr(0, std::string(flag).find(' ')))) << message;
  }
}

TEST_F(CommandLine, RegularExpressionsThatMatchAreAccepted) {
  program.succeed(
      "plan /dense --layout tp-fsdp --mesh 1x2 --ranks 2 --tp-rowwise c_proj --keep-fp32 ln_f");
  program.succeed("plan /moe --ranks 2 --expert-mesh 1x2");
}

TEST_F(CommandLine, NumbersAreDecimal) {
  EXPECT_EQ(program.succeed("plan /moe --ranks 010")["ranks"].number(), 10);
  for (const char* flag : {"--ranks", "--ranks-per-node", "--threads", "--shard-dim"}) {
    for (const char* value : {"0x10", "1e1", "2.0", "two", "1_0"}) {
      const Document error = program.refuse(2, fmt::format("plan /moe {} {}", flag, value));
      EXPECT_TRUE(has(error["message"].text(), flag)) << error["message"].text();
    }
  }
  for (const char* words : {"--clip 0x10", "--seed 0x10", "--seed -1", "--params 0x10",
                            "--loss-scale=12abc", "--loss-scale=0x10", "--loss-scale=nan",
                            "--loss-scale=-1", "--loss-scale=1e40", "--loss-scale=1e-42"}) {
    program.refuse(2, fmt::format("step {}", words));
  }
  for (const char* flags : {"--step 9223372036854775808", "--step 99999999999999999999",
                            "--step -1", "--step 1 --keep 99999999999999999999"}) {
    program.refuse(2, fmt::format("save /moe /root {}", flags));
  }
  program.succeed("save /moe /root --step 9223372036854775807");
}

TEST_F(CommandLine, AFileOfTensorsHasABytesLimitAboveZero) {
  for (const char* words : {"save /moe /root --step 1", "convert /moe /out", "synth /new --arch x"})
    program.refuse(2, fmt::format("{} --shard-size 0", words));
}

TEST_F(CommandLine, SizesAreParsed) {
  const std::vector<std::pair<std::string, int64_t>> sizes = {{"1000", 1000},
                                                              {"7B", 7},
                                                              {"2KB", 2000},
                                                              {"1.5MB", 1'500'000},
                                                              {"3GB", 3'000'000'000},
                                                              {"1TB", 1'000'000'000'000},
                                                              {"2KiB", 2048},
                                                              {"0.5MiB", 1 << 19},
                                                              {"1.5GiB", int64_t{3} << 29},
                                                              {"1TiB", int64_t{1} << 40},
                                                              {"16G", int64_t{16} << 30},
                                                              {"1 GiB", 1 << 30},
                                                              {"16gb", 16'000'000'000},
                                                              {"2k", 2048},
                                                              {"010", 10},
                                                              {"1.5g", int64_t{3} << 29},
                                                              {"3m", 3 << 20},
                                                              {"1T", int64_t{1} << 40},
                                                              {"5 mib", 5 << 20}};
  for (const auto& [written, meant] : sizes) {
    const Document plan =
        program.run(std::vector<std::string>{"plan", "/moe", "--budget", written, "--json"}).json();
    EXPECT_EQ(plan["budget"]["bytes"].bytes(), meant) << written;
    EXPECT_EQ(plan["budget"]["source"].text(), "flag");
  }
  for (const char* wrong : {"-1", "GiB", "1 XB", "", " ", "1 ", "1e3", "99999999TiB", "0x10"}) {
    const std::string budget = fmt::format("--budget={}", wrong);
    EXPECT_EQ(program.run(std::vector<std::string>{"plan", "/moe", budget}).code, 2) << wrong;
  }
}

TEST_F(CommandLine, ShortNamesOfDtypesMeanTorchsNames) {
  for (const auto& [name, torchs] : std::vector<std::pair<std::string, std::string>>{
           {"fp32", "float32"}, {"bf16", "bfloat16"}, {"fp16", "float16"}}) {
    EXPECT_EQ(program.run("plan /moe --json --dtype " + name).out,
              program.run("plan /moe --json --dtype " + torchs).out);
  }
}

TEST_F(CommandLine, AnInvalidOptimizerIsRefused) {
  EXPECT_TRUE(has(program.refuse(2, "rehearse /moe")["message"].text(), "adamw"));
  const Document error = program.refuse(2, "plan /moe --optimizer adamw:fp32-spilt");
  EXPECT_TRUE(has(error["message"].text(), "fp32-split"));
  program.refuse(2, "rehearse /moe --optimizer adamw:fp32 --resume-ranks 1");
  program.refuse(2, "rehearse /moe --save absent");
  const std::string words = "load /moe --optimizer adamw:fp32 --destination discard";
  EXPECT_EQ(program.refuse(2, words)["category"].text(), "UNSUPPORTED");
}

TEST_F(CommandLine, TooManyRanksForTheMachineAreRefused) {
  const int most = 16 * granted_cpus();
  for (const char* words : {"load /moe", "save /moe root --step 1",
                            "rehearse /moe --optimizer adamw:fp32", "step --params 10K"}) {
    const Document error = program.refuse(2, fmt::format("{} --ranks {}", words, most + 1));
    EXPECT_EQ(error["category"].text(), "USAGE");
    EXPECT_TRUE(has(error["message"].text(), "--oversubscribe"));
  }
  EXPECT_EQ(program.succeed(fmt::format("plan /moe --ranks {}", most + 1))["ranks"].number(),
            most + 1);
}

TEST_F(CommandLine, OnlyTheExpectedDigestPasses) {
  const std::string digest = program.succeed("load /moe --digest")["digest"].text();
  EXPECT_EQ(program.succeed("load /moe --expect-digest " + digest)["digest"].text(), digest);
  std::string upper = digest;
  std::transform(upper.begin(), upper.end(), upper.begin(), ::toupper);
  program.succeed("load /moe --expect-digest " + upper);
  std::string other = digest;
  other[0] = other[0] == '0' ? '1' : '0';
  const Document error = program.refuse(12, "load /moe --ranks 2 --expect-digest " + other);
  EXPECT_EQ(error["category"].text(), "INTEGRITY");
  EXPECT_EQ(error["expected"].text(), other);
  EXPECT_EQ(error["got"].text(), digest);
  program.refuse(2, "load /moe --expect-digest " + digest.substr(1));
  program.refuse(2, "load /moe --expect-digest xxxxxxxxxxxxxxxx");
}

TEST_F(CommandLine, WarningsOfBothSidesOfADiffAreShown) {
  program.succeed("synth /parts --arch tiny-moe --shard-size 1500");
  const std::string index = "/parts/model.safetensors.index.json";
  std::string text = files.get(index);
  const size_t at = text.find("\"total_size\":") + 13;
  files.put(index, text.insert(at, "1"));
  const Document found = program.succeed("diff /moe /parts");
  ASSERT_EQ(found["warnings"].elements().size(), 1U);
  EXPECT_TRUE(found["warnings"][0].text().starts_with("B: ")) << found["warnings"][0].text();
}

// ---- invalid input

TEST_F(CommandLine, EachFaultOfAHeaderHasItsCategory) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"[]", "FORMAT.HEADER"},
      {R"({"x":)", "FORMAT.JSON"},
      {R"({"x":1})", "FORMAT.SCHEMA"},
      {R"({"x":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}})", "FORMAT.DTYPE"},
      {R"({"x":{"dtype":"F32","shape":[3],"data_offsets":[0,4]}})", "FORMAT.SIZE"},
      {R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", "FORMAT.OFFSETS"}};
  for (const auto& [header, category] : cases) {
    std::string size(8, '\0');
    size[0] = static_cast<char>(header.size());
    files.put("/broken/model.safetensors", size + header + std::string(4, '\0'));
    const Document error = program.refuse(10, "plan /broken");
    EXPECT_EQ(error["category"].text(), category);
    EXPECT_EQ(error["file"].text(), "model.safetensors");
  }
  for (const char last : {'\0', '\x80', '\xff'}) {  // a header that is longer than its file
    const std::string size = std::string(2, '\xff') + std::string(5, '\0') + last;
    files.put("/broken/model.safetensors", size + "{}");
    EXPECT_TRUE(program.refuse(10, "plan /broken")["category"].text().starts_with("FORMAT."));
  }
}

TEST_F(CommandLine, FaultsOfAnIndexHaveTheirCategories) {
  program.succeed("synth /shards --arch tiny-moe --shard-size 800");
  const std::string index = "/shards/model.safetensors.index.json";
  const std::string text = files.get(index);
  files.put(index, R"({"weight_map": )");
  EXPECT_EQ(program.refuse(11, "plan /shards")["category"].text(), "INDEX.JSON");
  const size_t first = text.find('{', text.find("weight_map"));
  const size_t file = text.find("model-00001");
  const std::string shard = text.substr(file, text.find('"', file) - file);
  files.put(index, text.substr(0, first + 1) + R"("not.there": ")" + shard + R"(",)" +
                       text.substr(first + 1));
  EXPECT_EQ(program.refuse(11, "plan /shards")["category"].text(), "INDEX.MISSING_TENSOR");
  files.put(index, text);
  program.succeed("plan /shards");
  files.remove("/shards/" + shard);
  const Document error = program.refuse(11, "load /shards");
  EXPECT_EQ(error["category"].text(), "INDEX.MISSING_SHARD");
  EXPECT_EQ(error["file"].text(), shard);
}

TEST_F(CommandLine, InvalidRecipesAreRefused) {
  const Document listed = program.succeed("inspect /moe");
  const auto recipe = [&](const std::string& without, const std::string& more) {
    JsonWriter json;
    json.begin_object().key("targets").begin_object();
    for (const Document& tensor : listed["tensors"].elements()) {
      const std::string& name = tensor["name"].text();
      if (name == without) continue;
      json.key(name).begin_object().member("op", "stored").member("name", name).end_object();
    }
    json.end_object();
    std::string text = json.end_object().take();
    return more.empty() ? text : text.insert(text.size() - 2, "," + more);
  };
  files.put("/r.json", recipe("", ""));
  program.succeed("load /moe --recipe /r.json");
  const std::vector<std::pair<std::string, std::string>> cases = {
      {recipe("lm_head.weight", ""), "MISMATCH"},
      {recipe("", R"("new":{"op":"stored","name":"not.there"})"), "MISMATCH"},
      {recipe("", R"("new":{"op":"invert","in":[]})"), "UNSUPPORTED"},
      {recipe("lm_head.weight", R"("":{"op":"stored","name":"lm_head.weight"})"), "MISMATCH"}};
  for (const auto& [text, category] : cases) {
    files.put("/r.json", text);
    for (const char* verb : {"plan", "load"}) {
      const Document error = program.refuse(2, fmt::format("{} /moe --recipe /r.json", verb));
      EXPECT_EQ(error["category"].text(), category) << error["message"].text();
    }
  }
}

TEST_F(CommandLine, ExistingOutputsAreRefused) {
  const std::string before = files.get("/moe/model.safetensors");
  EXPECT_EQ(program.refuse(20, "synth /moe --arch gpt2")["category"].text(), "CONFLICT");
  EXPECT_EQ(files.get("/moe/model.safetensors"), before);
  files.make_directory("/taken");
  EXPECT_EQ(program.refuse(20, "load /moe --dump /taken")["category"].text(), "CONFLICT");
  EXPECT_TRUE(files.list("/taken").empty());
}

TEST_F(CommandLine, WhatCannotBeFoundIsNamed) {
  files.put("/config/config.json", R"({"model_type": "gemma3"})");
  const Document error = program.refuse(13, "load /config");
  EXPECT_TRUE(has(error["expected"].text(), "`modicum plan` needs config.json alone"));
  EXPECT_TRUE(has(error["expected"].text(), "modicum synth"));
  const Document unknown = program.refuse(2, "plan /config");
  EXPECT_EQ(unknown["category"].text(), "UNSUPPORTED");
  EXPECT_EQ(unknown["file"].text(), "config.json");
  EXPECT_TRUE(has(unknown["expected"].text(), "qwen3_moe"));
  const Document absent = program.refuse(13, "plan organisation/no-such-model");
  EXPECT_TRUE(has(absent["expected"].text(), "ORG/NAME that hf download has put into "));
  EXPECT_TRUE(has(absent["expected"].text(), "`uvx modicum plan`"));
  EXPECT_EQ(absent["got"].text(), "organisation/no-such-model");
}

TEST_F(CommandLine, AutoInADsConfigNamesWhatResolvesIt) {
  files.put("/ds_config.json", R"({"train_batch_size": "auto", "bf16": {"enabled": "auto"}})");
  const Document error = program.refuse(2, "plan /dense --deepspeed /ds_config.json");
  EXPECT_TRUE(has(error["message"].text(), "'gradient_accumulation_steps'"));
  EXPECT_TRUE(error["got"].text().starts_with(
      R"(bf16.enabled: "auto", gradient_accumulation_steps: none)"));
  EXPECT_TRUE(has(error["expected"].text(), "modicum.torch.deepspeed.config_of(arguments)"));
}

// ---- output

TEST_F(CommandLine, TablesFitATerminal) {
  for (const char* line :
       {"plan /moe --ranks 64 --ranks-per-node 8 --optimizer adamw:int8-moments-24",
        "plan /moe --ranks 256 --baseline 1000GiB --staging 1000GiB",
        "plan /moe --baseline 1000MiB --staging 1000MiB", "plan /moe --ranks 8 --budget 5",
        "load /moe --ranks 2 --strategy replica-striped --check values --digest",
        "load /moe --optimizer adamw:int8-moments-24 --strategy rank0-broadcast"}) {
    const std::vector<std::string> lines = lines_of(program.run(line).out);
    EXPECT_GT(lines.size(), 5U) << line;
    for (const std::string& text : lines) EXPECT_LE(text.size(), 120U) << text;
  }
}

TEST_F(CommandLine, QuietPrintsNothing) {
  for (const char* words : {"plan /moe -q", "load /moe -q --progress none"}) {
    const RunResult ended = program.run(words);
    EXPECT_EQ(ended.code, 0);
    EXPECT_EQ(ended.out + ended.err, "");
  }
}

TEST_F(CommandLine, ProgressGoesToStderr) {
  const RunResult ended = program.run("load /moe --ranks 2 --json --check values --progress plain");
  EXPECT_EQ(ended.code, 0);
  EXPECT_EQ(ended.json()["coverage"].text(), "proven");
  static const std::regex kForm(
      R"([\d.]+ [KMGT]?i?B of [\d.]+ [KMGT]?i?B(, finishing|, [\d.]+ [KMGT]?i?B/s, \d+ s left)?)");
  for (const std::string& line : lines_of(ended.err)) {
    EXPECT_TRUE(std::regex_match(line, kForm)) << line;  // a rate only after the first bytes
    EXPECT_FALSE(has(line, " 0 B/s")) << line;
  }
}

TEST_F(CommandLine, SynthShowsItsProgress) {
  const std::string words = " --arch tiny-moe --threads 1";
  const RunResult ended = program.run("synth /m" + words + " --progress plain --shard-size 1500");
  EXPECT_EQ(ended.code, 0);
  static const std::regex kShown(R"(^(.*) of (.*), .*/s, \d+ s left\n)");
  std::smatch found;
  ASSERT_TRUE(std::regex_search(ended.err, found, kShown)) << ended.err;
  EXPECT_TRUE(has(ended.out, found[2].str() + " in ")) << ended.out;
  EXPECT_EQ(program.run("synth /n" + words).err, "");
}

}  // namespace
}  // namespace modicum
