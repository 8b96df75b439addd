// In a load, a save, a resume, a conversion and a removal of old checkpoints, the n-th call of the
// file system fails, for every n; and a save or a conversion is killed, or the power fails, at
// every n-th call. The error has the category of its cause and names a file, and nothing is left
// behind.
//
// Catches: an error is swallowed, or has another category; a checkpoint is visible before it is
// complete; an old checkpoint is changed; files of dead saves are kept; EIO is retried; a short
// read counts as complete.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <ostream>
#include <set>
#include <string>
#include <vector>

#include "modicum/cli/program_double.h"
#include "modicum/io/file_doubles.h"

namespace modicum {
namespace {

// With shards of dim 1 both ranks have parts of each row, which one rank gathers and writes.
const std::string kTrained =
    "--optimizer adamw:fp32-split --steps 1 --ranks 2 --shard-dim 1 --staging 300KiB --threads 1";
const std::string kSmall = "--staging 300KiB --threads 1";

// The content of all files below a directory, by relative path.
std::map<std::string, std::string> tree_of(MemoryFileSystem& files, const std::string& directory) {
  std::map<std::string, std::string> tree;
  for (const std::string& name : files.list(directory)) {
    const std::string path = join_path(directory, name);
    if (!files.is_directory(path)) {
      tree[name] = files.get(path);
      continue;
    }
    for (auto& [below, bytes] : tree_of(files, path)) tree[join_path(name, below)] = bytes;
  }
  return tree;
}

struct Fault {
  std::string name;  // as in the message of the error
  int error = 0;
  int code = 0;
  std::string category;
};
const std::vector<Fault> kFaults = {{"EIO", EIO, 13, "IO"}, {"ENOSPC", ENOSPC, 14, "NOSPACE"}};
void PrintTo(const Fault& fault, std::ostream* out) { *out << fault.name; }

// Whether the kernel can refuse this call for lack of space.
bool needs_space(const IoCall& call) {
  static const std::set<std::string> kCalls = {
      "write",           "allocate",         "truncate",       "sync",
      "close",           "create",           "rename",         "rename_new",
      "start_writeback", "finish_writeback", "make_directory", "lock",
      "sync_directory"};
  return kCalls.contains(call.what);
}

class Faults : public testing::TestWithParam<Fault> {
 protected:
  Faults() {
    files.put("/model/model-00001-of-00002.safetensors",
              checkpoint_file({{"a.weight", "BF16", {6, 8}}, {"b.weight", "BF16", {5, 4}}}));
    files.put("/model/model-00002-of-00002.safetensors",
              checkpoint_file({{"c.weight", "F32", {7, 4}}, {"norm", "BF16", {9}}}));
    files.put("/model/model.safetensors.index.json",
              R"({"metadata":{"total_size":266},"weight_map":{)"
              R"("a.weight":"model-00001-of-00002.safetensors",)"
              R"("b.weight":"model-00001-of-00002.safetensors",)"
              R"("c.weight":"model-00002-of-00002.safetensors",)"
              R"("norm":"model-00002-of-00002.safetensors"}})");
    files.put("/model/config.json", R"({"model_type": "llama", "torch_dtype": "bfloat16"})");
  }

  // Runs the program with a fault at the n-th call, for every n at which a run without a fault
  // makes a call that can have the fault. `line` and `judge` get n; `judge` also gets the result
  // and the call that has failed, which can be another one, since the order of ranks varies.
  void at_every_call(const Fault& fault, FunctionRef<std::string(int64_t n)> line,
                     FunctionRef<void(int64_t n, const RunResult&, const IoCall&)> judge) {
    RecordingFileSystem whole(files);
    EXPECT_EQ(ThreadedProgram(whole).run(line(0)).code, 0) << line(0);
    judge(0, {.out = "{}"}, {});
    const std::vector<IoCall> all = whole.calls();
    for (size_t n = 1; n <= all.size(); ++n) {
      if (fault.error == ENOSPC && !needs_space(all[n - 1])) continue;
      RecordingFileSystem recording(files, static_cast<int64_t>(n));
      recording.fail_with(fault.error);
      const RunResult ended = ThreadedProgram(recording).run(line(n) + " --json");
      const std::vector<IoCall> calls = recording.calls();
      const IoCall call = n <= calls.size() ? calls[n - 1] : IoCall();
      SCOPED_TRACE(fmt::format("call {}, {} of '{}': exit {} {}", n, call.what, call.file,
                               ended.code, ended.err));
      judge(n, ended, call);
      if (HasFailure()) return;
    }
    EXPECT_GT(all.size(), 10U);
  }

  static void expect_named(const Fault& fault, const RunResult& ended) {
    EXPECT_EQ(ended.code, fault.code);
    const Document error = ended.error();
    EXPECT_EQ(error["category"].text(), fault.category);
    EXPECT_FALSE(error["file"].text().empty());
    EXPECT_NE(error["message"].text().find(fault.name), std::string::npos);
  }

