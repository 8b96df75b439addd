// The journal of a conversion that was killed, and that may be damaged.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "modicum/base/base.h"
#include "modicum/checkpoint/checkpoint.h"
#include "modicum/io/file_doubles.h"

namespace modicum {
namespace {

class DamagedJournal : public testing::Test {
 protected:
  static constexpr const char* kJournal = "/.out.journal";

  DamagedJournal() {
    ConversionJournal journal = begun();
    for (const char* name : {"a", "b"}) {
      write_durably(files, join_path(journal.directory(), name), "four");
      journal.add({name, 4, 7, {}});
    }
  }

  ConversionJournal begun() {
    Hasher hasher;
    hasher.add("inputs");
    return {files, "/out", {hasher.digest(), SaveOwner{"host", 7, 11}, [](const SaveOwner&) {
                              return true;
                            }}};
  }
  void replace(const std::string& from, const std::string& to) {
    std::string text = files.get(kJournal);
    const size_t at = text.find(from);
    ASSERT_NE(at, std::string::npos) << text;
    files.put(kJournal, text.replace(at, from.size(), to));
  }

  MemoryFileSystem files;
};

TEST_F(DamagedJournal, AFileOfAnotherSizeIsMadeAgain) {
  ConversionJournal journal = begun();
  EXPECT_EQ(journal.finished("a", 5), nullptr);
  EXPECT_EQ(journal.finished("c", 4), nullptr);
  ASSERT_NE(journal.finished("b", 4), nullptr);
  journal.forget("a");
  EXPECT_EQ(files.list(journal.directory()), std::vector<std::string>{"b"});
  journal.add({"c", 1, 1, {}});
  const std::vector<ConvertedFile> recorded = journal.recorded();
  ASSERT_EQ(recorded.size(), 2);
  EXPECT_EQ(recorded[0].name, "b");
}

// Catches: a journal without names, of which every entry takes many times its text in memory.
TEST_F(DamagedJournal, OneWithoutNamesStartsOver) {
  for (const auto& [from, to] :
       {std::pair(R"("name":"a",)", ""), std::pair("\"files\":[", "\"files\":[{},")}) {
    const std::string before = files.get(kJournal);
    for (const char* name : {"a", "b"}) files.put(std::string("/.out.partial/") + name, "four");
    replace(from, to);
    ConversionJournal journal = begun();
    EXPECT_EQ(journal.finished("b", 4), nullptr);
    EXPECT_EQ(files.list(journal.directory()), std::vector<std::string>());
    files.put(kJournal, before);
  }
}

TEST_F(DamagedJournal, OneThatIsTooLongStartsOver) {
  files.put(kJournal, files.get(kJournal) + std::string(kLongestJournal, ' '));
  ConversionJournal journal = begun();
  EXPECT_EQ(journal.finished("a", 4), nullptr);
  EXPECT_EQ(files.list(journal.directory()), std::vector<std::string>());
}

TEST_F(DamagedJournal, OneThatWouldBeTooLongIsNotWritten) {
  ConversionJournal journal = begun();
  const std::string before = files.get(kJournal);
  try {
    journal.add({std::string(kLongestJournal, 'c'), 1, 1, {}});
    FAIL() << "it was written";
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), Category::unsupported);
    EXPECT_EQ(error.facts().file, ".out.journal");
  }
  EXPECT_EQ(files.get(kJournal), before);
}

}  // namespace
}  // namespace modicum
