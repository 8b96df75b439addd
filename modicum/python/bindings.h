// What the binding files share. Internal to `python`.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "modicum/checkpoint/checkpoint.h"
#include "modicum/io/io.h"
#include "modicum/plan/plan.h"
#include "modicum/recipe/recipe.h"

namespace modicum::python {

namespace nb = nanobind;
using namespace nb::literals;  // "name"_a

// Bytes, or what the command line takes: "1.5GiB".
using Size = std::variant<int64_t, std::string>;
std::string text_of(const Size& size);
uint64_t bytes_of(const Size& size);

// USAGE for an int that is negative or has more than 64 bits.
uint64_t seed_of(const nb::int_& seed);

// What takes long runs without the interpreter's lock.
template <typename Function>
auto without_the_lock(const Function& function) {
  const nb::gil_scoped_release released;
  return function();
}

nb::dict as_dict(const std::string& document);
// As Python's dict(name=value, ...).
template <typename... Items>
nb::dict dict_of(Items&&... items) {
  const nb::handle type(reinterpret_cast<PyObject*>(&PyDict_Type));
  return nb::borrow<nb::dict>(type(std::forward<Items>(items)...));
}
template <typename Value>
nb::tuple tuple_of(const std::vector<Value>& values) {
  return nb::tuple(nb::cast(values));
}

// A tensor as Python describes it; UNSUPPORTED for a dtype that no checkpoint has.
TensorSpec spec_of(const std::string& fqn, const std::string& dtype,
                   const std::vector<int64_t>& shape);

// `rank`; USAGE where it is none of `ranks`.
int checked_rank(int rank, int ranks);

// The values of a walk as Python holds them: each keeps alive what it refers to.
struct OpenCheckpoint {
  std::unique_ptr<FileSystem> files = std::make_unique<PosixFileSystem>();
  Checkpoint checkpoint;
};
struct MadeRecipe {
  std::shared_ptr<const OpenCheckpoint> of;
  Recipe recipe;
};
struct MadePlan {
  std::shared_ptr<MadeRecipe> recipe;
  Plan plan;

  const Checkpoint& checkpoint() const noexcept { return recipe->of->checkpoint; }
};

void define_source(nb::module_& module);
void define_values(nb::module_& module);
void define_recipe_builder(nb::module_& module);
void define_load(nb::module_& module);
void define_optim(nb::module_& module);
void define_probe(nb::module_& module);

}  // namespace modicum::python
