// The expected values for the check of a load: read a second time, or computed for a checkpoint of
// `synth`. Part of the public header of `runs`.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "modicum/checkpoint/checkpoint.h"
#include "modicum/io/io.h"
#include "modicum/synth/synth.h"

namespace modicum {

// Supplies the stored elements of a checkpoint to `check_values`. They are computed if `synth` has
// written the checkpoint, else read again. A transposed tensor is requested element by element, so
// requests of less than a page are answered from a cache of pages, at most 32 MiB. Each call first
// calls `heartbeat`, whose exceptions end the check. One thread; the checkpoint must outlive this
// object. Throws IO or CONFLICT.
class Expectation {
 public:
  Expectation(const Checkpoint& checkpoint, std::function<void()> heartbeat);
  void operator()(uint32_t stored, int64_t first, int64_t n, std::span<std::byte> out);

 private:
  void open(uint32_t file);
  void read(uint64_t begin, std::span<std::byte> out);
  void copy_from_pages(uint64_t begin, std::span<std::byte> out);
  std::span<const std::byte> page(uint64_t index);

  const Checkpoint& checkpoint_;
  const std::function<void()> heartbeat_;
  const std::optional<SynthMark> mark_;
  std::unique_ptr<File> file_;
  uint32_t file_index_ = 0;
  std::unordered_map<uint64_t, std::vector<std::byte>> pages_;  // of file_, by page index
};

}  // namespace modicum
