#include "modicum/recipe/name_pattern.h"

#include <fmt/format.h>
#include <re2/re2.h>

namespace modicum {
namespace {

// RE2's memory limit for the compiled expression and for searches; allows a thousand alternatives.
constexpr int64_t kMaxBytes = 8 << 20;

re2::RE2::Options options() {
  re2::RE2::Options options;
  options.set_max_mem(kMaxBytes);
  options.set_never_capture(true);  // so that thousands of groups cost nothing
  options.set_log_errors(false);    // this library never prints
  return options;
}

}  // namespace

NamePattern::NamePattern(std::string_view flag, std::string_view expression)
    : expression_(std::make_unique<re2::RE2>(re2::StringPiece(expression.data(), expression.size()),
                                             options())) {
  if (expression_->ok()) return;
  fail(Category::usage,
       fmt::format("{} is not a regular expression of RE2: {}", flag,
                   printable(expression_->error())),
       {.expected = "the syntax of https://github.com/google/re2/wiki/Syntax",
        .got = printable(expression)});
}

NamePattern::NamePattern(NamePattern&&) noexcept = default;
NamePattern::~NamePattern() = default;

bool NamePattern::finds(std::string_view name) const {
  return re2::RE2::PartialMatch(re2::StringPiece(name.data(), name.size()), *expression_);
}

}  // namespace modicum
