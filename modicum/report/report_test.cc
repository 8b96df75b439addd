// Golden tests of the JSON documents, whose keys are a contract with scripts, and of the texts.
#include "modicum/report/report.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>

namespace modicum {
namespace {

// Two nodes, the first with ranks 0 and 1. Rank 1 has its peak in phase `hold`, the others in
// `load`. A node's peak_bytes is the sum of its ranks' own peaks and the launcher's 8 MiB. Node 0
// has 110 MiB + (2 MiB + 1) + 8 MiB = 125829121 bytes, one more than in its fullest phase.
Promise small_promise() {
  Promise promise;
  promise.launcher_bytes = 8 * kMiB;
  promise.node_of_rank = {0, 0, 1};
  Footprint open, load, hold, late;
  open[Purpose::process] = load[Purpose::process] = hold[Purpose::process] = 2 * kMiB;
  late = open;
  load[Purpose::shards] = hold[Purpose::shards] = 100 * kMiB;
  load[Purpose::staging] = 8 * kMiB;
  late[Purpose::shards] = 1;
  promise.phases = {
      {"open", {open, open, open}}, {"load", {load, open, load}}, {"hold", {hold, late, hold}}};
  return promise;
}

PlanReport small_plan() {
  PlanReport report;
  report.checkpoint = {.bytes = 300 * kMiB, .tensors = 7, .files = 2};
  report.ranks = 3;
  report.strategy = "own-shard";
  report.strategies = {{"own-shard",
                        small_promise(),
                        {.storage_read_bytes = 300 * kMiB + 5, .reads = 21, .transfers = 22},
                        240 * kMiB}};
  return report;
}

RankOutcome outcome_of(int rank, uint64_t ledger, uint64_t kernel) {
  RankOutcome outcome;
  outcome.rank = rank;
  outcome.pid = 100 + rank;
  outcome.ledger_peak_bytes = ledger;
  outcome.kernel_peak_bytes = kernel;
  outcome.baseline_bytes = 2 * kMiB;
  outcome.page_cache_peak_bytes = rank == 1 ? 0 : 16 * kMiB;
  outcome.storage_read_bytes = 100 * kMiB;
  outcome.exchanged_bytes = 3;
  outcome.bytes_loaded = 100 * kMiB;
  return outcome;
}

LoadReport small_load() {
  LoadReport report;
  report.checkpoint = {.bytes = 300 * kMiB, .tensors = 7, .files = 2};
  report.strategy = "own-shard";
  report.promise = small_promise();
  report.full_per_rank = small_promise();
  for (Footprint& rank : report.full_per_rank.phases[1].of_rank) {
    rank[Purpose::window] = 300 * kMiB;
  }
  report.ranks = {outcome_of(0, 108 * kMiB, 111 * kMiB), outcome_of(1, kMiB, 2 * kMiB),
                  outcome_of(2, 108 * kMiB, 110 * kMiB)};
  report.launcher = {.with_ranks = 5 * kMiB, .alone = 5 * kMiB};
  report.elapsed_s = 1.25;
  report.check_s = 0.5;
  return report;
}

TEST(PlanReport, JsonHasEveryPhaseOfEveryNode) {
  EXPECT_EQ(
      plan_json(small_plan()),
      R"({"checkpoint":{"bytes":314572800,"tensors":7,"files":2},)"
      R"("warnings":[],"ranks":3,"strategy":"own-shard",)"
      R"("strategies":[{"name":"own-shard","storage_read_bytes":314572805,)"
      R"("exchanged_bytes":0,"reads":21,"overread_ratio":1.2500000198682149,)"
      R"("nodes":[{"node":0,"peak_bytes":125829121,)"
      R"("peak_phase":"load","peak_cause":"shards 100.00 MiB, process 12.00 MiB",)"
      R"("phases":[{"phase":"open","bytes":12582912,"by_purpose":{"process":12582912}},)"
      R"({"phase":"load","bytes":125829120,"by_purpose":{"process":12582912,)"
      R"("shards":104857600,"staging":8388608}},{"phase":"hold","bytes":117440513,)"
      R"("by_purpose":{"process":12582912,"shards":104857601}}]},{"node":1,)"
      R"("peak_bytes":123731968,"peak_phase":"load",)"
      R"("peak_cause":"shards 100.00 MiB, process 10.00 MiB","phases":[{"phase":"open",)"
      R"("bytes":10485760,"by_purpose":{"process":10485760}},{"phase":"load",)"
      R"("bytes":123731968,"by_purpose":{"process":10485760,"shards":104857600,)"
      R"("staging":8388608}},{"phase":"hold","bytes":115343360,)"
      R"("by_purpose":{"process":10485760,"shards":104857600}}]}],"ranks":[{"rank":0,)"
      R"("node":0,"peak_bytes":115343360},{"rank":1,"node":0,"peak_bytes":2097153},{"rank":2,)"
      R"("node":1,"peak_bytes":115343360}]}],"budget":null,"fits":null,)"
      R"("baseline":{"bytes":2097152,"source":"default"}})");
}

TEST(PlanReport, JsonSaysWhetherTheRunFitsTheBudget) {
  PlanReport report = small_plan();
  report.strategies.clear();
  report.budget = Budget{1 * kGiB, "cgroup v1 /\"a\""};
  report.fits = false;
  EXPECT_EQ(plan_json(report),
            R"({"checkpoint":{"bytes":314572800,"tensors":7,"files":2},)"
            R"("warnings":[],"ranks":3,"strategy":"own-shard","strategies":[],)"
            R"("budget":{"bytes":1073741824,"source":"cgroup v1 /\"a\""},"fits":false,)"
            R"("baseline":{"bytes":2097152,"source":"default"}})");
}