  // Nothing but these checkpoints, and the file that names the newest one, is in the root. A
  // directory or file in flight without an owner file is of the process in its name: this one,
  // which lives.
  void expect_steps(const std::string& root, std::vector<std::string> names) {
    for (const std::string& name : files.list(root)) {
      if (!name.starts_with(".partial-") && !name.starts_with(".latest-")) continue;
      EXPECT_FALSE(files.exists(root + "/" + name + "/.owner")) << name;
      files.remove_tree(root + "/" + name);
    }
    names.insert(names.begin(), "latest");
    EXPECT_EQ(files.list(root), names);
    EXPECT_EQ(program.run("verify -q " + root).code, 0);
  }

  MemoryFileSystem files;
  const ThreadedProgram program{files};
};

INSTANTIATE_TEST_SUITE_P(All, Faults, testing::ValuesIn(kFaults),
                         [](const testing::TestParamInfo<Fault>& param_info) {
                           return param_info.param.name;
                         });

// ---- loads

TEST_F(Faults, AFailingCallOfALoadNamesItsFile) {
  for (const char* strategy :
       {"own-shard", "node-reader", "replica-striped", "rank0-broadcast", "full-per-rank"}) {
    at_every_call(
        kFaults[0],
        [&](int64_t) {
          return fmt::format("load /model --ranks 2 --strategy {} {}", strategy, kSmall);
        },
        [](int64_t n, const RunResult& ended, const IoCall& call) {
          if (n == 0 || call.what.empty()) return;
          if (ended.code == 0) {  // then its members are unknown, and there is a warning
            EXPECT_EQ(call.file, "config.json");
            EXPECT_FALSE(ended.json()["warnings"].elements().empty());
            return;
          }
          expect_named(kFaults[0], ended);
          EXPECT_EQ(ended.error()["file"].text(), call.file);
        });
  }
}

TEST_F(Faults, AFailedLoadLeavesNoDump) {
  at_every_call(
      kFaults[1],
      [](int64_t) { return "load /model --ranks 2 --check values --dump /dump " + kSmall; },
      [this](int64_t, const RunResult& ended, const IoCall&) {
        EXPECT_EQ(files.exists("/dump"), ended.code == 0);
        if (ended.code == 0) return files.remove_tree("/dump");
        expect_named(kFaults[1], ended);
      });
}

// The file is truncated at the n-th call of the load, by another process.
TEST_F(Faults, AFileThatIsTruncatedMeanwhileIsAnError) {
  const std::string name = "model-00001-of-00002.safetensors";
  const std::string whole = files.get("/model/" + name);
  int refused = 0;
  for (int64_t n = 1;; ++n) {
    RecordingFileSystem recording(files);
    recording.before_call(n, [&] { files.put("/model/" + name, whole.substr(0, 300)); });
    const RunResult ended =
        ThreadedProgram(recording).run("load /model --ranks 2 --json " + kSmall);
    files.put("/model/" + name, whole);
    if (static_cast<int64_t>(recording.calls().size()) < n) break;
    SCOPED_TRACE(fmt::format("call {}: exit {} {}", n, ended.code, ended.err));
    if (ended.code == 0) continue;  // the file had been read
    ++refused;
    EXPECT_TRUE(ended.code == 10 || ended.code == 20);  // FORMAT.TRUNC or CONFLICT
    EXPECT_EQ(ended.error()["file"].text(), name);
  }
  EXPECT_GT(refused, 10);
}

// ---- saves

TEST_P(Faults, AFailingCallNeverDamagesACheckpoint) {
  program.succeed("save /model /root --step 1 " + kTrained);
  const auto old = tree_of(files, "/root/step-1");
  int failed = 0;
  at_every_call(
      GetParam(),
      [](int64_t n) { return fmt::format("save /model /root --step {} {}", n + 2, kTrained); },
      [&](int64_t n, const RunResult& ended, const IoCall&) {
        EXPECT_EQ(tree_of(files, "/root/step-1"), old);
        const std::string saved = fmt::format("/root/step-{}", n + 2);
        if (ended.code == 0) {
          EXPECT_TRUE(files.exists(saved));
        } else {
          ++failed;
          expect_named(GetParam(), ended);
          EXPECT_FALSE(files.exists(saved));
        }
        EXPECT_EQ(program.run("verify -q /root").code, 0);
        if (files.exists(saved)) files.remove_tree(saved);
      });
  EXPECT_GT(failed, 20);
  program.succeed("save /model /root --step 10000 " + kTrained);
  expect_steps("/root", {"step-1", "step-10000"});
}

TEST_P(Faults, ARemovalOfOldCheckpointsKeepsTheNewest) {
  int64_t last = 0;
  const auto has = [&](int64_t step) {
    return files.exists(fmt::format("/root/step-{}/COMMIT", step));
  };
  at_every_call(
      GetParam(),
      [&](int64_t) {
        while (last < 3 || !has(last - 2)) {
          program.succeed(fmt::format("save /model /root --step {} {}", ++last, kSmall));
        }
        return fmt::format("save /model /root --keep 2 --step {} {}", last + 1, kSmall);
      },
      [&](int64_t n, const RunResult& ended, const IoCall&) {
        // A save that fails removes nothing. One that succeeds has its own step, and warns if it
        // could not remove another one.
        EXPECT_TRUE(has(last));
        EXPECT_EQ(has(last + 1), ended.code == 0);
        EXPECT_TRUE(ended.code == 0 || (has(last - 1) && has(last - 2)));
        if (ended.code != 0) return expect_named(GetParam(), ended);
        const bool is_warned = n > 0 && !ended.json()["warnings"].elements().empty();
        EXPECT_TRUE(is_warned || !has(last - 1));
        EXPECT_EQ(program.run("verify -q /root").code, 0);
        ++last;
      });
}

// ---- resumes

TEST_F(Faults, AFailingCallOfAResumeIsNoReasonForAnOlderStep) {
  program.succeed("save /model /root --step 1 " + kTrained);
  program.succeed("save /model /root --step 2 " + kTrained);
  const std::string line = "resume /root --steps 1 --ranks 2 " + kSmall;
  const std::string right = program.succeed(line)["state_digest"].text();
  at_every_call(
      kFaults[0], [&](int64_t) { return line; },
      [&](int64_t n, const RunResult& ended, const IoCall&) {
        if (n == 0) return;
        if (ended.code != 0) return expect_named(kFaults[0], ended);
        EXPECT_EQ(ended.json()["resumed"]["step"].number(), 2);
        EXPECT_EQ(ended.json()["state_digest"].text(), right);
      });
  expect_steps("/root", {"step-1", "step-2"});
}

// ---- conversions

TEST_P(Faults, AFailedConversionIsNotVisibleAndGoesOn) {
  const std::string words = " --dtype float32 --shard-size 200 " + kSmall;
  program.succeed("convert /model /right" + words);
  const auto right = tree_of(files, "/right");
  at_every_call(
      GetParam(), [&](int64_t) { return "convert /model /work/out" + words; },
      [&](int64_t, const RunResult& ended, const IoCall&) {
        if (ended.code != 0) {
          expect_named(GetParam(), ended);
          EXPECT_FALSE(files.exists("/work/out"));
          program.succeed("convert /model /work/out" + words);
        }
        EXPECT_EQ(tree_of(files, "/work/out"), right);
        for (const std::string& name : files.list("/work")) {
          EXPECT_TRUE(name == "out" || name == ".out.journal") << name;  // whose removal has failed
        }
        files.remove_tree("/work/out");
      });
}

// ---- kills and power cuts

// From the n-th call on no call reaches the files. With `loses` all bytes that were not synced are
// lost, too.
class Deaths : public Faults {
 protected:
  void at_every_call_dies(FunctionRef<std::string(int64_t n)> line,
                          FunctionRef<void(int64_t n)> judge) {
    for (const bool loses : {false, true}) {
      for (int64_t n = 1;; ++n) {
        RecordingFileSystem recording(files);
        recording.cut_power_at(n);
        const RunResult ended = ThreadedProgram(recording).run(line(n));
        const bool has_died = static_cast<int64_t>(recording.calls().size()) >= n;
        if (loses && has_died) files.lose_unsynced();
        SCOPED_TRACE(fmt::format("call {}, power cut {}: {}", n, loses, ended.err));
        judge(n);
        if (HasFailure()) return;
        if (!has_died) break;
      }
    }
  }
};

TEST_F(Deaths, OfASaveLeaveIntactSteps) {
  program.succeed("save /model /root --step 1 " + kTrained);
  const auto old = tree_of(files, "/root/step-1");
  at_every_call_dies(
      [](int64_t n) { return fmt::format("save /model /root --step {} {}", n + 2, kTrained); },
      [&](int64_t n) {
        EXPECT_EQ(tree_of(files, "/root/step-1"), old);
        EXPECT_EQ(program.run("verify -q /root").code, 0);
        // The next save removes what the dead one has left.
        files.remove_tree(fmt::format("/root/step-{}", n + 2));
        program.succeed("save /model /root --step 10000 " + kSmall);
        expect_steps("/root", {"step-1", "step-10000"});
        files.remove_tree("/root/step-10000");
        files.sync_directory("/root");
      });
}

TEST_F(Deaths, OfAConversionDoNotEndIt) {
  const std::string words = " --dtype float32 --shard-size 200 " + kSmall;
  program.succeed("convert /model /right" + words);
  const auto right = tree_of(files, "/right");
  files.put("/work/other", "");
  at_every_call_dies([&](int64_t) { return "convert /model /work/out" + words; },
                     [&](int64_t) {
                       const bool is_published = files.exists("/work/out");
                       if (!is_published) program.succeed("convert /model /work/out" + words);
                       EXPECT_EQ(tree_of(files, "/work/out"), right);
                       if (!is_published) {
                         EXPECT_EQ(files.list("/work"), (std::vector<std::string>{"other", "out"}));
                       }
                       files.remove_tree("/work/out");
                     });
}

}  // namespace
}  // namespace modicum
