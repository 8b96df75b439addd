// Which tensor goes into which file, as transformers decides it. Internal to `synth`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "modicum/spec/spec.h"

namespace modicum {

// Fills file after file in the order given; a tensor that would take a file over the limit begins
// the next one, and one that is over the limit alone has its own file, which goes before the one
// being filled. Within a file: larger dtypes first, then by name, as the safetensors library
// writes.
std::vector<std::vector<TensorSpec>> split_into_files(std::vector<TensorSpec> tensors,
                                                      uint64_t limit_bytes);

// "model.safetensors" where it is the only one, else "model-00001-of-00003.safetensors" for 0 of 3.
std::string shard_name(size_t file, size_t files);

}  // namespace modicum