TEST(PlanReport, TextBeginsWithTheVerdict) {
  PlanReport report = small_plan();
  report.strategies.push_back(report.strategies[0]);
  report.strategies[1].strategy = "rank0-broadcast";
  report.strategies[1].traffic.exchanged_bytes = 2 * kGiB;
  report.budget = Budget{1 * kGiB, "flag"};
  report.fits = true;
  const std::string text =
      "fits: budget 1.00 GiB per node (flag), needed 120.00 MiB for the load, 904.00 MiB left\n"
      "a rank process counts 2.00 MiB (no --baseline); with torch it holds 0.3 to 1.5 GiB: 0.6 to "
      "3.0 GiB more per node, which\n           may not fit\n"
      "\n"
      "300.00 MiB in 7 tensors, 2 files; 3 ranks\n"
      "\n"
      "strategy        peak per node largest rank       read read/needed       sent  at the "
      "peak\n"
      "own-shard          120.00 MiB   110.00 MiB 300.00 MiB       1.250        0 B  shards "
      "100.00 "
      "MiB, process 12.00 MiB\n";
  EXPECT_EQ(plan_text(report, false), text);
  EXPECT_EQ(plan_text(report, true),
            text +
                "rank0-broadcast    120.00 MiB   110.00 MiB 300.00 MiB       1.250   2.00 GiB  "
                "shards 100.00 MiB, process 12.00 MiB\n");
}

