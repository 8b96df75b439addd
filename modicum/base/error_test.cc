#include "modicum/base/error.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace modicum {
namespace {

TEST(Error, EveryCategoryHasAUniqueNameAndAnExitCode) {
  std::set<std::string_view> names;
  for (int i = 0; i < static_cast<int>(Category::count); ++i) {
    const auto category = static_cast<Category>(i);
    EXPECT_FALSE(category_name(category).empty()) << i;
    EXPECT_TRUE(names.insert(category_name(category)).second) << category_name(category);
    EXPECT_GT(exit_code(category), 0) << category_name(category);
    EXPECT_LE(exit_code(category), 130) << category_name(category);
  }
}

// The enum and the table of names are two lists. Of FORMAT and INDEX, the first and the last
// category are compared; of the rest, every one.
TEST(Error, TheTableIsInTheOrderOfTheEnum) {
  struct CategoryRow {
    Category category;
    std::string_view name;
    int exit_code;
  };
  const CategoryRow all[] = {
      {Category::format_trunc, "FORMAT.TRUNC", 10},
      {Category::format_pickle, "FORMAT.PICKLE", 10},
      {Category::index_json, "INDEX.JSON", 11},
      {Category::index_ambiguous, "INDEX.AMBIGUOUS", 11},
      {Category::integrity, "INTEGRITY", 12},
      {Category::io, "IO", 13},
      {Category::no_space, "NOSPACE", 14},
      {Category::budget, "BUDGET", 15},
      {Category::no_memory, "NOMEM", 16},
      {Category::peer, "PEER", 17},
      {Category::stall, "STALL", 18},
      {Category::uncommitted, "UNCOMMITTED", 19},
      {Category::conflict, "CONFLICT", 20},
      {Category::preempted, "PREEMPTED", 21},
      {Category::unsupported, "UNSUPPORTED", 2},
      {Category::mismatch, "MISMATCH", 2},
      {Category::usage, "USAGE", 2},
      {Category::internal, "INTERNAL", 70},
      {Category::cancelled, "CANCELLED", 130},
  };
  for (const CategoryRow& wanted : all) {
    EXPECT_EQ(category_name(wanted.category), wanted.name);
    EXPECT_EQ(exit_code(wanted.category), wanted.exit_code) << wanted.name;
  }
}

TEST(Error, OnlyFilesThatAreWrongAreDamaged) {
  for (int i = 0; i < static_cast<int>(Category::count); ++i) {
    const std::string_view name = category_name(static_cast<Category>(i));
    const bool is_damaged = name.starts_with("FORMAT.") || name.starts_with("INDEX.") ||
                            name == "INTEGRITY" || name == "UNCOMMITTED";
    EXPECT_EQ(is_damage(static_cast<Category>(i)), is_damaged) << name;
  }
}

TEST(Error, TheMessageListsTheFacts) {
  const Error error(Category::format_size, "the tensor does not fit",
                    {.file = "a.safetensors",
                     .tensor = "w",
                     .offset = 0,
                     .rank = 3,
                     .culprit_rank = 1,
                     .culprit_pid = 77,
                     .expected = "8",
                     .got = "9"});
  EXPECT_STREQ(error.what(),
               "FORMAT.SIZE: the tensor does not fit (file a.safetensors, tensor w, offset 0, "
               "rank 3, culprit rank 1, pid 77, expected 8, got 9)");
  EXPECT_EQ(error.category(), Category::format_size);
  EXPECT_EQ(error.what_happened(), "the tensor does not fit");
  EXPECT_EQ(error.facts().offset, 0U);
}

TEST(Error, AbsentFactsAreNotPrinted) {
  EXPECT_STREQ(Error(Category::usage, "no model given").what(), "USAGE: no model given");
}

TEST(Error, NamesFromFilesStayOnOneLine) {
  const Error error(Category::format_name, "a bad name", {.tensor = "a\nb\x1b[31m\x7f"});
  EXPECT_STREQ(error.what(), "FORMAT.NAME: a bad name (tensor a\\x0ab\\x1b[31m\\x7f)");
  EXPECT_EQ(error.facts().tensor, "a\nb\x1b[31m\x7f") << "the field keeps the stored name";
}

TEST(Error, LongNamesAreTruncated) {
  EXPECT_EQ(printable(std::string(256, 'a')), std::string(256, 'a'));
  EXPECT_EQ(printable(std::string(257, 'a')), std::string(256, 'a') + "...");
  EXPECT_LE(printable(std::string(1000, '\n')).size(), 256U + 6);
}

TEST(Error, NamingTensorAddsAMissingTensor) {
  const auto line_of = [](const Facts& facts) -> std::string {
    try {
      naming_tensor("outer", [&] { fail(Category::io, "no", facts); });
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(line_of({.file = "f", .got = "0"}), "IO: no (file f, tensor outer, got 0)");
  EXPECT_EQ(line_of({.tensor = "inner"}), "IO: no (tensor inner)");
}

TEST(Error, NamingFileAddsAMissingFileAndReturnsTheResult) {
  const auto line_of = [](const Facts& facts) -> std::string {
    try {
      naming_file("outer", [&] { fail(Category::io, "no", facts); });
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(line_of({.tensor = "t", .got = "0"}), "IO: no (file outer, tensor t, got 0)");
  EXPECT_EQ(line_of({.file = "inner"}), "IO: no (file inner)");
  EXPECT_EQ(naming_file("outer", [] { return 7; }), 7);
}

TEST(Error, AFailedAssertionNamesItsConditionAndLine) {
  try {
    MODICUM_ASSERT(1 + 1 == 3);
    FAIL() << "expected an error";
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), Category::internal);
    EXPECT_NE(error.what_happened().find("1 + 1 == 3"), std::string::npos);
    EXPECT_NE(error.what_happened().find("error_test.cc"), std::string::npos);
  }
  EXPECT_NO_THROW(MODICUM_ASSERT(1 + 1 == 2));
}

}  // namespace
}  // namespace modicum
