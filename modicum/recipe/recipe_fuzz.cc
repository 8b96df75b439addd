// Parses recipes over four stored tensors. recipe_text of an accepted recipe must parse to a recipe
// with the same text.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "modicum/base/base.h"
#include "modicum/recipe/recipe.h"

namespace modicum {
namespace {

Manifest stored_tensors() {
  Manifest manifest;
  manifest.files.push_back({.name = "model.safetensors", .header_bytes = 8});
  const auto add = [&](const char* fqn, DType dtype, std::vector<int64_t> shape) {
    StoredTensor stored{.spec = {.fqn = fqn, .dtype = dtype, .shape = std::move(shape)}};
    const uint64_t begin = manifest.tensors.empty() ? 8 : manifest.tensors.back().at.end;
    stored.at = {.file = 0,
                 .begin = begin,
                 .end = begin + *checked_bytes(stored.spec.dtype, stored.spec.shape)};
    manifest.tensors.push_back(std::move(stored));
  };
  add("a", DType::f32, {4, 6});
  add("b", DType::bf16, {4, 6});
  add("c", DType::f32, {2, 3, 4});
  add("d", DType::i64, {});
  return manifest;
}

void parse(std::string_view text) {
  static const Manifest manifest = stored_tensors();
  const Recipe recipe = parse_recipe(text, manifest);
  const std::string written = recipe_text(recipe, manifest);
  MODICUM_ASSERT(recipe_text(parse_recipe(written, manifest), manifest) == written);
}

}  // namespace
}  // namespace modicum

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    modicum::parse({reinterpret_cast<const char*>(data), size});
  } catch (const modicum::Error& error) {
    MODICUM_ASSERT(error.category() != modicum::Category::internal);
  }
  return 0;
}
