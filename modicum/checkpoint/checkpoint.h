// The door of `checkpoint`: a safetensors directory <-> a proven Manifest.
//
// Reading opens headers and the index only, with File::read, and proves the whole layout before
// anything is sized by it: after that a Manifest needs no further checks. What is accepted is a
// subset of what the reference library accepts. docs/reference/formats.md gives the rules.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "modicum/base/base.h"
#include "modicum/io/io.h"
#include "modicum/spec/spec.h"

namespace modicum {

// What loading needs of config.json. All empty where there is none. The file is optional: what is
// wrong with it is a warning, and an error only for who depends on what it should have said.
struct ModelConfig {
  std::string model_type;
  std::vector<std::string> architectures;
  bool tie_word_embeddings = false;  // also from a nested text_config; only when it says so
  // quantization_config.weight_block_size, of the root or of a nested text_config.
  std::optional<MatrixSize> weight_block_size;
  // Where config.json is there, why it doesn't answer one of the two above (FORMAT, IO or CONFLICT,
  // naming it): it can't be read, or has a value of another type. To be thrown where the answer
  // decides about values.
  std::optional<Error> tie_fault, block_size_fault;
};

// An opened checkpoint. Holds no open file. `files` must outlive it.
struct Checkpoint {
  FileSystem* files = nullptr;
  std::string directory;
  Manifest manifest;
  ModelConfig config;
  std::map<std::string, std::string> metadata;  // `__metadata__` of the first file
  std::vector<std::string> warnings;            // what is optional and broken, unused or odd
};

// `path` is a directory with one `*.safetensors` file or an index and its shards, a single file, or
// the name of a model in the local Hugging Face cache (`org/name`; no network).
// Errors: FORMAT.*, INDEX.*, IO, each naming file and tensor.
Checkpoint open_checkpoint(FileSystem& files, const std::string& path);

// Opens data file `file` of the manifest. CONFLICT where it is no longer the file whose header was
// proven (device, inode, size, mtime or ctime differ). Whoever reads it calls `require_unchanged`
// after the last read: a file that is written over between the two would give mixed values.
std::unique_ptr<File> open_data_file(const Checkpoint& checkpoint, uint32_t file);

// The header of a safetensors file of these tensors, laid out in the order given without gaps:
// length prefix and JSON, padded with spaces to 8 bytes. FORMAT.* where open_checkpoint would
// refuse the file.
std::string safetensors_header(std::span<const TensorSpec> tensors, const std::string& file,
                               const std::map<std::string, std::string>& metadata = {});

// One safetensors file, written front to back. Its header is that of safetensors_header.
class SafetensorsWriter {
 public:
  // Creates the file (CONFLICT where it exists) and writes its header.
  SafetensorsWriter(FileSystem& files, const std::string& path, std::span<const TensorSpec> tensors,
                    const std::map<std::string, std::string>& metadata = {});
  // Writes bytes of tensor `index` from byte `offset` of that tensor on.
  void write(size_t index, uint64_t offset, std::span<const std::byte> bytes);
  // Sets the length (bytes never written read as zero), syncs and closes.
  void finish();

  uint64_t data_bytes() const noexcept { return begins_.back(); }

 private:
  std::unique_ptr<File> file_;
  uint64_t header_bytes_ = 0;
  std::vector<uint64_t> begins_;  // of each tensor within the data, and the end
};

// `model.safetensors.index.json` for tensors that stand in the named files.
std::string index_json(std::span<const std::pair<std::string, std::string>> file_of_tensor,
                       uint64_t total_bytes);

}  // namespace modicum
