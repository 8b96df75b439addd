// Help texts: --help lists the flags that most runs need, --help-all every flag that the parser
// accepts. A flag is accepted only where it acts.
//
// Catches: the help of a verb lists a flag that does nothing there, or lacks one that is accepted;
// a flag that does nothing is accepted; a notation lacks its definition; a line is wider than a
// terminal; the help of `load` is longer than a screen.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "modicum/cli/program_double.h"
#include "modicum/cli/verbs.h"
#include "modicum/io/file_doubles.h"

namespace modicum {
namespace {

using Names = std::set<std::string>;

class Help : public testing::Test {
 protected:
  std::string help(std::string_view verb, std::string_view flag = "--help") const {
    const RunResult ended = program.run(fmt::format("{} {}", verb, flag));
    EXPECT_EQ(ended.code, 0) << verb;
    return ended.out;
  }
  // The flags of a help text, and whether they take a value.
  static std::map<std::string, bool> flags_in(const std::string& help) {
    static const std::regex kFlag(R"(^  (?:-\w,)?(--[\w-]+)( \S)?)");
    std::map<std::string, bool> flags;
    for (const std::string& line : lines_of(help)) {
      std::smatch found;
      if (std::regex_search(line, found, kFlag)) flags[found[1]] = found[2].matched;
    }
    return flags;
  }
  // Whether the parser of a verb knows a flag. No verb runs: another flag is unknown.
  bool accepts(std::string_view verb, const std::string& flag, bool takes_value) const {
    const std::string word = takes_value ? flag + "=1" : flag;
    const RunResult ended =
        program.run(std::vector<std::string>{std::string(verb), word, "--no-such-flag"});
    EXPECT_EQ(ended.code, 2) << verb << " " << word;
    return !has(ended.err, "unexpected '" + flag);
  }

  MemoryFileSystem files;
  const ThreadedProgram program{files};
};

TEST_F(Help, FitsATerminal) {
  for (const Verb& verb : verbs()) {
    for (const char* flag : {"--help", "--help-all"}) {
      for (const std::string& line : lines_of(help(verb.name, flag))) {
        EXPECT_LE(line.size(), 100U) << line;
      }
    }
  }
}

TEST_F(Help, OfLoadFitsAScreen) {
  EXPECT_LE(lines_of(help("load")).size(), 45U);
  for (const Verb& verb : verbs()) EXPECT_LE(lines_of(help(verb.name)).size(), 65U) << verb.name;
}

TEST_F(Help, ListsOnlyFlagsThatAct) {
  const std::map<std::string, Names> verbs_of = {
      {"--threads",
       {"synth", "plan", "load", "rehearse", "save", "resume", "convert", "diff", "step"}},
      {"--progress", {"synth", "load", "rehearse", "save", "resume", "convert", "diff", "step"}},
      {"--budget",
       {"inspect", "synth", "plan", "load", "rehearse", "save", "resume", "verify", "convert",
        "diff", "step", "doctor"}},
      {"--verbose", {"inspect", "doctor"}}};
  for (const auto& [flag, acting] : verbs_of) {
    for (const Verb& verb : verbs()) {
      const bool acts = acting.contains(std::string(verb.name));
      EXPECT_EQ(flags_in(help(verb.name)).contains(flag), acts) << verb.name << " " << flag;
      const bool is_accepted = acts || flag == "--verbose";
      EXPECT_EQ(accepts(verb.name, flag, flag != "--verbose"), is_accepted)
          << verb.name << " " << flag;
    }
  }
}

TEST_F(Help, AllListsTheFlagsThatTheParserAccepts) {
  std::map<std::string, bool> known;
  std::map<std::string_view, std::map<std::string, bool>> flags_of;
  for (const Verb& verb : verbs()) {
    flags_of[verb.name] = flags_in(help(verb.name, "--help-all"));
    known.insert(flags_of[verb.name].begin(), flags_of[verb.name].end());
    for (const char* flag : {"--json", "--quiet", "--verbose", "--help", "--help-all"}) {
      EXPECT_TRUE(flags_of[verb.name].contains(flag)) << verb.name << " " << flag;
    }
    for (const auto& [flag, takes_value] : flags_in(help(verb.name))) {
      EXPECT_TRUE(flags_of[verb.name].contains(flag)) << verb.name << " " << flag;
    }
  }
  EXPECT_GT(known.size(), 60U);
  for (const auto& [flag, takes_value] : known) {
    if (flag == "--help" || flag == "--help-all") continue;
    for (const auto& [verb, flags] : flags_of) {
      EXPECT_EQ(accepts(verb, flag, takes_value), flags.contains(flag)) << verb << " " << flag;
    }
  }
}

TEST_F(Help, LeavesRareFlagsToHelpAll) {
  for (const char* flag : {"--untie", "--baseline", "--oversubscribe", "--round-robin", "--experts",
                           "--destination", "--digest", "--expect-digest", "--dump", "--check"}) {
    EXPECT_FALSE(has(help("load"), flag)) << flag;
    EXPECT_TRUE(has(help("load", "--help-all"), flag)) << flag;
  }
  EXPECT_FALSE(has(help("synth"), "--edges"));
  EXPECT_TRUE(has(help("plan"), "--baseline"));  // whoever plans for torch needs it
}

TEST_F(Help, HasFlagsInGroupsAndDefinesTheirNotation) {
  const std::string text = help("load");
  for (const char* group :
       {"Checkpoint:", "Ranks and layout:", "Optimizer:", "Host memory and threads:", "Output:"}) {
    EXPECT_TRUE(has(text, fmt::format("\n\n{}\n", group))) << group;
  }
  for (const Verb& verb : verbs()) {
    const std::string all = help(verb.name, "--help-all");
    for (const char* kind : {"SIZE", "REGEX", "DTYPE", "FORMAT"}) {
      const bool is_used = std::regex_search(all, std::regex(fmt::format("[ :]{}[| \n]", kind)));
      EXPECT_EQ(has(all, fmt::format("\n{} ", kind)), is_used) << verb.name << " " << kind;
    }
  }
}

}  // namespace
}  // namespace modicum
