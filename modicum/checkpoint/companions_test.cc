#include <gtest/gtest.h>

#include "modicum/checkpoint/test_files_doubles.h"

namespace modicum {
namespace {

// Catches: a comma too many or too few; an edit of the same name inside a string or a list; a key
// that is found only if it is written without escapes.
TEST(ConfigOf, ChangesOnlyDtypeAndQuantizationConfig) {
  for (const auto& [from, to] : std::vector<std::pair<std::string, std::string>>{
           {R"({"dtype": "float32", "a": 1.0e-5})", R"({"dtype": "bfloat16", "a": 1.0e-5})"},
           {R"({"a": [1, {"dtype": "float8"}], "torch_dtype":"float32"})",
            R"({"a": [1, {"dtype": "float8"}], "torch_dtype":"bfloat16"})"},
           {R"({"text_config": {"dtype": "float32"}})",
            R"({"text_config": {"dtype": "bfloat16"}})"},
           {R"({"thinker": {"text": {"dtype": "float32", "quantization_config": 1}}})",
            R"({"thinker": {"text": {"dtype": "bfloat16"}}})"},
           {R"({"quantization_config": {"b": ["}", "\"]"]}, "a": 1})", R"({"a": 1})"},
           {R"({"a": "quantization_config", "quantization_config": null})",
            R"({"a": "quantization_config"})"},
           {R"({"a": 1, "quantization_config" : [2] , "b": 2})", R"({"a": 1, "b": 2})"},
           {R"({"quantization_config": 5})", R"({})"},
           {R"({"a": 1, "quantization\u005fconfig": 2})", R"({"a": 1})"},
           {R"({"dtype": null})", R"({"dtype": null})"},
           {"[1", "[1"}}) {
    EXPECT_EQ(config_of(from, {DType::bf16}), to);
  }
}

// Catches: FP8 codes that are saved without the `quantization_config` that is needed to read them.
TEST(ConfigOf, SavedFp8CodesKeepQuantizationConfig) {
  EXPECT_EQ(config_of(R"({"dtype": "float16", "quantization_config": {"dtype": "float16"}})",
                      {DType::bf16, true}),
            R"({"dtype": "bfloat16", "quantization_config": {"dtype": "float16"}})");
}

}  // namespace
}  // namespace modicum
