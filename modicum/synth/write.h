// Writes a synthesised checkpoint.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "modicum/io/io.h"
#include "modicum/spec/spec.h"

namespace modicum {

struct SynthOptions {
  std::string arch;                           // a name of arch_names()
  int layers = 0;                             // 0: as many as the model has
  uint64_t shard_size_bytes = 5'000'000'000;  // of a file's data; a larger tensor has its own file
  std::optional<DType> dtype;                 // castable; default: as on the hub, codes and all
  bool is_sparse = false;                     // see SynthMark
  std::vector<int64_t> edges;                 // worlds; sparse only
  int threads = 1;
  // Called for each 4 MiB, by several threads; what it throws ends the writing.
  std::function<void()> check = [] {};
};

struct SynthResult {
  uint64_t files = 0;  // data files
  uint64_t tensors = 0;
  uint64_t data_bytes = 0;     // as the headers have it
  uint64_t written_bytes = 0;  // less where it is sparse
};

// Makes the directory `out` with `model.safetensors`, or `model-00001-of-0000N.safetensors` and an
// index, split and ordered as transformers does it, and config.json. Holds 4 MiB per thread and the
// list of tensors. Equal options make equal bytes on any number of threads.
//
// Throws CONFLICT where `out` exists, USAGE for options that make no sense, IO and NOSPACE, and
// what `check` throws. What was made is removed again when it throws.
SynthResult write_synth(FileSystem& files, const std::string& out, const SynthOptions& options);

}  // namespace modicum
