// Assigns tensors to files as transformers does. Internal to `synth`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "modicum/spec/spec.h"

namespace modicum {

// Fills one file after another in the given order. A tensor that would take a file over the limit
// begins the next one. A tensor over the limit gets a file of its own, which comes before the file
// being filled. Within a file: larger dtypes first, then by name, as the safetensors library
// writes.
std::vector<std::vector<TensorSpec>> split_into_files(std::vector<TensorSpec> tensors,
                                                      uint64_t limit_bytes);

// "model-00001-of-00003.safetensors" for file 0 of 3; "model.safetensors" for a single file.
std::string shard_name(size_t file, size_t files);

}  // namespace modicum
