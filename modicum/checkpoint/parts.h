// Internal to `checkpoint`: declarations that its sources share. R1 to R30 are the rules of
// docs/reference/formats.md.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "modicum/checkpoint/checkpoint.h"
#include "modicum/checkpoint/run.h"
#include "modicum/json/json.h"

namespace modicum {

constexpr uint64_t kLargestHeader = 100'000'000;  // not 100 MiB: safetensors' limit
constexpr uint64_t kLengthPrefix = 8;
constexpr uint64_t kLongestConfig = 16 * kMiB;
constexpr std::string_view kMetadataKey = "__metadata__";

// The validated header of one safetensors file (R1 to R20). data_offsets in the JSON count from the
// end of the header, extents from the start of the file:
//
//   0             8                           header_bytes            size_bytes
//   | u64 length  | JSON, padded with spaces  | tensors without gaps  |
//
// data_offsets [0, 8) are extent [header_bytes, header_bytes + 8).
struct Header {
  DataFile file;
  std::vector<StoredTensor>
      tensors;  // sorted by (begin, end, name); offsets count from the file's start
  std::map<std::string, std::string> metadata;
};
// Reads only the length prefix and the JSON. `file_index` becomes Extent::file.
Header read_header(File& file, uint32_t file_index);

// Whether `path` has the form of a model's name on the hub, ORG/NAME.
bool is_hub_name(std::string_view path);
std::string cache_directory();  // of the Hugging Face Hub on this machine
struct CachedModel {
  std::string directory;
  HubModel model;
  bool is_whole = false;  // otherwise weights are missing: perhaps it is a tokenizer alone
};
// `org/name` -> CACHE/models--org--name/snapshots/REV, where REV is the content of refs/main; the
// name of an old model has no `org/`. nullopt if `path` is no such name, or is not in the cache.
std::optional<CachedModel> cached_snapshot(FileSystem& files, const std::string& path);
// In a directory of headers; holds `ORG/NAME@REVISION`.
constexpr const char* kHeadersFile = ".headers-only";
// The model of which a directory has only the headers; nullopt for other directories.
std::optional<HubModel> model_of_headers(FileSystem& files, const std::string& directory);

// Whether a directory has an entry of this name. Unlike with `exists`, a dangling link counts.
bool is_listed(FileSystem& files, const std::string& directory, const std::string& name);

// Names under a root; see run.h.
constexpr std::string_view kPartialPrefix = ".partial-";
constexpr std::string_view kTrashPrefix = ".trash-";
constexpr std::string_view kLatestPrefix = ".latest-";
constexpr std::string_view kDamagedPrefix = ".damaged-";
std::string step_name(int64_t step);
// The owner in a name that consists of `prefix` and STEP-HOST-PID-STARTED-UUID; empty for any other
// name.
std::optional<SaveOwner> owner_in(std::string_view name, std::string_view prefix);
// The numbers of the names step-N in a root, the highest first.
std::vector<int64_t> step_numbers(FileSystem& files, const std::string& root);
// Removes the directory `name` of `root`. Renames it first, so that a partly removed checkpoint is
// never visible. Returns why its files stay in a .trash-UUID; empty if they are removed. Throws if
// it is not renamed.
std::string remove_by_trash(FileSystem& files, const std::string& root, const std::string& name);

// R30: whether a file of this name has a format that executes code when it is read.
bool is_pickle(std::string_view name);
bool is_link(FileSystem& files, const std::string& path);  // a symbolic one

// The name of the file that defines the checkpoint in a directory: an index, or a data file. Throws
// INDEX.AMBIGUOUS if there are several, and the other errors of open_checkpoint if there is none.
std::string defining_file(FileSystem& files, const std::string& directory);

// The record of a saved checkpoint for a checkpoint in it: the model, or the
// optimizer's state.
class RecordComparison {
 public:
  // Compares the headers and texts of the checkpoint, extra files excluded, with its record. `path`
  // is as for open_checkpoint; nothing is compared if it has no record. Throws INTEGRITY,
  // UNCOMMITTED for the files of a save in flight unless `in_save`, and the errors of
  // open_run_checkpoint.
  RecordComparison(FileSystem& files, const std::string& path, bool in_save);
  // Sets Manifest::recorded, unless none of the files is in the record. Throws INTEGRITY if a
  // tensor is not in the record, or with another dtype or shape.
  void add_to(Manifest& manifest) const;

