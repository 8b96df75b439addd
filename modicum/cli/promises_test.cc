// The promise of each rank equals its ledger to the byte, over strategies, layouts, worlds, state
// formats and verbs; `plan` promises the run and the job that the other verbs make; and a budget is
// exact to the byte. What the kernel counts is compared in tests/cli/test_memory.py.
//
// Catches: a budget is compared with `<` instead of `<=`; `plan` assumes another staging size than
// `load`; a save or a resume is promised without its optimizer state; a phase is promised the
// memory of another phase; a save promises memory that its ledger does not hold; the resumed run is
// planned with the recipe of the saved one; a resumed checkpoint is promised without the headers of
// the checkpoint that was read; a run without state has no plan; a suggested alternative does not
// fit; an error lacks its shortfall.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "modicum/cli/program_double.h"
#include "modicum/io/file_doubles.h"

namespace modicum {
namespace {

constexpr int64_t kMiB1 = 1 << 20;
const std::vector<std::string> kStrategies = {"own-shard", "node-reader", "replica-striped",
                                              "rank0-broadcast", "full-per-rank"};
const std::vector<std::string> kFormats = {"fp32", "fp32-split", "bf16-moments", "int8-moments",
                                           "int8-moments-24"};
const std::vector<std::string> kWorlds = {
    "--layout none --ranks 1",
    "--layout none --ranks 3",
    "--layout fsdp2 --ranks 1",
    "--layout fsdp2 --ranks 2 --ranks-per-node 1",
    "--layout fsdp2 --ranks 5",
    "--layout fsdp2 --shard-dim 1 --ranks 3",
    "--layout hsdp --mesh 2x2 --ranks 4 --ranks-per-node 2",
    "--layout hsdp --mesh 3x2 --ranks 6",
    "--layout tp-fsdp --mesh 2x2 --tp-rowwise down|o_proj --ranks 4",
    "--layout tp-fsdp --mesh 1x3 --ranks 3",
    "--layout zero1 --ranks 2",
    "--layout zero2 --ranks 3",
    "--layout zero3 --ranks 4"};
const std::string kSmall = " --staging 300KiB --threads 2";

// The promise of a rank whose ledger's peak is `ledger_bytes`: these, the process (the default of
// --baseline), and page tables of 8 bytes per 4 KiB, in whole pages, and one page per GiB.
int64_t with_process(int64_t ledger_bytes) {
  const auto up = [](int64_t bytes, int64_t to) { return (bytes + to - 1) / to; };
  return ledger_bytes + 2 * kMiB1 + up(ledger_bytes / 512, 4096) * 4096 +
         up(ledger_bytes, 1 << 30) * 4096;
}

// `document`: a document, or a phase of a rehearsal.
void expect_exact(const Document& document, const std::string& line) {
  ASSERT_TRUE(document.has("ranks")) << line;
  EXPECT_FALSE(document["ranks"].elements().empty());
  for (const Document& rank : document["ranks"].elements()) {
    EXPECT_EQ(rank["promised_bytes"].bytes(), with_process(rank["ledger_peak_bytes"].bytes()))
        << line << " rank " << rank["rank"].number();
  }
}

std::vector<int64_t> promised(const Document& document) {
  std::vector<int64_t> bytes;
  for (const Document& node : document["nodes"].elements()) {
    bytes.push_back(node["promised_bytes"].bytes());
  }
  return bytes;
}

const Document& strategy_of(const Document& plan, const std::string& name) {
  const std::vector<Document>& rows = plan["strategies"].elements();
  return *std::find_if(rows.begin(), rows.end(),
                       [&](const Document& row) { return row["name"].text() == name; });
}

int64_t node_peak(const Document& plan, const std::string& strategy) {
  int64_t peak = 0;
  for (const Document& node : strategy_of(plan, strategy)["nodes"].elements()) {
    peak = std::max(peak, node["peak_bytes"].bytes());
  }
  return peak;
}

std::string strategy_in(const std::string& flags) {
  const std::string flag = "--strategy ";
  const size_t at = flags.find(flag);
  if (at == std::string::npos) return "own-shard";
  return flags.substr(at + flag.size(), flags.find(' ', at + flag.size()) - at - flag.size());
}

std::string name_of(const testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

class Promises : public testing::TestWithParam<std::string> {
 protected:
  Promises() { program.succeed("synth /moe --arch tiny-moe --shard-size 1500"); }

  MemoryFileSystem files;
  const ThreadedProgram program{files};
};

// ---- ledgers

class PromisesByStrategy : public Promises {};
INSTANTIATE_TEST_SUITE_P(All, PromisesByStrategy, testing::ValuesIn(kStrategies), name_of);

TEST_P(PromisesByStrategy, ALoadHoldsExactlyWhatItPromises) {
  for (const std::string& world : kWorlds) {
    for (const char* more : {"", " --dtype float32", " --destination discard"}) {
      const std::string line = "load /moe " + world + kSmall + " --strategy " + GetParam() + more;
      expect_exact(program.succeed(line), line);
    }
  }
}

TEST_P(PromisesByStrategy, ASaveAndItsResumeHoldExactlyWhatTheyPromise) {
  for (size_t i = 0; i < kWorlds.size(); ++i) {
    const std::string flags = kWorlds[i] + kSmall + " --strategy " + GetParam();
    const std::string root = fmt::format("/root{}", i);
    const std::string save =
        fmt::format("save /moe {} --step 1 --steps 1 --optimizer adamw:fp32 {}", root, flags);
    expect_exact(program.succeed(save), save);
    const std::string resume = fmt::format("resume {} --steps 1 {}", root, flags);
    expect_exact(program.succeed(resume), resume);
    const std::string plain = fmt::format("save /moe {} --step 2 {}", root, flags);
    expect_exact(program.succeed(plain), plain);
  }
}

TEST_P(PromisesByStrategy, EachPhaseOfARehearsalHoldsExactlyWhatItPromises) {
  for (size_t i = 0; i < kWorlds.size(); ++i) {
    const std::string line = fmt::format(
        "rehearse /moe --save /root{} --steps 2 --optimizer adamw:bf16-moments {} {} "
        "--strategy {}",
        i, kWorlds[i], kSmall, GetParam());
    const Document document = program.succeed(line);
    std::vector<std::string> names;
    for (const Document& phase : document["phases"].elements()) {
      names.push_back(phase["phase"].text());
      expect_exact(phase, line + names.back());
    }
    EXPECT_EQ(names, (std::vector<std::string>{"load", "step_1", "step_2", "save", "resume",
                                               "step_resumed"}));
  }
}

class PromisesByFormat : public Promises {};
INSTANTIATE_TEST_SUITE_P(All, PromisesByFormat, testing::ValuesIn(kFormats), name_of);

TEST_P(PromisesByFormat, ASaveAndItsResumeHoldExactlyWhatTheyPromise) {
  for (size_t i = 0; i < kWorlds.size(); ++i) {
    const std::string root = fmt::format("/root{}", i);
    const std::string save = fmt::format("save /moe {} --step 1 --optimizer adamw:{} {} {}", root,
                                         GetParam(), kWorlds[i], kSmall);
    expect_exact(program.succeed(save), save);
    const std::string resume = fmt::format("resume {} {} {}", root, kWorlds[i], kSmall);
    expect_exact(program.succeed(resume), resume);
  }
}

TEST_P(PromisesByFormat, PlanLoadAndRehearsePromiseTheSame) {
  const std::string words = " /moe --staging 300KiB --optimizer adamw:" + GetParam();
  const Document plan = program.succeed("plan" + words);
  const int64_t needed = node_peak(plan, "own-shard");
  for (const Document& phase : strategy_of(plan, "own-shard")["nodes"][0]["phases"].elements()) {
    if (phase["phase"].text() != "step") continue;
    const int64_t not_in_the_ledger =
        phase["by_purpose"]["process"].bytes() + phase["by_purpose"]["page_tables"].bytes();
    const int64_t ledger = phase["bytes"].bytes() - not_in_the_ledger;
    const Document loaded = program.succeed(fmt::format("load{} --budget {}", words, needed));
    EXPECT_EQ(loaded["nodes"][0]["peak_bytes"].bytes(), needed);
    EXPECT_EQ(loaded["ranks"][0]["ledger_peak_bytes"].bytes(), ledger);
    const Document rehearsed =
        program.succeed(fmt::format("rehearse{} --budget {}", words, needed));
    for (size_t i = 1; i < rehearsed["phases"].elements().size(); ++i) {
      EXPECT_EQ(promised(rehearsed["phases"][i])[0], phase["bytes"].bytes());
      EXPECT_EQ(rehearsed["phases"][i]["ranks"][0]["ledger_peak_bytes"].bytes(), ledger);
    }
  }
  for (const char* verb : {"load", "rehearse"}) {
    const Document error =
        program.refuse(15, fmt::format("{}{} --budget {}", verb, words, needed - 1));
    EXPECT_EQ(error["got"].bytes(), needed);
    EXPECT_EQ(error["shortfall_bytes"].bytes(), 1);
  }
}

// A state that is converted while it is read, by a resume and by a save of a checkpoint.
TEST_P(PromisesByFormat, AConvertedStateHoldsExactlyWhatItPromises) {
  const std::string save =
      fmt::format("save /moe /root --step 1 --optimizer adamw:{} {}", GetParam(), kSmall);
  program.succeed(save);
  for (const std::string& to : kFormats) {
    for (size_t i = 0; i < kWorlds.size(); ++i) {
      const std::string flags = fmt::format("--optimizer adamw:{} {} {}", to, kWorlds[i], kSmall);
      const std::string resume = "resume /root " + flags;
      expect_exact(program.succeed(resume), resume);
      const std::string again =
          fmt::format("save /root/step-1 /new --step {} --steps 1 {}", i, flags);
      expect_exact(program.succeed(again), again);
    }
    files.remove_tree("/new");
  }
}

// A conversion holds one file's plan at a time, and promises that of the whole.
TEST_F(Promises, AConversionHoldsAtMostAndNearlyWhatItPromises) {
  const auto expect_near = [&](const std::string& line) {
    const Document document = program.succeed(line);
    ASSERT_TRUE(document.has("ranks")) << line;
    const Document& rank = document["ranks"][0];
    const int64_t ledger_bytes = with_process(rank["ledger_peak_bytes"].bytes());
    EXPECT_LE(ledger_bytes, rank["promised_bytes"].bytes()) << line;
    EXPECT_GE(ledger_bytes, rank["promised_bytes"].bytes() - 128 * 1024) << line;
  };
  int number = 0;
  for (const char* flags : {"", "--dtype float32", "--dtype float16 --shard-size 2000", "--sparse",
                            "--shard-size 700 --keep-fp32 norm"}) {
    expect_near(fmt::format("convert /moe /out{} {} {}", number++, flags, kSmall));
  }
}

// The ledger's peak in the steps is the same in each of them. The optimizer's memory is what the
// format takes for each parameter; the rest of the promise is that of processes and page tables.
TEST_P(PromisesByFormat, AStepHoldsWhatItPromises) {
  for (const int ranks : {1, 3}) {
    const Document document = program.succeed(
        fmt::format("step --params 1920K --steps 3 --no-compare --threads 1 --ranks {} "
                    "--grad-dtype bfloat16 --state-format {}",
                    ranks, GetParam()));
    const Document& held_bytes = document["held_bytes_per_param"];
    EXPECT_EQ(held_bytes["step_1"]["ledger"].number(), held_bytes["last_step"]["ledger"].number());
    const double params = document["params"].number();
    const double ledger_bytes = held_bytes["last_step"]["ledger"].number() * params;
    EXPECT_GT(ledger_bytes, 2 * params);
    EXPECT_LE(ledger_bytes, document["promised_bytes"].number());
  }
}

// ---- plan

// What `plan` promises of the job, for each node, with the strategy in the flags.
std::vector<Document> jobs_of(const ThreadedProgram& program, const std::string& line) {
  std::vector<Document> jobs;
  const Document plan = program.succeed("plan " + line);
  for (const Document& node : strategy_of(plan, strategy_in(line))["nodes"].elements()) {
    jobs.push_back(node["job"]);
  }
  return jobs;
}

std::vector<int64_t> bytes_of(const std::vector<Document>& jobs, const std::string& key) {
  std::vector<int64_t> bytes;
  for (const Document& job : jobs) bytes.push_back(job[key].bytes());
  return bytes;
}

// `save`, `resume` and `rehearse --save` promise what `plan` promises of the job. The checkpoint
// has its own recipe and knows the frozen parameters: `first_flags` are not those of the resume.
void expect_promised_job(const ThreadedProgram& program, const std::string& directory,
                         const std::string& first_flags, const std::string& flags,
                         const std::string& optimizer) {
  const std::string words = fmt::format("{} {} --optimizer {}", first_flags, flags, optimizer);
  const std::vector<Document> jobs = jobs_of(program, directory + " " + words);
  static int number = 0;
  const std::string root = fmt::format("/job{}", ++number);
  const Document saved =
      program.succeed(fmt::format("save {} {} --step 1 {}", directory, root, words));
  EXPECT_EQ(bytes_of(jobs, "save_peak_bytes"), promised(saved)) << words;
  const Document resumed = program.succeed(fmt::format("resume {} {}", root, flags));
  EXPECT_EQ(bytes_of(jobs, "resume_peak_bytes"), promised(resumed)) << words;
  const Document rehearsed =
      program.succeed(fmt::format("rehearse {} {} --steps 1 --save {}r", directory, words, root));
  std::vector<int64_t> highest;
  for (const Document& bytes : rehearsed["promised_bytes"].elements()) {
    highest.push_back(bytes.bytes());
  }
  EXPECT_EQ(bytes_of(jobs, "peak_bytes"), highest) << words;
  for (const Document& phase : rehearsed["phases"].elements()) {
    const std::string name = phase["phase"].text() == "step_1" ? "step" : phase["phase"].text();
    std::vector<int64_t> planned;
    for (const Document& job : jobs) {
      for (const Document& job_phase : job["phases"].elements()) {
        if (job_phase["phase"].text() != name) continue;
        planned.push_back(job_phase["bytes"].bytes());
        int64_t sum = 0;
        for (const auto& [purpose, bytes] : job_phase["by_purpose"].members()) sum += bytes.bytes();
        EXPECT_EQ(sum, planned.back()) << words << " " << name << "\n";
      }
    }
    EXPECT_EQ(planned, promised(phase)) << words << " " << name;
  }
}

TEST_F(Promises, PlanPromisesTheJob) {
  for (const char* optimizer : {"adamw:fp32", "adamw:int8-moments-24"}) {
    const auto expect = [&](const std::string& first, const std::string& flags) {
      expect_promised_job(program, "/moe", first, flags, optimizer);
    };
    expect("", "--ranks 1 --layout none --strategy full-per-rank");
    expect("", "--ranks 2 --strategy node-reader --ranks-per-node 2");
    expect("--frozen norm", "--ranks 5 --dtype float32");
    expect("", "--ranks 3 --shard-dim 1");
    expect("", "--ranks 6 --layout hsdp --mesh 2x3 --strategy replica-striped --ranks-per-node 3");
    expect("", "--ranks 4 --layout tp-fsdp --mesh 2x2 --tp-rowwise down|o_proj --staging 300KiB");
    expect("", "--ranks 2 --layout zero1 --strategy rank0-broadcast --ranks-per-node 1");
    expect("", "--ranks 3 --layout zero2");
  }
}

TEST_F(Promises, PlanPromisesTheJobOfARecipe) {
  const Document listed = program.succeed("inspect /moe");
  std::vector<std::string> names;
  for (const Document& tensor : listed["tensors"].elements()) {
    names.push_back(tensor["name"].text());
  }
  JsonWriter json;
  json.begin_object().key("targets").begin_object();
  for (size_t i = 1; i < names.size(); ++i) {  // the last one is renamed, the first one is unused
    json.key(i + 1 == names.size() ? "renamed" : names[i]).begin_object();
    json.member("op", "stored").member("name", names[i]).end_object();
  }
  json.end_object().key("unused").begin_array().value(names[0]).end_array();
  files.put("/r.json", json.end_object().take());
  expect_promised_job(program, "/moe", "--recipe /r.json", "", "adamw:fp32");
}

// Matrices with 8-bit codes and scales. The layouts divide no block that has one scale.
TEST_F(Promises, AStateWithScalesIsHeldAsPromised) {
  files.put("/rows/model.safetensors", checkpoint_file({{"a.weight", "BF16", {48, 512}},
                                                        {"b.weight", "BF16", {64, 1024}},
                                                        {"norm.weight", "BF16", {131}}}));
  for (const char* flags : {"--ranks 3", "--ranks 4 --layout hsdp --mesh 2x2"}) {
    const std::string words = fmt::format("{} --optimizer adamw:int8-moments", flags);
    const std::vector<Document> jobs = jobs_of(program, "/rows " + words);
    const std::string root = fmt::format("/of{}", std::string(flags).size());
    const Document saved = program.succeed(fmt::format("save /rows {} --step 1 {}", root, words));
    expect_exact(saved, words);
    const Document resumed = program.succeed(fmt::format("resume {} {}", root, flags));
    expect_exact(resumed, words);
    EXPECT_EQ(bytes_of(jobs, "save_peak_bytes"), promised(saved));
    EXPECT_EQ(bytes_of(jobs, "resume_peak_bytes"), promised(resumed));
  }
  // Flat groups (ZeRO) divide blocks between ranks, so that the state can't be saved.
  const std::string words = "--ranks 3 --layout zero2 --optimizer adamw:int8-moments";
  const Document refused = program.refuse(2, "save /rows /zero --step 1 " + words);
  EXPECT_FALSE(files.exists("/zero"));
  const Document plan = program.succeed("plan /rows --budget 1TiB " + words);
  EXPECT_FALSE(strategy_of(plan, "own-shard")["nodes"][0].has("job"));
  EXPECT_TRUE(plan["fits"].is_true());
  EXPECT_FALSE(plan.has("job_fits"));
  int warnings = 0;
  for (const Document& warning : plan["warnings"].elements()) {
    if (warning.text().find("the memory of a save is not predicted") == std::string::npos) continue;
    ++warnings;
    EXPECT_NE(warning.text().find(refused["tensor"].text()), std::string::npos) << warning.text();
  }
  EXPECT_EQ(warnings, 1);
  EXPECT_EQ(program.run("plan /rows " + words).out.find("step_resumed"), std::string::npos);
}

TEST_F(Promises, ARunThatTrainsNothingIsReported) {
  const std::string words = " --optimizer adamw:fp32 --frozen .";
  program.succeed("load /moe" + words);
  EXPECT_EQ(program.refuse(2, "save /moe /root --step 1" + words)["category"].text(),
            "UNSUPPORTED");
  EXPECT_FALSE(files.exists("/root"));
  const Document plan = program.succeed("plan /moe" + words);
  EXPECT_FALSE(strategy_of(plan, "own-shard")["nodes"][0].has("job"));
  EXPECT_NE(plan["warnings"][0].text().find("the memory of a save is not predicted: UNSUPPORTED"),
            std::string::npos);
}

// The words of `flags`, with those of `more` in place of the same flags.
std::string changed(std::string flags, const std::string& more) {
  for (size_t begin = 0; begin < more.size();) {
    const size_t value = more.find(' ', begin) + 1;
    const size_t end = std::min(more.find(' ', value), more.size());
    const std::string flag = " " + more.substr(begin, value - begin);
    const size_t at = flags.find(flag);
    if (at != std::string::npos) {
      const size_t rest = std::min(flags.find(' ', at + flag.size()), flags.size());
      flags.erase(at, rest - at);
    }
    flags += flag + more.substr(value, end - value);
    begin = end + 1;
  }
  return flags;
}

TEST_F(Promises, TheLoadKeepsItsOwnPeak) {
  const std::string flags = " /moe --staging 1MiB --optimizer adamw:fp32";
  const Document plan = program.succeed("plan" + flags);
  const Document& node = strategy_of(plan, "own-shard")["nodes"][0];
  EXPECT_EQ(promised(program.succeed("load" + flags))[0], node["peak_bytes"].bytes());
  const Document& job = node["job"];
  const int64_t peak = job["peak_bytes"].bytes();
  EXPECT_LT(node["peak_bytes"].bytes(), peak);
  EXPECT_EQ(peak, std::max(job["save_peak_bytes"].bytes(), job["resume_peak_bytes"].bytes()));
  std::map<std::string, int64_t> alone, parts;
  int64_t highest = 0;
  for (const Document& phase : node["phases"].elements()) {
    alone[phase["phase"].text()] = phase["bytes"].bytes();
    if (phase["phase"].text() != "step") highest = std::max(highest, phase["bytes"].bytes());
  }
  for (const Document& phase : job["phases"].elements()) {
    parts[phase["phase"].text()] = phase["bytes"].bytes();
  }
  EXPECT_EQ(parts["load"], highest);
  EXPECT_EQ(parts["step"], alone["step"]);
  // A resumed run holds the headers and digests of its checkpoint until it ends.
  EXPECT_EQ(parts["step_resumed"] - parts["step"], parts["resume"] - parts["step"]);
  EXPECT_GT(parts["step_resumed"], parts["step"]);
  EXPECT_EQ(parts["save"], job["save_peak_bytes"].bytes());
  for (const bool fits : {true, false}) {
    const std::string line = fmt::format("plan{} --budget {}", flags, fits ? peak : peak - 1);
    const Document with = program.succeed(line);
    EXPECT_TRUE(with["fits"].is_true());
    EXPECT_EQ(with["job_fits"].is_true(), fits);
    ASSERT_EQ(with.has("job_shortfall_bytes"), !fits);
    ASSERT_EQ(with.has("would_fit"), !fits);
    if (!fits) {
      EXPECT_EQ(with["job_shortfall_bytes"].bytes(), 1U);
      EXPECT_FALSE(with.has("shortfall_bytes"));
      EXPECT_FALSE(with["would_fit"].elements().empty());
      for (const Document& alternative : with["would_fit"].elements()) {
        const std::string other = changed(flags, alternative["flags"].text());
        const Document fitting =
            program.succeed(fmt::format("plan{} --budget {}", other, peak - 1));
        EXPECT_TRUE(fitting["job_fits"].is_true()) << other;
      }
    }
    const std::string shown = program.run(line).out;
    EXPECT_NE(shown.find("step_resumed"), std::string::npos);
    EXPECT_EQ(shown.find("short by") == std::string::npos, fits);
    EXPECT_EQ(shown.starts_with("load and steps fit: "), !fits) << shown;
  }
  const Document without = program.succeed("plan /moe --budget 1GiB");
  EXPECT_FALSE(without.has("job_fits"));
  EXPECT_FALSE(strategy_of(without, "own-shard")["nodes"][0].has("job"));
}

TEST_P(PromisesByStrategy, PlanPromisesTheRunThatLoadMakes) {
  for (const char* world : {"--ranks 1", "--ranks 3 --ranks-per-node 3",
                            "--ranks 5 --ranks-per-node 2", "--ranks 8 --ranks-per-node 4"}) {
    for (const char* way :
         {"", "--dtype float32", "--layout none --dtype float16", "--destination discard",
          "--destination discard --dtype float32 --staging 1MiB",
          "--staging 2MiB --baseline 5MiB"}) {
      const std::string flags = fmt::format("/moe {} {}", world, way);
      const Document plan = program.succeed("plan " + flags);
      const Document& row = strategy_of(plan, GetParam());
      const Document loaded =
          program.succeed(fmt::format("load {} --strategy {}", flags, GetParam()));
      EXPECT_EQ(loaded["strategy"].text(), GetParam());
      for (const char* key : {"storage_read_bytes", "exchanged_bytes"}) {
        EXPECT_EQ(loaded[key].bytes(), row[key].bytes()) << flags;
      }
      for (size_t i = 0; i < row["ranks"].elements().size(); ++i) {
        const Document& rank = loaded["ranks"][i];
        EXPECT_EQ(rank["promised_bytes"].bytes(), row["ranks"][i]["peak_bytes"].bytes()) << flags;
        EXPECT_LE(rank["ledger_peak_bytes"].bytes(), rank["promised_bytes"].bytes());
      }
      for (size_t i = 0; i < row["nodes"].elements().size(); ++i) {
        EXPECT_EQ(loaded["nodes"][i]["peak_bytes"].bytes(), row["nodes"][i]["peak_bytes"].bytes());
      }
    }
  }
}

// ---- the budget

void expect_over_budget(const Document& error, int64_t needed, int64_t allowed) {
  EXPECT_EQ(error["category"].text(), "BUDGET");
  EXPECT_EQ(error["got"].bytes(), needed);
  EXPECT_EQ(error["expected"].bytes(), allowed);
  EXPECT_EQ(error["shortfall_bytes"].bytes(), needed - allowed);
  int64_t sum = 0, last = INT64_MAX;
  for (const Document& owner : error["owners"].elements()) {
    EXPECT_LE(owner["bytes"].bytes(), last);
    EXPECT_FALSE(owner["purpose"].text().empty());
    sum += last = owner["bytes"].bytes();
  }
  EXPECT_EQ(sum, needed);
}

TEST_P(PromisesByStrategy, TheBudgetIsExactToTheByte) {
  for (const char* staging : {"1MiB", "3MiB"}) {
    const std::string flags =
        fmt::format("/moe --ranks 3 --strategy {} --staging {}", GetParam(), staging);
    const int64_t needed = node_peak(program.succeed("plan " + flags), GetParam());
    const Document exact = program.succeed(fmt::format("load {} --budget {}", flags, needed));
    EXPECT_EQ(exact["nodes"][0]["peak_bytes"].bytes(), needed);
    EXPECT_EQ(exact["budget"]["bytes"].bytes(), needed);
    EXPECT_EQ(exact["budget"]["source"].text(), "flag");
    for (const int64_t allowed : {needed - 1, int64_t{5}}) {
      expect_over_budget(program.refuse(15, fmt::format("load {} --budget {}", flags, allowed)),
                         needed, allowed);
    }
    const std::string asked = fmt::format("plan {} --budget ", flags);
    EXPECT_TRUE(program.succeed(fmt::format("{}{}", asked, needed))["fits"].is_true());
    const RunResult refused = program.run(fmt::format("{}{} --json", asked, needed - 1));
    EXPECT_EQ(refused.code, 15);
    EXPECT_FALSE(refused.json()["fits"].is_true());
    EXPECT_EQ(refused.json()["shortfall_bytes"].bytes(), 1);
  }
}

TEST_F(Promises, DefaultStagingShrinksToFit) {
  const std::string flags = " /moe --ranks 3";
  const int64_t needed = node_peak(program.succeed("plan" + flags), "own-shard");
  const int64_t least = node_peak(program.succeed("plan --staging 1MiB" + flags), "own-shard");
  for (const int64_t budget : {needed - 1, needed - 5 * kMiB1, least}) {
    const std::string with = fmt::format("{} --budget {}", flags, budget);
    const Document plan = program.succeed("plan" + with);
    EXPECT_TRUE(plan["fits"].is_true());
    EXPECT_EQ(node_peak(plan, "own-shard"), promised(program.succeed("load" + with))[0]);
    EXPECT_LE(node_peak(plan, "own-shard"), budget);
  }
  const std::string with = fmt::format("{} --budget {}", flags, least - 1);
  EXPECT_EQ(program.run("plan --json" + with).json()["shortfall_bytes"].bytes(), 1);
  EXPECT_EQ(program.refuse(15, "load" + with)["shortfall_bytes"].bytes(), 1);
}

TEST_F(Promises, AResumeThatWouldNotFitIsRefusedBeforeTheLoad) {
  const std::string flags =
      "rehearse /moe --optimizer adamw:fp32 --steps 1 --staging 1MiB --save /root";
  const int64_t needed = program.succeed(flags + " --resume-ranks 3")["promised_bytes"][0].bytes();
  files.remove_tree("/root");
  const std::string words = fmt::format("{} --budget {} --resume-ranks", flags, needed - 1);
  program.succeed(words + " 1");
  files.remove_tree("/root");
  EXPECT_EQ(program.refuse(15, words + " 3")["shortfall_bytes"].bytes(), 1);
  EXPECT_FALSE(files.exists("/root"));
}

// ---- a plan that does not fit

TEST_F(Promises, SuggestedAlternativesFit) {
  files.put("/dense/model.safetensors", checkpoint_file({{"wte.weight", "BF16", {8192, 1024}}}));
  for (const std::string asked :
       {" --strategy full-per-rank", " --strategy rank0-broadcast --staging 8MiB",
        " --optimizer adamw:fp32", " --ranks-per-node 2 --dtype float32",
        " --layout hsdp --mesh 2x2 --optimizer adamw:bf16-moments"}) {
    const std::string words = " --ranks 4" + asked;
    const bool has_staging = asked.find("--staging") != std::string::npos;
    // Default staging shrinks to 1 MiB before a plan is refused.
    const int64_t least =
        node_peak(program.succeed("plan /dense" + words + (has_staging ? "" : " --staging 1MiB")),
                  strategy_in(asked));
    int seen = 0;
    for (const int64_t budget : {least - 1, least * 3 / 4}) {
      const RunResult ended =
          program.run(fmt::format("plan /dense{} --budget {} --json", words, budget));
      EXPECT_EQ(ended.code, 15) << words;
      EXPECT_NE(ended.err.find("BUDGET"), std::string::npos);
      const Document refused = ended.json();
      EXPECT_FALSE(refused["fits"].is_true());
      EXPECT_EQ(refused["shortfall_bytes"].bytes(), least - budget);
      EXPECT_EQ(node_peak(refused, strategy_in(asked)), least);
      const Document error =
          program.refuse(15, fmt::format("load /dense{} --budget {}", words, budget));
      EXPECT_EQ(error["shortfall_bytes"].bytes(), least - budget);
      for (const Document& alternative : refused["would_fit"].elements()) {
        EXPECT_LE(alternative["peak_bytes"].bytes(), budget);
        if (++seen > 12) break;
        std::string values = fmt::format(
            "--strategy {} --staging {} --ranks-per-node {}", alternative["strategy"].text(),
            alternative["staging_bytes"].bytes(), alternative["ranks_per_node"].bytes());
        if (!alternative["dtype"].is_null()) values += " --dtype " + alternative["dtype"].text();
        if (!alternative["state_format"].is_null()) {
          values += " --optimizer adamw:" + alternative["state_format"].text();
        }
        for (const std::string& flags :
             {changed(words, values), changed(words, alternative["flags"].text())}) {
          const Document plan =
              program.succeed(fmt::format("plan /dense{} --budget {}", flags, budget));
          EXPECT_TRUE(plan["fits"].is_true()) << flags;
          EXPECT_TRUE(!plan.has("job_fits") || plan["job_fits"].is_true()) << flags;
          EXPECT_EQ(node_peak(plan, alternative["strategy"].text()),
                    alternative["peak_bytes"].bytes())
              << flags;
        }
      }
    }
    EXPECT_GT(seen, 0) << asked;
  }
}

TEST_F(Promises, AlternativesChangeAsLittleAsPossible) {
  files.put("/dense/model.safetensors", checkpoint_file({{"wte.weight", "BF16", {8192, 1024}}}));
  const std::string words = "plan /dense --ranks 4 --strategy full-per-rank";
  const int64_t budget = node_peak(program.succeed(words), "own-shard");
  const Document refused = program.run(fmt::format("{} --budget {} --json", words, budget)).json();
  bool has_own_shard = false;
  for (const Document& alternative : refused["would_fit"].elements()) {
    has_own_shard |= alternative["strategy"].text() == "own-shard";
    EXPECT_NE(alternative["strategy"].text() != "full-per-rank",
              alternative["ranks_per_node"].number() != 4);
  }
  EXPECT_TRUE(has_own_shard);
  const Document none =
      program.run("plan /moe --ranks 2 --optimizer adamw:fp32 --budget 5 --json").json();
  EXPECT_TRUE(none["would_fit"].elements().empty());
  EXPECT_EQ(none["strategies"].elements().size(), kStrategies.size());
  EXPECT_FALSE(strategy_of(none, "own-shard")["nodes"].elements().empty());
}

// The resumed ranks are fewer than those that saved, or more: the need is that of the greater run.
TEST_F(Promises, ARehearsalNamesTheNeedOfBothItsRuns) {
  for (const char* ranks : {"--ranks 2 --resume-ranks 3", "--ranks 3 --resume-ranks 1"}) {
    const std::string words =
        fmt::format("rehearse /moe --optimizer adamw:fp32 --save /root {}", ranks);
    const int64_t needed = program.refuse(15, words + " --budget 1")["got"].bytes();
    const Document error = program.refuse(15, fmt::format("{} --budget {}", words, needed - 1));
    EXPECT_EQ(error["shortfall_bytes"].bytes(), 1);
    program.succeed(fmt::format("{} --steps 1 --budget {}", words, needed));
    files.remove_tree("/root");
  }
}

// Three of four ranks would fit on a node, but torchrun starts equally many on each.
TEST_F(Promises, NodesGetEquallyManyRanks) {
  files.put("/dense/model.safetensors", checkpoint_file({{"wte.weight", "BF16", {8192, 1024}}}));
  const std::string words = "plan /dense --ranks 4 --staging 1MiB";
  const int64_t budget = node_peak(program.succeed(words + " --ranks-per-node 3"), "own-shard");
  const Document refused = program.run(fmt::format("{} --budget {} --json", words, budget)).json();
  double most = 0;
  for (const Document& alternative : refused["would_fit"].elements()) {
    most = std::max(most, alternative["ranks_per_node"].number());
  }
  EXPECT_EQ(most, 2);
}

TEST_F(Promises, TheTextOfAPlanThatDoesNotFitNamesAnAlternative) {
  const std::string words = "plan /moe --ranks 2 --strategy own-shard --staging 32MiB";
  const RunResult ended = program.run(words + " --budget 24MiB");
  EXPECT_EQ(ended.code, 15);
  EXPECT_TRUE(ended.out.starts_with("does not fit: budget 24.00 MiB per node (flag), needed "))
      << ended.out;
  EXPECT_TRUE(has(lines_of(ended.out).at(1), "would fit: --staging ")) << ended.out;
  const RunResult quiet = program.run(words + " --budget 24MiB -q");
  EXPECT_EQ(quiet.code, 15);
  EXPECT_EQ(quiet.out, "");
  EXPECT_TRUE(quiet.err.starts_with("modicum: BUDGET: node 0: budget 24.00 MiB (flag), needed "));
  EXPECT_TRUE(has(quiet.err, ", short by ")) << quiet.err;
  EXPECT_FALSE(has(quiet.err, "expected")) << quiet.err;
  EXPECT_EQ(program.run(words + " --budget none").code, 0);
}

}  // namespace
}  // namespace modicum
