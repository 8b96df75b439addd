// The public header of `checkpoint`: reads a safetensors directory into a validated Manifest, and
// writes such a directory.
//
// Opening reads only headers, the index and config.json (and refs/main of a cached model), with
// File::read. It validates the whole layout before it uses any size in it. A Manifest therefore
// needs no further checks. Every file that is accepted is also accepted by the safetensors library.
// docs/reference/formats.md has the rules.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "modicum/base/base.h"
#include "modicum/checkpoint/blob.h"        // IWYU pragma: export
#include "modicum/checkpoint/conversion.h"  // IWYU pragma: export
#include "modicum/checkpoint/durable.h"     // IWYU pragma: export
#include "modicum/checkpoint/run.h"         // IWYU pragma: export
#include "modicum/io/io.h"
#include "modicum/spec/spec.h"

namespace modicum {

// The members of config.json that Modicum reads; the defaults below if there is no such file. The
// file is optional, so a defect in it is a warning. The defect becomes an error only if a load
// needs a member that could not be read.
struct ModelConfig {
  std::string model_type;
  std::vector<std::string> architectures;
  std::string quant_method;          // quantization_config.quant_method; only for warnings
  bool tie_word_embeddings = false;  // true in the root or in a nested text_config
  // quantization_config.weight_block_size, of the root or of a nested text_config.
  std::optional<MatrixSize> weight_block_size;
  // Why tie_word_embeddings or weight_block_size is unknown (FORMAT, IO or CONFLICT): config.json
  // exists but can't be read, or has a wrong value for the member. The caller throws the fault when
  // it needs the member.
  std::optional<Error> tie_fault, block_size_fault;
};

// A model of the Hugging Face Hub.
struct HubModel {
  std::string name;      // ORG/NAME
  std::string revision;  // of the files: a commit
};

// An opened checkpoint. Keeps no file open. `files` must outlive it.
struct Checkpoint {
  FileSystem* files = nullptr;
  std::string directory;
  Manifest manifest;
  ModelConfig config;
  std::optional<HubModel> hub;                  // where the files are from, if that is known
  std::map<std::string, std::string> metadata;  // `__metadata__` of the first file
  std::vector<std::string> warnings;            // one line per defect that does not prevent loading
};

// Whether open_checkpoint compares a saved checkpoint with its record. `in_save`: for a save, which
// may itself be in flight in the directory.
enum class Record : uint8_t { compared, in_save, ignored };
// What the caller reads. `headers` also opens a directory of headers: its data files have their
// true headers and sizes, but holes in place of the values, and `.headers-only` has the model's
// name.
enum class Content : uint8_t { values, headers };

// `path` is one of:
//   - a directory with an index and its shards, with a single `*.safetensors` file, or with
//     model.safetensors among other files;
//   - the path of an index or of a safetensors file;
//   - the name of a model in the local Hugging Face cache (`org/name`; the network is not used).
// On failure throws FORMAT.*, INDEX.*, CONFLICT or IO, with the file and, if a tensor is at fault,
// the tensor; UNSUPPORTED for a directory of headers, unless `content` is `headers`.
//
// If the files are those of a checkpoint, or of the optimizer's state of a checkpoint, compares all
// headers and texts of the checkpoint (without kExtraDirectory) with its record, and puts the
// digests of values into Manifest::recorded. Then also throws the errors of open_run_checkpoint,
// and INTEGRITY. Without COMMIT only the tensor files are compared; without a record, too, throws
// UNCOMMITTED if a save into the directory is in flight or was interrupted.
Checkpoint open_checkpoint(FileSystem& files, const std::string& path,
                           Record record = Record::compared, Content content = Content::values);

// The path of a config.json without weights: `path`, if it is a .json file and no index, or that of
// config.json in a directory that has no weights in any format, no index and no saved checkpoints.
// nullopt for any other path.
std::optional<std::string> config_alone(FileSystem& files, const std::string& path);
// Whether `path` is the name of a model of which the cache has no weights, or not all: ORG/NAME,
// and nothing has this path. False if the cache can't be read.
bool is_uncached_name(FileSystem& files, const std::string& path);

// Opens data file `file` of the manifest. Throws CONFLICT if it has changed since its header was
// validated (device, inode, size, mtime or ctime differ). The reader must call `require_unchanged`
// after its last read, because a file that is overwritten in between gives mixed values.
std::unique_ptr<File> open_data_file(const Checkpoint& checkpoint, uint32_t file);

// The header of a safetensors file that holds these tensors in the given order, without gaps:
// length prefix and JSON, padded with spaces to a multiple of 8 bytes. Throws FORMAT.* if
// open_checkpoint would refuse the file.
std::string safetensors_header(std::span<const TensorSpec> tensors, const std::string& file,
                               const std::map<std::string, std::string>& metadata = {});

// The tensors of each data file of a checkpoint to be written, in the order in which the file has
// them: larger dtypes first, then by name, as the safetensors library orders them.
using FileSpecs = std::vector<std::vector<TensorSpec>>;

// Assigns tensors to files as transformers does: fills one file after another in the given order. A
// tensor that would take a file over the limit begins the next file. A tensor that alone is over
// the limit gets a separate file, which comes before the file being filled.
FileSpecs split_into_files(std::vector<TensorSpec> tensors, uint64_t limit_bytes);
// Puts tensor i into file number file_of[i]. The result has the files in ascending order of these
// numbers; numbers without a tensor are left out.
FileSpecs group_by_file(std::vector<TensorSpec> tensors, std::span<const uint32_t> file_of);

// "model-00001-of-00003.safetensors" for file 0 of 3; "model.safetensors" for a single file.
constexpr std::string_view kModelStem = "model";
constexpr std::string_view kAdapterStem = "adapter_model";  // as PEFT names its file
// kAdapterStem if the files of `manifest` are an adapter's, else kModelStem.
std::string_view stem_of(const Manifest& manifest);
std::string shard_name(size_t file, size_t files, std::string_view stem = kModelStem);
// Whether readers take a file of this name for weights of a whole model: model.safetensors, one of
// its shards, or the index.
bool is_weights_name(std::string_view name);

// The manifest of a checkpoint that is yet to be written. It equals the manifest of the written
// files, except that of each file's identity only the size is set, and that FP8 codes have no
// scales. Throws USAGE if there is no tensor, FORMAT.* if open_checkpoint would refuse a file, and
// UNSUPPORTED for an adapter in several files, which PEFT does not read, and for an index that
// would be too long to be read again.
Manifest output_manifest(FileSpecs files, std::string_view stem = kModelStem);
// The checkpoint with these tensors that could be next to `config`, the path of a config.json with
// this text. It has no files to open. Throws the errors of output_manifest.
Checkpoint unwritten_checkpoint(FileSystem& files, const std::string& config,
                                const std::string& text, const FileSpecs& tensors);
// The bytes of file `file` before its tensors.
std::string output_header(const Manifest& manifest, uint32_t file);
// The text of the index; empty for a single file, which needs none.
std::string output_index(const Manifest& manifest);
// The names of the files in the checkpoint's directory that are not weights but have the ending of
// a config, a tokenizer, a template or custom code: .json, .txt, .model, .py, .jinja, .tiktoken,
// .spm. Indexes, a checkpoint's manifest.json and names that begin with a dot are left out.
std::vector<std::string> companion_files(const Checkpoint& checkpoint);
// What config.json must say about a saved checkpoint whose dtypes differ from the source's.
struct NewForm {
  DType dtype;             // of fp32, bf16 and fp16, the one that takes the most bytes
  bool has_codes = false;  // some tensors are still FP8 codes with scales
};
// The number of tokens of a model whose token embeddings have other rows than the source's.
struct Vocabulary {
  std::string key;  // a config's member of this number, such as `vocab_size`
  uint64_t tokens = 0;
  // The `model_type` of the config that must have the member. If the text has no such config, one
  // of `outer_type` that has the member.
  std::string model_type, outer_type;
};
// What config.json must say otherwise than in the source.
struct ConfigChange {
  std::optional<NewForm> form;
  std::optional<Vocabulary> vocabulary;
};
struct NewConfig {
  std::string text;
  bool has_vocabulary = true;  // false: the text has no config for the changed vocabulary
};
// The updated text of config.json. For a form: sets the members `dtype` and `torch_dtype` where
// they are strings, in nested configs too, and removes `quantization_config` unless `has_codes`.
// For a vocabulary: sets its member. A text that is not a JSON object is returned unchanged.
NewConfig config_of(const std::string& config, const ConfigChange& change);
// Collects the saved tensors, and determines their NewForm. new_form returns nullopt if no dtype
// has changed.
class FormTally {
 public:
  // `stored` is the tensor of the source from which `saved` was made, or null.
  void add(const TensorSpec& saved, const StoredTensor* stored);
  std::optional<NewForm> new_form() const;

