// Neither ranks nor layout, threads, or a save and a resume by another world change a bit of model
// and optimizer state: 1 to 8 ranks, every state format, FSDP2, TP x FSDP, HSDP and ZeRO.
//
// The model has the difficult shapes: fewer rows than ranks (empty shards), rows that do not divide
// evenly (padding), vectors, a tensor of one element and one without elements, integers, a tied
// head; and parameters kept in fp32 next to those in bf16.
//
// A state is resumed in every other format, too.
//
// Catches: all runs of a shard are read to its beginning; step counters restart at 0; the state of
// a replica is written twice; replicas count twice in the gradient norm; the step does not write
// the parameters that training reads; resumed ranks continue with other values; 8-bit moments
// depend on ranks, threads or layout.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "modicum/cli/program_double.h"
#include "modicum/io/file_doubles.h"
#include "modicum/json/json.h"

namespace modicum {
namespace {

const std::vector<std::string> kFormats = {"fp32", "fp32-split", "bf16-moments", "int8-moments",
                                           "int8-moments-24"};
const std::vector<std::string> kLayouts = {"fsdp2", "tp-fsdp", "hsdp", "zero2"};
constexpr int kMostRanks = 8;
constexpr int kBefore = 3, kAfter = 3;  // optimizer steps before the save and after the resume
const std::string kSmall = " --staging 300KiB";

const std::vector<MadeTensor> kTensors = {
    {"embed.weight", "BF16", {37, 128}},
    {"layers.0.norm.weight", "BF16", {5}},
    {"layers.0.q_proj.weight", "BF16", {48, 128}},
    {"layers.0.o_proj.weight", "BF16", {16, 512}},  // cut along dim 1 at multiples of 128
    {"layers.0.up_proj.weight", "BF16", {3, 2048}},
    {"layers.1.norm.weight", "BF16", {131}},
    {"layers.1.q_proj.weight", "BF16", {7, 13}},
    {"layers.1.up_proj.weight", "BF16", {33, 256}},
    {"scale", "BF16", {1}},
    {"none", "BF16", {0, 4}},
    {"counts", "I64", {9}},  // without state
};

// A layout for a number of ranks.
struct Cut {
  std::string layout;
  int ranks = 1;