// Must fail if the answer is not the first line, or lists each of several runs that change as much.
TEST(PlanReport, TextNamesTheCheapestChangeOfEachKind) {
  PlanReport report = small_plan();
  report.optimizer = "adamw:fp32 over float32 parameters";
  report.budget = Budget{100 * kMiB, "flag"};
  report.refusal = refusal_of(report.requested().promise, *report.budget);
  report.fits = false;
  report.alternatives = {{.strategy = "own-shard",
                          .ranks_per_node = 3,
                          .peak_bytes = 90 * kMiB,
                          .dtype = DType::bf16,
                          .is_lossless = false,
                          .note = "8.0625 bytes per parameter; lossy: 8-bit moments; same 32-bit "
                                  "master; forward as with bf16 mixed precision",
                          .flags = "--dtype bfloat16 --optimizer adamw:int8-moments"},
                         {.strategy = "node-reader", .ranks_per_node = 3, .flags = "--c d"},
                         {.strategy = "own-shard",
                          .ranks_per_node = 1,
                          .peak_bytes = 80 * kMiB,
                          .flags = "--ranks-per-node 1"}};
  report.baseline.is_given = true;
  const std::string text = plan_text(report, false);
  EXPECT_TRUE(text.starts_with(
      "does not fit: budget 100.00 MiB per node (flag), needed 120.00 MiB for load and steps, "
      "short by 20.00 MiB\n"
      "would fit: --dtype bfloat16 --optimizer adamw:int8-moments: 90.00 MiB on 1 node; 8.0625 "
      "bytes per parameter; lossy:\n"
      "           8-bit moments; same 32-bit master; forward as with bf16 mixed precision\n"
      "would fit: --ranks-per-node 1: 80.00 MiB on each of 3 nodes\n"))
      << text;
  EXPECT_EQ(text.find("--c d"), std::string::npos);
  EXPECT_NE(text.find("\nadamw:fp32 over float32 parameters\n"), std::string::npos);
  const std::string json = plan_json(report);
  EXPECT_NE(json.find(R"("dtype":"bfloat16","ranks_per_node":3,"peak_bytes":94371840,)"
                      R"("lossless":null,"lossy":"8.0625 bytes)"),
            std::string::npos)
      << json;
  EXPECT_NE(json.find(R"("dtype":null,"ranks_per_node":1,"peak_bytes":83886080,)"
                      R"("lossless":"same weights","lossy":null,"flags":"--ranks-per-node 1"})"),
            std::string::npos)
      << json;
  report.baseline.is_given = false;
  const auto has = [&](std::string_view words) {
    return plan_text(report, false).find(words) != std::string::npos;
  };
  EXPECT_TRUE(has("80.00 MiB on each of 3 nodes; with torch it does not fit\n"));
  report.alternatives[0].peak_bytes = 0;
  report.budget->bytes = 1 * kGiB;  // 3 ranks of torch hold 0.9 to 4.5 GiB
  EXPECT_TRUE(has("; with torch it may not fit\n")) << plan_text(report, false);
  report.alternatives.clear();
  EXPECT_NE(plan_text(report, false).find("\nno other dtype, "), std::string::npos);
}

TEST(PlanReport, DeviceBytesAreAColumn) {
  PlanReport report = small_plan();
  report.device_bytes = {5 * kMiB, 7 * kMiB, 6 * kMiB};
  const std::string text = plan_text(report, false);
  EXPECT_NE(text.find("sent  on a device  at the peak\n"), std::string::npos) << text;
  EXPECT_NE(text.find("0 B     7.00 MiB  shards 100.00 MiB\n"), std::string::npos) << text;
  EXPECT_NE(plan_json(report).find(R"({"rank":1,"node":0,"peak_bytes":2097153,)"
                                   R"("device_bytes":7340032})"),
            std::string::npos);
}

TEST(PlanReport, AGivenBaselineIsTakenAsItIs) {
  PlanReport report = small_plan();
  report.baseline = {512 * kMiB, true};
  EXPECT_EQ(plan_text(report, false).find("with torch"), std::string::npos);
  EXPECT_NE(plan_json(report).find(R"("baseline":{"bytes":536870912,"source":"flag"})"),
            std::string::npos);
}

// Two ranks on a node; a rank holds 600 MiB by init, 1000 MiB by step_1, and 1100 MiB by epoch_2.
DeepSpeedForecast small_forecast() {
  DeepSpeedForecast forecast{.version = "0.19.8", .stage = 2, .params = 200, .params_of_rank = 100};
  forecast.ranks_of_node = 2;
  forecast.lines = {
      {"fp32 master", "deepspeed", "init", "master", false, 500 * kMiB},
      {"fixed", "deepspeed", "init", "process", true, 100 * kMiB},
      {"moments", "deepspeed", "step_1", "moments", false, 400 * kMiB},
      {"fp32 master, copied when written", "fork", "epoch_2", "fork", false, 100 * kMiB}};
  return forecast;
}

// The report of a budget, for the small plan with the small forecast.
PlanReport plan_within(uint64_t budget) {
  PlanReport report = small_plan();
  report.deepspeed = small_forecast();
  report.budget = Budget{budget, "flag"};
  report.refusal = refusal_of(report.requested().promise, *report.budget);
  report.fits = !report.refusal;
  report.wider_refusal = refusal_of_deepspeed(report);
  report.deepspeed_fits = !report.wider_refusal;
  return report;
}

