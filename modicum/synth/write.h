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
  std::optional<DType> dtype;                 // castable; default: as on the hub, quantised
  bool is_sparse = false;                     // see SynthMark
  std::vector<int64_t> edges;                 // world sizes; sparse only
  int threads = 1;
  // Cancellation callback: polled every 4 MiB by every thread; an exception aborts the call.
  std::function<void()> check = [] {};
};

struct SynthResult {
  uint64_t files = 0;  // data files
  uint64_t tensors = 0;
  uint64_t data_bytes = 0;     // sum over the tensors
  uint64_t written_bytes = 0;  // less than data_bytes if sparse
};

// On success the directory `out` holds config.json and `model.safetensors`, or
// `model-00001-of-0000N.safetensors` and an index, split and ordered as transformers does. Equal
// options give equal bytes for any number of threads. Holds 4 MiB per thread and the list of
// tensors.
//
// On failure throws CONFLICT (`out` exists), USAGE (invalid options), IO, NOSPACE, or the exception
// of `check`, and removes the files that it has created.
SynthResult write_synth(FileSystem& files, const std::string& out, const SynthOptions& options);

}  // namespace modicum
