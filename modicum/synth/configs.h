// The files of modicum/synth/configs, which the build embeds (cmake/embed.cmake). Internal to
// `synth`.
//
// ARCH.json.in is a model's config.json as on the hub, with placeholders: @layers, @types (of
// attention, one per layer), @mtp (the number of MTP layers), @dtype, and @quantization (the lines
// of a second file, or none). tiny-moe and tiny-fp8 are not on the hub; their files have the keys
// of their family. The files of gpt2 and gpt-oss-20b have a dtype, which the hub's files lack. The
// file of deepseek-v3 lacks the hub's auto_map, because `synth` does not write the Python files
// that auto_map names.
#pragma once

#include <string_view>

namespace modicum {

// The text of configs/FILE_NAME; empty if there is no such file. Lives as long as the program.
std::string_view config_file(std::string_view file_name);

}  // namespace modicum