TEST(PlanReport, OneVerdictIsAboutTheLoadAndDeepSpeed) {
  const std::string fits = plan_text(plan_within(2200 * kMiB), false);
  EXPECT_TRUE(
      fits.starts_with("fits: budget 2.15 GiB per node (flag), needed 2.15 GiB for "
                       "DeepSpeed, 0 B left\n"))
      << fits;
  const PlanReport over = plan_within(2199 * kMiB);
  EXPECT_TRUE(plan_text(over, false)
                  .starts_with("does not fit: budget 2.15 GiB per node (flag), needed 2.15 GiB for "
                               "DeepSpeed, short by 1.00 MiB\n"));
  EXPECT_NE(plan_json(over).find(R"("fits":true,"deepspeed_fits":false)"), std::string::npos);
  PlanReport both = plan_within(100 * kMiB);
  both.alternatives = {{.strategy = "own-shard", .ranks_per_node = 1, .flags = "--a b"}};
  both.baseline.is_given = true;
  const std::string text = plan_text(both, false);
  EXPECT_TRUE(
      text.starts_with("does not fit: budget 100.00 MiB per node (flag), needed 2.15 GiB "
                       "for DeepSpeed, short by 2.05 GiB\n"
                       "the load by Modicum: needed 120.00 MiB, short by 20.00 MiB\n"
                       "the load by Modicum would fit: --a b: 0 B on each of 3 nodes\n"))
      << text;
  both.optimizer = "adamw:fp32";
  EXPECT_NE(plan_text(both, false).find("\nload and steps by Modicum would fit: --a b: "),
            std::string::npos);
  both.baseline.is_given = false;
  EXPECT_NE(plan_text(both, false)
                .find("\na rank process counts 2.00 MiB in Modicum's figures, nothing in "
                      "DeepSpeed's (no --baseline); "),
            std::string::npos);
}

// Must fail if a change of DeepSpeed reads as one of the load, or its configuration is left out.
TEST(PlanReport, ADeepSpeedThatDoesNotFitNamesItsChanges) {
  PlanReport report = plan_within(2199 * kMiB);
  report.baseline.is_given = true;
  EXPECT_NE(plan_text(report, false).find("\nDeepSpeed: no pin_memory, "), std::string::npos);
  report.alternatives = {{.who = kDeepSpeed,
                          .ranks_per_node = 3,
                          .peak_bytes = kGiB,
                          .note = "N",
                          .flags = "--protect",
                          .config = R"({"a":{"b":3}})"},
                         {.who = kDeepSpeed, .ranks_per_node = 3, .flags = "--equal"},
                         {.who = kDeepSpeed, .ranks_per_node = 1, .flags = "--ranks-per-node 1"},
                         {.who = kDeepSpeed, .ranks_per_node = 1, .flags = "--left-out"},
                         {.who = kInPlaceOfDeepSpeed, .ranks_per_node = 3, .flags = "--o"}};
  const std::string text = plan_text(report, false);
  EXPECT_NE(text.find("\nDeepSpeed would fit: --protect, {\"a\":{\"b\":3}} in ds_config.json: "
                      "1.00 GiB on 1 node; N\n"
                      "DeepSpeed would fit: --equal: 0 B on 1 node\n"
                      "DeepSpeed would fit: --ranks-per-node 1: 0 B on each of 3 nodes\n"
                      "Modicum's AdamW in place of DeepSpeed's would fit: --o: 0 B on 1 node\n"
                      "not counted: what from_pretrained holds before deepspeed.initialize; "),
            std::string::npos)
      << text;
  EXPECT_EQ(text.find("DeepSpeed: no "), std::string::npos);
  PlanReport spread = report;
  spread.alternatives.erase(spread.alternatives.begin(), spread.alternatives.begin() + 2);
  EXPECT_NE(plan_text(spread, false).find(" or protection fits on as many nodes\n"),
            std::string::npos);
  const std::string json = plan_json(report);
  for (const char* part :
       {R"("shortfall_bytes":1048576,"would_fit":[{)",
        R"("lossless":"same weights, master and moments; N","lossy":null,"flags":"--protect",)"
        R"("who":"DeepSpeed","config":{"a":{"b":3}}})",
        R"("not_counted":["not counted: what from_pretrained)"}) {
    EXPECT_NE(json.find(part), std::string::npos) << part << "\n" << json;
  }
}

