// RecipeBuilder for Python: over tensors of which dtype and shape are known, and no file.
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string_view.h>

#include <map>
#include <utility>
#include <vector>

#include "modicum/python/bindings.h"

namespace modicum::python {
namespace {

using Described = std::pair<std::string, std::vector<int64_t>>;  // dtype, shape

Manifest manifest_of(const std::map<std::string, Described>& stored) {
  Manifest manifest;
  manifest.tensors.reserve(stored.size());
  for (const auto& [fqn, described] : stored) {
    manifest.tensors.push_back({spec_of(fqn, described.first, described.second), {}});
  }
  return manifest;
}

struct Held {
  const Manifest manifest;
};
// A builder refers to its manifest, which is a base so that it is made first; the two never move.
struct DescribedBuilder : Held, RecipeBuilder {
  explicit DescribedBuilder(const std::map<std::string, Described>& stored)
      : Held{manifest_of(stored)}, RecipeBuilder(manifest) {}
  DescribedBuilder(const DescribedBuilder&) = delete;
  DescribedBuilder& operator=(const DescribedBuilder&) = delete;
};

// An op as a method of the class that is bound.
template <typename... Args>
auto op(uint32_t (RecipeBuilder::*of)(Args...)) {
  return static_cast<uint32_t (DescribedBuilder::*)(Args...)>(of);
}

Described described(const DescribedBuilder& builder, uint32_t node) {
  const Node& made = builder.node(node);
  return {std::string(torch_name(made.dtype)), made.shape};
}

}  // namespace

void define_recipe_builder(nb::module_& module) {
  nb::class_<DescribedBuilder>(module, "RecipeBuilder", R"(What index maps make of stored tensors.

Each call adds a node (docs/reference/recipes.md) and returns its number. No element is touched.

Args:
    stored: dtype and shape by name.

Raises:
    UsageError: MISMATCH where shapes or dtypes do not go together, UNSUPPORTED for a dtype that is
        not known and for more than eight dims; the constructor and every call.)")
      .def(nb::init<const std::map<std::string, Described>&>(), "stored"_a)
      .def("stored", op<std::string_view>(&RecipeBuilder::stored), "name"_a,
           "A tensor of the checkpoint.")
      .def("cat", op(&RecipeBuilder::cat), "dim"_a, "inputs"_a,
           "The inputs one after the other along `dim`.")
      .def("stack", op(&RecipeBuilder::stack), "dim"_a, "inputs"_a, "The inputs along a new dim.")
      .def("slice", op(&RecipeBuilder::slice), "dim"_a, "start"_a, "stop"_a, "input"_a,
           "`[start, stop)` of `dim`.")
      .def("permute", op(&RecipeBuilder::permute), "dims"_a, "input"_a,
           "Dim k of the node is dim `dims[k]` of the input.")
      .def("reshape", op(&RecipeBuilder::reshape), "shape"_a, "input"_a,
           "The same row-major elements under another shape.")
      .def("described", described, "node"_a, "Dtype and shape of a node.");
}

}  // namespace modicum::python
