// Types and conversions that the bindings share. Internal to `python`.
//
// The threads of a torch load. load() converts its arguments, releases the GIL, and takes it again
// for each call into Python, so that heartbeats and other Python threads run meanwhile:
//
//   Python                            load(), on the calling thread      workers of the stream
//   ------                            -----------------------------      ---------------------
//   load(plan, rank, board, ...)  ->  convert the arguments
//                                     release the GIL
//   peers.agree(digest)           <-  compare the plans of all ranks
//                                     commit the Arena                   read, cast, scatter
//   caller(ordinal)               <-  get a tensor that the model makes    :
//   read(...), broadcast(...)     <-  read rank 0's dict; exchange         :
//   copy(target, at, view)        <-------------------------------------  elements for a device
//   signal handlers               <-  Board::failure, every 50 ms        Board::failure
//   peers.report(error)           <-------------------------------------  the first error, once
//   board.fail(what), any thread  ->  throw PEER                         throw PEER
//                                     take the GIL
//   loaded.storage(target)        <-  Part: the bytes of one target and their charge
//   array -> DLPack -> Parameter      The array owns its Part; the Parts share the Arena.
//
// An exception in a call into Python fails the load, and load() raises it. The caller's memory that
// the load writes to (`given`) is kept alive until load() returns.
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
#include "modicum/memory/memory.h"
#include "modicum/plan/plan.h"
#include "modicum/recipe/recipe.h"
#include "modicum/stream/stream.h"

namespace modicum::python {

namespace nb = nanobind;
using namespace nb::literals;  // "name"_a

using OptionalText = std::optional<std::string>;
// Bytes, or text in the syntax of the command line: "1.5GiB".
using Size = std::variant<int64_t, std::string>;
std::string text_of(const Size& size);
uint64_t bytes_of(const Size& size);

// The value of an int. Throws USAGE if it is negative or has more than 64 bits.
uint64_t seed_of(const nb::int_& seed);

// Runs `function` without the GIL.
template <typename Function>
auto without_the_lock(const Function& function) {
  const nb::gil_scoped_release released;
  return function();
}

nb::dict as_dict(const std::string& document);  // parses a JSON document
// dict(name=value, ...)
template <typename... Items>
nb::dict dict_of(Items&&... items) {
  const nb::handle type(reinterpret_cast<PyObject*>(&PyDict_Type));
  return nb::borrow<nb::dict>(type(std::forward<Items>(items)...));
}
template <typename Value>
nb::tuple tuple_of(const std::vector<Value>& values) {
  return nb::tuple(nb::cast(values));
}

// `dtype` is torch's name. Throws UNSUPPORTED if no stored tensor can have this dtype.
TensorSpec spec_of(const std::string& fqn, const std::string& dtype,
                   const std::vector<int64_t>& shape);

// Checkpoint, Recipe and Plan in Python. Each shares ownership of the values that it refers to.
struct OpenCheckpoint {
  std::unique_ptr<FileSystem> files = std::make_unique<PosixFileSystem>();
  Checkpoint checkpoint;
};
struct MadeRecipe {
  std::shared_ptr<const OpenCheckpoint> source;
  Recipe recipe;
};
struct MadePlan {
  std::shared_ptr<MadeRecipe> recipe;
  Plan plan;

  const Checkpoint& checkpoint() const noexcept { return recipe->source->checkpoint; }
};

// The report of this process to the `modicum watch` that runs it. A forked child has another one.
// The caller must hold the GIL.
const Reporter& reporter_here();

void define_files(nb::module_& module);
// What a rank has compared of a checkpoint, as text; "" without a record.
std::string text_of_compared(const ComparedChunks& compared);
// Adds the text of another rank. Throws INTEGRITY if it is not such a text.
void merge_compared(const std::string& text, ComparedChunks& all);

void define_source(nb::module_& module);
void define_values(nb::module_& module);
void define_recipe_builder(nb::module_& module);
void define_load(nb::module_& module);
void define_masters(nb::module_& module);
void define_optim(nb::module_& module);
void define_save(nb::module_& module);
void define_probe(nb::module_& module);
void define_main_thread(nb::module_& module);
void define_worker_signals(nb::module_& module);
void define_reporting(nb::module_& module);

}  // namespace modicum::python