// Must fail if the load of Modicum reads as the verdict about DeepSpeed.
TEST(PlanReport, WithoutOffloadTheFirstLineSaysWhatIsJudged) {
  PlanReport report = small_plan();
  report.deepspeed = DeepSpeedForecast{.version = "0.19.8", .stage = 2};
  report.budget = Budget{200 * kMiB, "flag"};
  report.fits = true;
  const std::string text = plan_text(report, false);
  EXPECT_TRUE(
      text.starts_with("without offload_optimizer DeepSpeed holds no optimizer state in "
                       "host memory; what follows is about Modicum alone\n"
                       "fits: budget 200.00 MiB per node (flag), needed 120.00 MiB for the "
                       "load by Modicum, 80.00 MiB left\n"))
      << text;
  EXPECT_EQ(plan_json(report).find("deepspeed_fits"), std::string::npos);
  report.budget.reset();
  EXPECT_NE(plan_page(report, "", {}).find(R"("sentence":"without offload_optimizer DeepSpeed)"),
            std::string::npos);
}

// Must fail if the load of Modicum has a row although nothing trains with Modicum.
TEST(PlanReport, DeepSpeedHasSumsByOwnerAndNoTableOfStrategies) {
  PlanReport report = small_plan();
  report.deepspeed = small_forecast();
  const std::string text = plan_text(report, false);
  EXPECT_TRUE(text.starts_with("needs 2.15 GiB per node for DeepSpeed\n")) << text;
  EXPECT_EQ(text.find("own-shard"), std::string::npos);
  EXPECT_NE(text.find("sum of deepspeed            1000.00 MiB"), std::string::npos) << text;
  EXPECT_NE(text.find("sum of fork                  100.00 MiB"), std::string::npos) << text;
  EXPECT_EQ(text.find("sum of pinned rounding"), std::string::npos);
  EXPECT_NE(text.find("    fixed  fixed\n"), std::string::npos) << text;
  EXPECT_NE(text.find("; fixed: 100.00 MiB\n"), std::string::npos) << text;
  EXPECT_NE(plan_json(report).find(R"("fixed_bytes":104857600,"rank_bytes":1048576000)"),
            std::string::npos);
  EXPECT_NE(plan_text(report, true).find("\nown-shard "), std::string::npos);
  report.optimizer = "adamw:fp32";
  EXPECT_NE(plan_text(report, false).find("\nown-shard "), std::string::npos);
}

std::string page_of(const PlanReport& report) {
  return plan_page(report, "plan m", {"modicum plan m", "2026-11-28", "0.1"});
}

TEST(PlanPage, DrawsDeepSpeedInPlaceOfTheLoad) {
  const std::string page = page_of(plan_within(2199 * kMiB));
  for (const char* part :
       {R"("label":"DeepSpeed 0.19.8, ZeRO-2, 2 ranks on a node, forecast")", R"("t_s":[0,1,2])",
        R"("budget_bytes":2305818624)",
        R"("owners":{"master":[1048576000,1048576000,1048576000],)"
        R"("process":[209715200,209715200,209715200],"moments":[0,838860800,838860800],)"
        R"("fork":[0,0,209715200]})",
        R"("name":"step_1")", R"("peak":{"at_s":2,"bytes":2306867200,)",
        R"("sentence":"does not fit: budget 2.15 GiB per node (flag), needed 2.15 GiB for )",
        R"(DeepSpeed, short by 1.00 MiB\nDeepSpeed: no )",
        R"-("Budget":"2.15 GiB per node (flag)")-",
        R"(["fp32 master","deepspeed","init","1000.00 MiB","500.00 MiB","0 B","5242880.00"])",
        R"(["sum","fork","","200.00 MiB","100.00 MiB",)",
        R"(["sum","deepspeed","","1.95 GiB","1000.00 MiB","100.00 MiB",)",
        R"(["sum of all","","epoch_2","2.15 GiB","1.07 GiB","100.00 MiB",)"}) {
    EXPECT_NE(page.find(part), std::string::npos) << part;
  }
  EXPECT_EQ(page.find("own-shard, node"), std::string::npos);
  PlanReport without_budget = small_plan();
  without_budget.deepspeed = small_forecast();
  EXPECT_NE(
      page_of(without_budget)
          .find(R"("sentence":"DeepSpeed 0.19.8, ZeRO-2, needs 1.17 GiB by init, 1.95 GiB by )"
                R"(step_1, 2.15 GiB by epoch_2 on a node")"),
      std::string::npos);
}