  std::string flags() const {
    static const std::map<std::string, std::vector<std::string>> kMeshes = {
        {"tp-fsdp", {"1x1", "1x2", "3x1", "2x2", "5x1", "3x2", "7x1", "4x2"}},
        {"hsdp", {"1x1", "2x1", "1x3", "2x2", "5x1", "2x3", "1x7", "2x4"}}};
    std::string text = fmt::format(" --ranks {} --layout {}{}", ranks, layout, kSmall);
    if (const auto meshes = kMeshes.find(layout); meshes != kMeshes.end()) {
      text += " --mesh " + meshes->second[static_cast<size_t>(ranks) - 1];
    }
    return text + (layout == "tp-fsdp" ? " --tp-rowwise o_proj" : "");
  }
  // Whether the format can be saved in this layout: ZeRO's flat groups divide blocks of 8-bit
  // moments between ranks.
  bool holds(const std::string& format) const {
    return layout != "zero2" || ranks == 1 || !format.starts_with("int8");
  }
};

std::string name_of(const testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

class ResumedWorlds : public testing::TestWithParam<std::string> {
 protected:
  ResumedWorlds() {
    files.put("/model/model.safetensors", checkpoint_file(kTensors));
    JsonWriter json;
    json.begin_object().key("targets").begin_object();
    for (const MadeTensor& tensor : kTensors) {
      json.key(tensor.name)
          .begin_object()
          .member("op", "stored")
          .member("name", tensor.name)
          .end_object();
    }
    json.key("head.weight").begin_object().member("op", "alias").member("of", "embed.weight");
    json.end_object().end_object();
    files.put("/recipe.json", json.end_object().take());
  }

  static std::string words(const std::string& format) {
    return fmt::format(
        R"(--recipe /recipe.json --seed 9 --optimizer adamw:{} --keep-fp32 layers\.1\.)", format);
  }

  MemoryFileSystem files;
  const ThreadedProgram program{files};
};

class ResumedWorldsByFormat : public ResumedWorlds {};
INSTANTIATE_TEST_SUITE_P(All, ResumedWorldsByFormat, testing::ValuesIn(kFormats), name_of);

// Each layout saves with each number of ranks, and another layout and number of ranks resume.
TEST_P(ResumedWorldsByFormat, EqualUninterruptedTraining) {
  const std::string& format = GetParam();
  const Document whole = program.succeed(
      fmt::format("rehearse /model {} --steps {}{}", words(format), kBefore + kAfter, kSmall));
  int resumed = 0;
  for (size_t layout = 0; layout < kLayouts.size(); ++layout) {
    for (int ranks = 1; ranks <= kMostRanks; ++ranks) {
      const Cut before{kLayouts[layout], ranks};
      const Cut after{kLayouts[(static_cast<size_t>(ranks) + layout) % kLayouts.size()],
                      kMostRanks + 1 - ranks};
      const std::string root = fmt::format("/{}-{}", before.layout, ranks);
      const std::string save = fmt::format("save /model {} {} --step {} --steps {}{}", root,
                                           words(format), kBefore, kBefore, before.flags());
      SCOPED_TRACE(save + " and" + after.flags());
      if (!before.holds(format)) {
        const Document error = program.refuse(2, save);
        EXPECT_EQ(error["category"].text(), "UNSUPPORTED");
        EXPECT_TRUE(error.has("tensor"));
        EXPECT_FALSE(files.exists(root));
        continue;
      }
      program.succeed(save);
      const std::string resume =
          fmt::format("resume {} --recipe /recipe.json --steps {}{}", root, kAfter, after.flags());
      if (!after.holds(format)) {
        EXPECT_EQ(program.refuse(2, resume)["category"].text(), "UNSUPPORTED");
      } else {
        ++resumed;
        const Document document = program.succeed(resume);
        EXPECT_EQ(document["digest"].text(), whole["model_digest"].text());
        EXPECT_EQ(document["state_digest"].text(), whole["digest_uninterrupted"].text());
      }
      const std::string facts =
          files.get(fmt::format("{}/step-{}/optimizer/state.json", root, kBefore));
      const Document without = Document::parse(facts)["without_state"];
      ASSERT_EQ(without.elements().size(), 2U);
      EXPECT_EQ(without[0].text() + without[1].text(), "nonecounts");
      files.remove_tree(root);
      if (HasFailure()) return;
    }
  }
  EXPECT_GE(resumed, format.starts_with("int8") ? 16 : 32);
}

// ---- states that are converted

// Resumes a state in every format, in layouts that cut it elsewhere than the save did: also within
// blocks of 8-bit moments, where the run's own format has none. Each gives the bits of one rank,
// and compares every byte once. The values of a pair of formats are compared with
// AdamW::import_from in tests/cli/test_state_formats.py.
TEST_P(ResumedWorldsByFormat, AreResumedInEveryFormat) {
  const std::string& format = GetParam();
  const std::vector<Cut> cuts = {{"fsdp2", 1}, {"fsdp2", 3}, {"tp-fsdp", 4},
                                 {"hsdp", 4},  {"zero2", 3}, {"zero2", 7}};
  const Cut saved{"fsdp2", 2};
  program.succeed(
      fmt::format("save /model /root {} --step 3 --steps 3{}", words(format), saved.flags()));
  for (const std::string& to : kFormats) {
    std::optional<Document> first;
    for (const Cut& cut : cuts) {
      if (!cut.holds(to)) continue;
      const std::string resume = fmt::format(
          "resume /root --recipe /recipe.json --optimizer adamw:{} --steps 2{}", to, cut.flags());
      SCOPED_TRACE(resume);
      const Document document = program.succeed(resume);
      EXPECT_TRUE(document["not_compared"].elements().empty());
      if (!first) first = document;
      for (const char* key : {"digest", "state_digest", "compared_bytes"}) {
        EXPECT_EQ(document[key].text(), (*first)[key].text()) << key;
        EXPECT_EQ(document[key].number(), (*first)[key].number()) << key;
      }
      if (HasFailure()) return;
    }
  }
}

// A bf16 parameter becomes fp32, and is its own master then, with the values of the saved master.
TEST_P(ResumedWorldsByFormat, AreResumedAsFloat32) {
  const std::string& format = GetParam();
  program.succeed(
      fmt::format("save /model /root {} --step 3 --steps 3 --ranks 2{}", words(format), kSmall));
  const std::string resume = fmt::format("resume /root --recipe /recipe.json{}", kSmall);
  const std::string digest = program.succeed(resume)["state_digest"].text();
  for (const char* flags : {"", " --ranks 3"}) {
    const Document cast = program.succeed(resume + " --dtype float32" + flags);
    EXPECT_EQ(cast["state_digest"].text(), digest);
  }
}

// A save goes on from the state of a checkpoint, in the same format or another one, as a resume
// does.
TEST_P(ResumedWorldsByFormat, AreSavedAgain) {
  const std::string& format = GetParam();
  program.succeed(
      fmt::format("save /model /root {} --step 3 --steps 3 --ranks 2{}", words(format), kSmall));
  for (const std::string& to : kFormats) {
    SCOPED_TRACE(format + " to " + to);
    const std::string optimizer = fmt::format("--optimizer adamw:{}{}", to, kSmall);
    const Document went_on = program.succeed(fmt::format("resume /root --steps 2 {}", optimizer));
    const Document saved = program.succeed(
        fmt::format("save /root/step-3 /new --step 5 --steps 2 --ranks 3 {}", optimizer));
    EXPECT_EQ(saved["digest"].text(), went_on["digest"].text());
    EXPECT_EQ(saved["state_digest"].text(), went_on["state_digest"].text());
    EXPECT_TRUE(saved["not_compared"].elements().empty());
    const Document facts = Document::parse(files.get("/new/step-5/optimizer/state.json"));
    EXPECT_EQ(facts["steps"].number(), 5);
    EXPECT_EQ(facts["seed"].text(), "9");
    EXPECT_EQ(facts["state_format"].text(), to);
    EXPECT_EQ(facts["without_state"].elements().size(), 2U);
    EXPECT_EQ(program.run("verify -q /new/step-5").code, 0);
    const Document again = program.succeed(fmt::format("resume /new{}", kSmall));
    EXPECT_EQ(again["state_digest"].text(), saved["state_digest"].text());
    files.remove_tree("/new");
    if (HasFailure()) return;
  }
}

TEST_F(ResumedWorlds, AStateThatIsNotOfTheRunIsRefused) {
  program.succeed(fmt::format("save /model /root {} --step 3 --steps 1{}", words("fp32"), kSmall));
  const auto refused = [&](int code, const std::string& line, const std::string& what) {
    const Document error = program.refuse(code, line + kSmall);
    EXPECT_NE(error["message"].text().find(what), std::string::npos) << error["message"].text();
  };
  refused(2, "save /root/step-3 /new --step 4 --optimizer adamw:fp32 --seed 1", "--seed");
  // Kept in fp32 at the save, and bf16 now: the values of the master are not in the state.
  refused(2, R"(resume /root --optimizer adamw:fp32-split --recipe /recipe.json --dtype bfloat16)",
          "was float32 when it was saved");
  EXPECT_FALSE(files.exists("/new"));
}

// ---- rehearsals

class Rehearsals : public ResumedWorlds {
 protected:
  Rehearsals() { program.succeed("synth /moe --arch tiny-moe"); }

  Document rehearse(const std::string& format, const std::string& flags,
                    const std::string& model = "/moe") {
    return program.succeed(
        fmt::format("rehearse {} --optimizer adamw:{} {}{}", model, format, flags, kSmall));
  }

  // All end with the same bits of state and model. Gradient norms may differ in the order of sums.
  void expect_alike(const std::vector<Document>& runs) {
    for (const Document& run : runs) {
      for (const char* key : {"digest_uninterrupted", "model_digest"}) {
        EXPECT_EQ(run[key].text(), runs[0][key].text());
      }
      const double norm = runs[0]["grad_norm"].number();
      EXPECT_NEAR(run["grad_norm"].number(), norm, 1e-12 * norm);
    }
  }
};

TEST_F(Rehearsals, HaveThePhasesOfTheirSteps) {
  const auto names = [](const Document& document) {
    std::vector<std::string> phases;
    for (const Document& phase : document["phases"].elements())
      phases.push_back(phase["phase"].text());
    return phases;
  };
  const Document three = rehearse("fp32", "--ranks 3 --ranks-per-node 2 --steps 3");
  EXPECT_EQ(names(three), (std::vector<std::string>{"load", "step_1", "step_3"}));
  for (const Document& phase : three["phases"].elements()) {
    ASSERT_EQ(phase["ranks"].elements().size(), 3U);
    for (size_t rank = 0; rank < 3; ++rank) EXPECT_EQ(phase["ranks"][rank]["rank"].number(), rank);
    EXPECT_EQ(phase["nodes"].elements().size(), 2U);
  }
  EXPECT_EQ(three["state_format"].text(), "fp32");
  EXPECT_EQ(three["coverage"].text(), "proven");
  EXPECT_EQ(names(rehearse("fp32", "--steps 1")), (std::vector<std::string>{"load", "step_1"}));
}

TEST_F(Rehearsals, NeitherLayoutNorReplicasChangeABit) {
  for (const char* format : {"fp32", "bf16-moments"}) {
    std::vector<Document> runs;
    for (const char* flags :
         {"", "--ranks 3 --shard-dim 1 --strategy node-reader",
          "--ranks 4 --layout hsdp --mesh 2x2 --strategy replica-striped",
          "--ranks 4 --layout tp-fsdp --mesh 2x2 --threads 3", "--ranks 2 --layout none",
          "--ranks 3 --layout zero2", "--ranks 3 --layout zero3 --strategy rank0-broadcast"}) {
      runs.push_back(rehearse(format, std::string("--clip 0.5 ") + flags));
    }
    expect_alike(runs);
  }
}

// Mostly matrices, whose 8-bit moments have a scale for each 128 elements of a row. Two or four
// ranks divide `o_proj` and `down_proj` along dim 1 at multiples of 128.
TEST_F(Rehearsals, CodesDoNotDependOnCutsBetweenRows) {
  files.put("/rows/model.safetensors",
            checkpoint_file({{"embed.weight", "BF16", {523, 128}},
                             {"layers.0.norm.weight", "BF16", {130}},
                             {"layers.0.q_proj.weight", "BF16", {65, 300}},
                             {"layers.0.o_proj.weight", "BF16", {37, 512}},
                             {"layers.0.experts", "BF16", {5, 3, 256}},
                             {"layers.0.down_proj.weight", "BF16", {19, 1024}}}));
  const std::string rowwise = " --tp-rowwise o_proj|down_proj --resume-ranks 3";
  std::vector<std::string> cases = {"--ranks 4 --layout hsdp --mesh 2x2 --resume-ranks 3",
                                    "--ranks 4 --layout tp-fsdp --mesh 2x2" + rowwise,
                                    "--ranks 8 --layout tp-fsdp --mesh 2x4" + rowwise,
                                    "--ranks 2 --layout none --resume-ranks 3"};
  // By number of ranks that save: the number of ranks that resume.
  for (const auto& [ranks, resumed] : std::vector<std::pair<int, int>>{
           {1, 8}, {2, 3}, {3, 4}, {4, 1}, {8, 2}, {5, 7}, {6, 5}, {7, 6}}) {
    cases.push_back(fmt::format("--ranks {} --resume-ranks {}", ranks, resumed));
  }
  for (const char* format : {"int8-moments", "int8-moments-24"}) {
    std::vector<Document> runs;
    for (size_t i = 0; i < cases.size(); ++i) {
      files.remove_tree("/root");
      runs.push_back(rehearse(
          format,
          fmt::format("--save /root --steps 3 --clip 0.5 --threads {} {}", 1 + i % 3, cases[i]),
          "/rows"));
      EXPECT_EQ(runs.back()["digest_resumed"].text(), runs.back()["digest_uninterrupted"].text());
    }
    expect_alike(runs);
    const Document other = rehearse("bf16-moments", "--steps 4 --clip 0.5", "/rows");
    EXPECT_NE(other["digest_uninterrupted"].text(), runs[0]["digest_uninterrupted"].text());
  }
}

// `fp32` and `fp32-split` end with the same bits, for they get the same gradients, which have the
// parameter's dtype. With any dtype the step changes the model from the loaded one.
TEST_F(Rehearsals, SplitIsExactAndTrainingReadsTheSteppedParameters) {
  const Document whole = rehearse("fp32", "--ranks 2");
  const Document split = rehearse("fp32-split", "--ranks 2");
  EXPECT_EQ(whole["digest_uninterrupted"].text(), split["digest_uninterrupted"].text());
  EXPECT_EQ(whole["model_digest"].text(), split["model_digest"].text());
  EXPECT_NE(whole["model_digest"].text(), program.succeed("load /moe --digest")["digest"].text());
  for (const char* dtype : {"float32", "float16"}) {
    const Document cast = program.succeed(fmt::format("load /moe --digest --dtype {}", dtype));
    const Document stepped = rehearse("int8-moments", fmt::format("--dtype {}", dtype));
    EXPECT_NE(stepped["model_digest"].text(), cast["digest"].text());
  }
}

TEST_F(Rehearsals, ClippingAndSeedChangeTheState) {
  const Document free = rehearse("fp32", "");
  const double norm = free["grad_norm"].number();
  const std::string digest = free["digest_uninterrupted"].text();
  const auto digest_with = [&](const std::string& flags) {
    return rehearse("fp32", flags)["digest_uninterrupted"].text();
  };
  EXPECT_EQ(digest_with(fmt::format("--clip {}", 2 * norm)), digest);
  const std::string tight = digest_with(fmt::format("--clip {}", norm / 2));
  const std::string other = digest_with("--seed 1");
  EXPECT_NE(tight, digest);
  EXPECT_NE(other, digest);
  EXPECT_NE(tight, other);
}

TEST_F(Rehearsals, OtherRanksResumeTheSave) {
  const std::vector<std::pair<std::string, int>> cases = {
      {"--ranks 1", 4},
      {"--ranks 3 --clip 0.5", 2},
      {"--ranks 4 --layout tp-fsdp --mesh 2x2", 3},
      {"--ranks 4 --layout hsdp --mesh 2x2", 4},
      {"--ranks 2 --ranks-per-node 1 --dtype float32", 3}};
  for (const auto& [flags, resume_ranks] : cases) {
    SCOPED_TRACE(flags);
    const std::string saving =
        fmt::format("{} --steps 2 --seed 5 --save /root --resume-ranks {}", flags, resume_ranks);
    const Document document = rehearse("int8-moments-24", saving);
    // Both are digests after three steps: two, the save, and one more by old and by resumed ranks.
    EXPECT_EQ(document["digest_resumed"].text(), document["digest_uninterrupted"].text());
    const Document longer = rehearse("int8-moments-24", flags + " --seed 5 --steps 3");
    EXPECT_EQ(document["digest_uninterrupted"].text(), longer["digest_uninterrupted"].text());
    EXPECT_EQ(document["model_digest"].text(), longer["model_digest"].text());
    const std::vector<Document>& phases = document["phases"].elements();
    ASSERT_EQ(phases.size(), 6U);
    for (size_t i = 4; i < 6; ++i) {
      EXPECT_EQ(phases[i]["ranks"].elements().size(), static_cast<size_t>(resume_ranks));
    }
    EXPECT_EQ(document["saved"]["path"].text(), "/root/step-2");
    EXPECT_EQ(program.run("verify -q /root").code, 0);
    program.refuse(20, "rehearse /moe --optimizer adamw:fp32 " + saving);
    files.remove_tree("/root");
  }
}

}  // namespace
}  // namespace modicum
