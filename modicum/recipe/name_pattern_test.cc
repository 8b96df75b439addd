#include "modicum/recipe/name_pattern.h"

#include <gtest/gtest.h>

namespace modicum {
namespace {

std::string refusal(std::string_view expression) {
  try {
    NamePattern("--keep-fp32", expression);
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), Category::usage);
    EXPECT_NE(error.what_happened().find("--keep-fp32"), std::string::npos);
    EXPECT_FALSE(error.facts().got.empty());
    return error.what_happened();
  }
  return "";
}

TEST(NamePattern, IsSearchedAndNotAnchored) {
  const NamePattern norms("--keep-fp32", "norm");
  EXPECT_TRUE(norms.finds("model.norm.weight"));
  EXPECT_FALSE(norms.finds("model.embed_tokens.weight"));
  const NamePattern whole("--keep-fp32", "^lm_head\\.weight$");
  EXPECT_TRUE(whole.finds("lm_head.weight"));
  EXPECT_FALSE(whole.finds("model.lm_head.weight"));
  EXPECT_FALSE(whole.finds("lm_head_weight"));
}

TEST(NamePattern, AnInvalidExpressionIsRefusedWithRe2sReason) {
  EXPECT_NE(refusal("(a").find("missing )"), std::string::npos) << refusal("(a");
  EXPECT_NE(refusal("a(?=b)").find("perl operator"), std::string::npos) << refusal("a(?=b)");
  EXPECT_NE(refusal("(a)\\1").find("escape"), std::string::npos) << refusal("(a)\\1");
  EXPECT_NE(refusal("*"), "");
  EXPECT_NE(refusal("\xff"), "");
}

// A backtracking matcher would try every way to divide 4096 letters among the nested repeats of the
// first expression, more than 2^1000, and need a stack frame for each parenthesis of the second.
TEST(NamePattern, HostileExpressionsNeitherHangNorCrash) {
  const NamePattern nested("--experts", "(a+)+(a+)+(a+)+(a+)+$");
  EXPECT_FALSE(nested.finds(std::string(4096, 'a') + "b"));
  const std::string deep(30000, '(');
  refusal(deep + "a" + std::string(30000, ')'));  // may match or be refused, but must not crash
  EXPECT_NE(refusal("((((a{100}){100}){100}){100})"), "") << "a program of 10^8 instructions";
}

}  // namespace
}  // namespace modicum