TEST(PlanPage, WithoutJavaScriptHasTheAnswerAndTheFigures) {
  const std::string page = page_of(plan_within(2199 * kMiB));
  const size_t begin = page.find("<noscript>"), end = page.find("</noscript>");
  ASSERT_LT(begin, end);
  const std::string text = page.substr(begin, end - begin);
  for (const char* part :
       {"<p>does not fit: budget 2.15 GiB per node (flag), needed 2.15 GiB for DeepSpeed",
        "<dt>Budget</dt><dd>2.15 GiB per node (flag)</dd>",
        "<caption>DeepSpeed 0.19.8, ZeRO-2, 2 ranks on a node, forecast</caption>\n"
        "<tr><th>phase</th><th>sum</th><th>master weights</th><th>program and libraries</th>",
        "<tr><th>init</th><td>1.17 GiB</td><td>1000.00 MiB</td><td>200.00 MiB</td>",
        "<tr><th>sum</th><td>deepspeed</td>"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  }
  PlanReport tricky = small_plan();
  tricky.inputs = {{"Model", "<b>&"}};
  EXPECT_NE(page_of(tricky).find("<dd>&lt;b>&amp;</dd>"), std::string::npos);
}

TEST(PlanPage, CarriesItsInputs) {
  PlanReport report = small_plan();
  report.inputs = {{"Model", "m </script>"}, {"Dtype", "float32"}};
  EXPECT_NE(page_of(report).find(
                R"("facts":{"Command":"modicum plan m","Model":"m \u003c/script>",)"
                R"("Dtype":"float32","Baseline":"a rank process counts 2.00 MiB (no --baseline); )"
                R"(with torch it holds 0.3 to 1.5 GiB: 0.6 to 3.0 GiB more per node",)"
                R"("Date":"2026-11-28","Modicum":"0.1"})"),
            std::string::npos);
}

TEST(PlanReport, TextWithoutABudgetDoesNotMentionOne) {
  const std::string text = plan_text(small_plan(), false);
  EXPECT_TRUE(text.starts_with("needs 120.00 MiB per node for the load\n")) << text;
  EXPECT_EQ(text.find("budget"), std::string::npos);
}

TEST(LoadReport, JsonHasPromiseLedgerAndKernelOfEveryRank) {
  EXPECT_EQ(load_json(small_load()),
            R"({"checkpoint":{"bytes":314572800,"tensors":7,"files":2},)"
            R"("warnings":[],"strategy":"own-shard",)"
            R"("elapsed_s":1.25,"check_s":0.5,"bytes_loaded":314572800,)"
            R"("storage_read_bytes":314572800,"exchanged_bytes":9,"coverage":"proven",)"
            R"("check":"off","digest":null,"compared_bytes":0,"not_compared":[],)"
            R"("full_per_rank_bytes":754974720,"budget":null,"nodes":[{"node":0,)"
            R"("promised_bytes":125829121,"peak_bytes":125829121,"kernel_peak_bytes":123731968,)"
            R"("launcher_bytes":5242880},{"node":1,"promised_bytes":123731968,)"
            R"("peak_bytes":123731968,"kernel_peak_bytes":120586240,"launcher_bytes":5242880}],)"
            R"("ranks":[{"rank":0,"pid":100,"node":0,"promised_bytes":115343360,)"
            R"("ledger_peak_bytes":113246208,"kernel_peak_bytes":116391936,)"
            R"("baseline_bytes":2097152,"unexplained_bytes":1048576,)"
            R"("page_cache_peak_bytes":16777216,"storage_read_bytes":104857600,)"
            R"("exchanged_bytes":3},{"rank":1,"pid":101,"node":0,"promised_bytes":2097153,)"
            R"("ledger_peak_bytes":1048576,"kernel_peak_bytes":2097152,"baseline_bytes":2097152,)"
            R"("unexplained_bytes":-1048576,"page_cache_peak_bytes":0,)"
            R"("storage_read_bytes":104857600,"exchanged_bytes":3},{"rank":2,"pid":102,"node":1,)"
            R"("promised_bytes":115343360,"ledger_peak_bytes":113246208,)"
            R"("kernel_peak_bytes":115343360,"baseline_bytes":2097152,"unexplained_bytes":0,)"
            R"("page_cache_peak_bytes":16777216,"storage_read_bytes":104857600,)"
            R"("exchanged_bytes":3}]})");
}

