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
  std::string arch;  // a name of arch_names()
  int layers = 0;    // 0: as many as the model has
  // The most data of a file. A larger tensor has a file of its own.
  uint64_t shard_size_bytes = 5'000'000'000;
  std::optional<DType> dtype;  // f32, bf16 or f16; nullopt: as on the hub, see arch.h
  bool is_sparse = false;      // see SynthMark
  std::vector<int64_t> edges;  // world sizes, see SynthMark; only if is_sparse
  int threads = 1;
  // Called before each chunk of at most 4 MiB, by the thread that will write it. An exception ends
  // write_synth.
  std::function<void()> check = [] {};
  // Called after each chunk, by one thread at a time.
  std::function<void(uint64_t written_bytes, uint64_t total_bytes)> show = [](uint64_t, uint64_t) {
  };
};

struct SynthResult {
  uint64_t files = 0;  // data files
  uint64_t tensors = 0;
  uint64_t data_bytes = 0;     // sum over the tensors
  uint64_t written_bytes = 0;  // data_bytes without the holes of sparse files
};

// Creates the directory `out` with config.json and `model.safetensors`, or several files
// `model-00001-of-0000N.safetensors` and an index. Tensors are ordered and divided among files as
// by transformers. The same options give the same bytes, for any number of threads. Memory: 4 MiB
// per thread, and the list of tensors.
//
// Throws CONFLICT if `out` exists, USAGE for invalid options, IO, NOSPACE, or the exception of
// `check`. On failure it removes the files and the directory that it has created.
SynthResult write_synth(FileSystem& files, const std::string& out, const SynthOptions& options);

}  // namespace modicum