 private:
  bool compare_in(FileSystem& files, const std::string& root);
  void compare_uncommitted(FileSystem& files, const std::string& root);
  bool lists(const std::string& name) const;

  CheckpointRecord record_;
  std::string prefix_;  // of the files in the saved checkpoint: "" or "optimizer/"
};

// Checks rule R8. Throws FORMAT.NAME.
void prove_name(std::string_view name, const std::string& file);
// Returns the size of a tensor in bytes. Checks the limits of R12 and R13. Throws FORMAT.OVERFLOW
// or FORMAT.ALIGN.
uint64_t proven_bytes(const TensorSpec& spec, const std::string& file);

// The header of a safetensors file, as safetensors_header returns it.
class HeaderText {
 public:
  // `bytes`: its length, if known, so that no more is allocated.
  explicit HeaderText(const std::map<std::string, std::string>& metadata, uint64_t bytes = 0);
  // Adds a tensor at bytes [begin, end) of the data.
  void add(const TensorSpec& spec, uint64_t begin, uint64_t end);
  // Moves the header out. Throws FORMAT.LIMIT, naming the file.
  std::string take(const std::string& file);

 private:
  JsonWriter json_;
};

// model.safetensors.index.json, validated as far as possible without its shards (R21, R22).
struct Index {
  std::string name;                                       // the index's own file name
  std::vector<std::string> files;                         // sorted
  std::vector<std::pair<std::string, uint32_t>> file_of;  // tensor name, index into `files`
  std::optional<int64_t> total_size;                      // empty if absent or not a plain integer
  std::vector<std::string> warnings;
};
Index read_index(File& file);
// Checks R24. Throws INDEX.MISSING_SHARD with the names of all missing files.
void prove_shards_exist(const Index& index, FileSystem& files, const std::string& directory);
// Checks R25 to R28. `manifest` must have the tensors of the index's files. Adds warnings. Throws
// INDEX.MISSING_TENSOR or INDEX.DUP.
void prove_index(const Index& index, const Manifest& manifest, std::vector<std::string>& warnings);

// Pairs each tensor of FP8 codes with its scale: the tensor NAME_scale_inv, else NAME_scale. The
// block size is the result of block_of. If block_of has none, it is the result of likely_block, and
// a warning is added; likely_block is not called if the config's block size could not be read. If
// neither has a result, the block size is 0 x 0, for which BlockScale::fits is false, and a warning
// is added.
void pair_scales(Manifest& manifest, const ModelConfig& config, std::vector<std::string>& warnings);

// The value of Manifest::identity.
Digest identity_of(const Manifest& manifest);
// Throws FORMAT.OVERFLOW if all tensors together exceed kMaxModelBytes. Only sparse files can be so
// large.
void require_countable(const Manifest& manifest);

// `names`: the files in the checkpoint's directory. Adds warnings for safetensors files that are
// not in the manifest, for pickled weights and for an adapter's config.
void warn_of_unread_files(const std::vector<std::string>& names, const Manifest& manifest,
                          std::vector<std::string>& warnings);

// Parses config.json. Each defect is a warning. A defect of a member on which loaded values depend
// is also recorded as the result's tie_fault or block_size_fault.
ModelConfig parse_config(const std::string& text, std::vector<std::string>& warnings);
// The result for a config.json that can't be read.
ModelConfig unread_config(const Error& fault, std::vector<std::string>& warnings);

}  // namespace modicum