TEST(LoadReport, JsonHasTheCheckAndTheDigest) {
  LoadReport report = small_load();
  report.ranks.clear();
  report.promise = report.full_per_rank = {};
  report.checked = true;
  report.digest = 0xab;
  report.budget = Budget{5, "flag"};
  EXPECT_EQ(load_json(report),
            R"({"checkpoint":{"bytes":314572800,"tensors":7,"files":2},)"
            R"("warnings":[],"strategy":"own-shard",)"
            R"("elapsed_s":1.25,"check_s":0.5,"bytes_loaded":0,"storage_read_bytes":0,)"
            R"("exchanged_bytes":0,"coverage":"proven","check":"ok","digest":"00000000000000ab",)"
            R"("compared_bytes":0,"not_compared":[],"full_per_rank_bytes":0,)"
            R"("budget":{"bytes":5,"source":"flag"},"nodes":[],"ranks":[]})");
}

TEST(LoadReport, HasTheWarningsOfTheCheckpoint) {
  LoadReport report = small_load();
  report.checkpoint.warnings = {"config.json: \"x\"", "two"};
  EXPECT_NE(load_json(report).find(R"("warnings":["config.json: \"x\"","two"])"),
            std::string::npos);
  EXPECT_TRUE(load_text(report).ends_with("warning: config.json: \"x\"\nwarning: two\n"));
}

TEST(LoadReport, TextHasPromiseAndOutcome) {
  LoadReport report = small_load();
  report.checked = true;
  report.digest = 0xab;
  report.budget = Budget{kGiB, "MemAvailable"};
  EXPECT_EQ(load_text(report),
            "own-shard: 300.00 MiB loaded in 1.25 s, 300.00 MiB read (1.000 x checkpoint); "
            "every element loaded once\n"
            "values ok (0.50 s)\n"
            "\n"
            "            predicted      charged     measured       not explained   page cache\n"
            "rank 0     110.00 MiB   108.00 MiB   111.00 MiB            1.00 MiB    16.00 MiB\n"
            "rank 1       2.00 MiB     1.00 MiB     2.00 MiB  0 B (shared pages)             \n"
            "rank 2     110.00 MiB   108.00 MiB   110.00 MiB                 0 B    16.00 MiB\n"
            "node 0     120.00 MiB                118.00 MiB                                 \n"
            "node 1     118.00 MiB                115.00 MiB                                 \n"
            "if each rank read the whole model: 720.00 MiB per node predicted, 600.00 MiB more\n"
            "\n"
            "budget 1.00 GiB per node (MemAvailable)\n"
            "digest 00000000000000ab\n");
}

// A node's kernel_peak_bytes adds up peaks that its ranks may have had at different times;
// cgroup_peak_bytes is the cgroup's highest usage at one time.
TEST(LoadReport, EachNodeHasThePeakOfTheRunsCgroup) {
  LoadReport report = small_load();
  report.cgroup_peak_bytes = 117 * kMiB;
  const std::string json = load_json(report);
  for (const char* kernel : {"123731968", "120586240"}) {
    const std::string members = fmt::format(
        R"("kernel_peak_bytes":{},"cgroup_peak_bytes":122683392,"launcher_bytes":5242880)", kernel);
    EXPECT_NE(json.find(members), std::string::npos) << json;
  }
  EXPECT_NE(
      load_text(report).find("\ncgroup   117.00 MiB at most at one time, page cache included\n"),
      std::string::npos);
}