 private:
  bool is_changed_ = false, has_codes_ = false;
  std::map<DType, uint64_t> bytes_;
};
// The copied files, and a warning for each that was left out.
struct Companions {
  std::vector<CheckpointFile> copied;
  std::vector<std::string> warnings;
};
// Copies the files of these names from the source into `directory`, durably and in blocks;
// config_of updates config.json. Leaves out a file whose name is not UTF-8, which no
// record can hold, a dangling link, a link to a file that is not in own_directories, and a file
// that changes meanwhile; for config.json the last three are errors. Throws IO for any other file
// that can't be read, NOSPACE and CONFLICT.
Companions copy_companions(const Checkpoint& source, const std::vector<std::string>& names,
                           const ConfigChange& change, FileSystem& files,
                           const std::string& directory);
constexpr const char* kConfigFile = "config.json";
constexpr const char* kIndexFile = "model.safetensors.index.json";

// Writes one safetensors file with the header of safetensors_header. Not thread-safe.
class SafetensorsWriter {
 public:
  // Creates the file and writes its header. Throws CONFLICT if the file exists.
  SafetensorsWriter(FileSystem& files, const std::string& path, std::span<const TensorSpec> tensors,
                    const std::map<std::string, std::string>& metadata = {});
  // Writes `bytes` at byte `offset` of tensor `index`. Calls may come in any order.
  void write(size_t index, uint64_t offset, std::span<const std::byte> bytes);
  // Waits until the bytes written so far are on disk, so that `finish` need not wait for all.
  void sync();
  // Sets the file's length (bytes never written read as zero), syncs and closes.
  void finish();

  uint64_t data_bytes() const noexcept { return begins_.back(); }

 private:
  std::unique_ptr<File> file_;
  uint64_t header_bytes_ = 0;
  std::vector<uint64_t> begins_;  // offset of each tensor in the data, and the data's size
};

// The text of `model.safetensors.index.json` for (tensor, file name) pairs. Throws UNSUPPORTED if
// it would be too long to be read again.
std::string index_json(std::span<const std::pair<std::string, std::string>> file_of_tensor,
                       uint64_t total_bytes);

}  // namespace modicum
