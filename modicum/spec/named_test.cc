#include "modicum/spec/named.h"

#include <gtest/gtest.h>

#include "modicum/base/base.h"

namespace modicum {
namespace {

TEST(IndexNamed, FindsANameAndListsAllNamesForATypo) {
  const std::vector<std::string> names = {"fsdp2", "hsdp", "none"};
  EXPECT_EQ(index_named("layout", "none", names), 2U);
  try {
    index_named("layout", "fsdp9", names);
    FAIL() << "expected USAGE";
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), Category::usage);
    EXPECT_EQ(error.what_happened(), "unknown layout 'fsdp9'; nearest is 'fsdp2'");
    EXPECT_EQ(error.facts().expected, "fsdp2, hsdp or none");
    EXPECT_EQ(error.facts().got, "fsdp9");
  }
}

}  // namespace
}  // namespace modicum