TEST(LoadReport, ANodesPeakIsTheLaunchersIfItHeldMoreAlone) {
  LoadReport report = small_load();
  report.launcher.alone = 900 * kMiB;
  EXPECT_NE(load_json(report).find(R"("kernel_peak_bytes":943718400)"), std::string::npos);
}

TEST(LoadReport, TextLeavesOutCheckDigestAndBudgetIfUnused) {
  LoadReport report = small_load();
  report.ranks.resize(1);               // reads 100 MiB
  report.checkpoint.bytes = 80 * kMiB;  // 100 / 80 = 1.250
  EXPECT_EQ(load_text(report),
            "own-shard: 100.00 MiB loaded in 1.25 s, 100.00 MiB read (1.250 x checkpoint); "
            "every element loaded once\n"
            "\n"
            "            predicted      charged     measured       not explained   page cache\n"
            "rank 0     110.00 MiB   108.00 MiB   111.00 MiB            1.00 MiB    16.00 MiB\n"
            "node 0     120.00 MiB                116.00 MiB                                 \n"
            "node 1     118.00 MiB                  5.00 MiB                                 \n"
            "if each rank read the whole model: 720.00 MiB per node predicted, 600.00 MiB more\n");
}

TEST(LoadReport, TextLeavesOutFullPerRankIfItIsNotMore) {
  LoadReport report = small_load();
  report.full_per_rank = report.promise;
  EXPECT_EQ(load_text(report).find("whole model"), std::string::npos);
}

TEST(RankOutcome, UnexplainedIsNegativeIfLedgerAndBaselineExceedTheKernel) {
  const RankOutcome outcome = outcome_of(1, kMiB, 2 * kMiB);
  // Kernel 2 MiB - ledger 1 MiB - baseline 2 MiB.
  EXPECT_EQ(outcome.unexplained_bytes(), -static_cast<int64_t>(kMiB));
  LoadReport report = small_load();
  report.ranks = {outcome};
  EXPECT_NE(load_json(report).find("\"unexplained_bytes\":-1048576"), std::string::npos);
}

TEST(ErrorReport, AbsentFactsAreLeftOut) {
  EXPECT_EQ(error_json(Error(Category::usage, "no such flag")),
            R"({"error":{"category":"USAGE","code":2,"message":"USAGE: no such flag"}})");
}

TEST(ErrorReport, EveryFactIsAField) {
  Facts facts{.file = "a.safetensors", .tensor = "w\n"};
  facts.offset = 0;
  facts.rank = 0;
  facts.culprit_rank = 2;
  facts.culprit_pid = 4711;
  facts.expected = "8 bytes";
  facts.got = "7 bytes";
  EXPECT_EQ(error_json(Error(Category::format_trunc, "the file ended", facts)),
            R"-({"error":{"category":"FORMAT.TRUNC","code":10,)-"
            R"-("message":"FORMAT.TRUNC: the file ended (file a.safetensors, tensor w\\x0a, )-"
            R"-(offset 0, rank 0, culprit rank 2, pid 4711, expected 8 bytes, got 7 bytes)",)-"
            R"-("file":"a.safetensors","tensor":"w\n","offset":0,"rank":0,"culprit_rank":2,)-"
            R"-("culprit_pid":4711,"expected":"8 bytes","got":"7 bytes"}})-");
}

TEST(ErrorReport, ARefusalsFiguresAreIntegers) {
  Facts facts{.expected = "1000", .got = "18446744073709551615"};
  facts.shortfall_bytes = 18446744073709550615ULL;
  facts.owners = {{"shards", 9}, {"staging", 1}};
  EXPECT_EQ(error_json(Error(Category::budget, "too little", facts)),
            R"-({"error":{"category":"BUDGET","code":15,)-"
            R"-("message":"BUDGET: too little",)-"
            R"-("shortfall_bytes":18446744073709550615,"expected":1000,)-"
            R"-("got":18446744073709551615,"owners":[{"purpose":"shards","bytes":9},)-"
            R"-({"purpose":"staging","bytes":1}]}})-");
}

}  // namespace
}  // namespace modicum
