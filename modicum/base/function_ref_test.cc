#include "modicum/base/function_ref.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <type_traits>
#include <utility>

namespace modicum {
namespace {

using Step = FunctionRef<int(int)>;

// A FunctionRef is two words, passed in registers, and never null.
static_assert(sizeof(Step) == 2 * sizeof(void*));
static_assert(std::is_trivially_copyable_v<Step>);
static_assert(!std::is_default_constructible_v<Step>);
static_assert(!std::is_constructible_v<Step, std::nullptr_t>);
// It converts from callables with a matching signature; a const object needs a const operator().
static_assert(!std::is_constructible_v<Step, std::string (*)(int)>);
static_assert(!std::is_constructible_v<Step, int (*)(std::string)>);
struct CountsCalls {
  int operator()(int by) { return calls += by; }
  int calls = 0;
};
static_assert(std::is_constructible_v<Step, CountsCalls&>);
static_assert(!std::is_constructible_v<Step, const CountsCalls&>);

int twice(Step step, int value) { return step(step(value)); }
int plus_one(int value) { return value + 1; }

TEST(FunctionRef, CallsLambdasFunctionsAndPointers) {
  int by = 3;
  EXPECT_EQ(twice([&](int value) { return value + by; }, 1), 7);
  EXPECT_EQ(twice(plus_one, 1), 3);
  EXPECT_EQ(twice(&plus_one, 1), 3);
  const auto negated = [](int value) { return -value; };
  EXPECT_EQ(twice(negated, 5), 5);
}

TEST(FunctionRef, CallsTheObjectItselfAndNoCopyOfIt) {
  CountsCalls counter;
  const Step step = counter;
  const Step copy = step;
  step(1);
  copy(10);
  EXPECT_EQ(counter.calls, 11);
}

TEST(FunctionRef, PassesArgumentsAndResultsOn) {
  std::string text = "a";
  FunctionRef<std::string&(std::string&)>(
      [](std::string& argument) -> std::string& { return argument += "b"; })(text) += "c";
  EXPECT_EQ(text, "abc");
  const auto unwrap = [](std::unique_ptr<int> owned) { return *owned; };
  EXPECT_EQ((FunctionRef<int(std::unique_ptr<int>)>(unwrap)(std::make_unique<int>(4))), 4);
}

TEST(FunctionRef, DiscardsTheResultForAVoidSignature) {
  int seen = 0;
  const auto remember = [&](int value) { return seen = value; };
  FunctionRef<void(int)>{remember}(9);
  EXPECT_EQ(seen, 9);
}

TEST(FunctionRef, RefusesANullFunctionPointer) {
  int (*none)(int) = nullptr;
  EXPECT_THROW(twice(none, 1), Error);
}

}  // namespace
}  // namespace modicum
