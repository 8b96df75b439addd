#include "modicum/synth/write.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <span>
#include <utility>

#include "modicum/base/base.h"
#include "modicum/checkpoint/checkpoint.h"
#include "modicum/synth/arch.h"
#include "modicum/synth/mark.h"

namespace modicum {
namespace {

constexpr int64_t kChunkBytes = static_cast<int64_t>(4 * kMiB);

// Neighbouring elements that one worker computes, then writes with one call.
struct Chunk {
  size_t tensor = 0;
  ElementRange elements;
};

int64_t elements_per_chunk(DType dtype) {
  const int64_t granule = synth_granule(dtype);
  return kChunkBytes * 8 / bits_per_element(dtype) / granule * granule;
}

uint64_t bytes_to_write(const FileSpecs& shards, const SynthMark& mark) {
  uint64_t bytes = 0;
  for (const std::vector<TensorSpec>& tensors : shards) {
    for (const TensorSpec& spec : tensors) {
      for (const ElementRange& range : synth_written(mark, spec, 0, numel_of(spec.shape))) {
        bytes += bytes_of(spec.dtype, range.end - range.begin);
      }
    }
  }
  return bytes;
}

// The progress over all files.
struct WrittenBytes {
  const uint64_t total_bytes;
  uint64_t bytes = 0;
};

std::vector<Chunk> chunks_of(std::span<const TensorSpec> tensors, const SynthMark& mark) {
  std::vector<Chunk> chunks;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t step = elements_per_chunk(tensors[i].dtype);
    for (const ElementRange& range :
         synth_written(mark, tensors[i], 0, numel_of(tensors[i].shape))) {
      for (int64_t begin = range.begin; begin < range.end; begin += step) {
        chunks.push_back({i, {begin, std::min(begin + step, range.end)}});
      }
    }
  }
  return chunks;
}

// Writes the tensors of one file. Workers compute chunks in parallel and write one at a time.
class FileFiller {
 public:
  FileFiller(SafetensorsWriter& writer, std::span<const TensorSpec> tensors, const SynthMark& mark,
             const SynthOptions& options, WrittenBytes& written)
      : writer_(writer),
        tensors_(tensors),
        mark_(mark),
        options_(options),
        written_(written),
        chunks_(chunks_of(tensors, mark)) {}

  void run() {
    const auto workers = std::min<size_t>(static_cast<size_t>(options_.threads), chunks_.size());
    if (workers > 0) run_workers(static_cast<int>(workers), [this](int) { work(); });
  }

 private:
  void work() {
    std::vector<std::byte> slot;
    try {
      for (size_t i = next_++; i < chunks_.size(); i = next_++) write(chunks_[i], slot);
    } catch (...) {
      next_ = chunks_.size();  // the other workers stop after their current chunk
      throw;
    }
  }

  void write(const Chunk& chunk, std::vector<std::byte>& slot) {
    options_.check();
    const TensorSpec& spec = tensors_[chunk.tensor];
    const int64_t n = chunk.elements.end - chunk.elements.begin;
    slot.resize(bytes_of(spec.dtype, n));
    synth_expected(mark_, spec, chunk.elements.begin, n, slot.data());
    const std::lock_guard lock(mutex_);
    writer_.write(chunk.tensor, bytes_of(spec.dtype, chunk.elements.begin), slot);
    written_.bytes += slot.size();
    options_.show(written_.bytes, written_.total_bytes);
  }

  SafetensorsWriter& writer_;
  std::span<const TensorSpec> tensors_;
  const SynthMark& mark_;
  const SynthOptions& options_;
  WrittenBytes& written_;
  std::vector<Chunk> chunks_;
  std::atomic<size_t> next_ = 0;
  std::mutex mutex_;
};

// Creates a directory and files in it. The destructor removes them unless finish() has returned.
class NewDirectory {
 public:
  NewDirectory(FileSystem& files, const std::string& path)
      : files_(files), path_(real_directory(files, path)) {
    files_.make_directory(path_);
  }
  NewDirectory(const NewDirectory&) = delete;
  NewDirectory& operator=(const NewDirectory&) = delete;
  ~NewDirectory() {
    if (is_finished_) return;
    for (const std::string& file : created_) remove(file);
    remove(path_);
  }

  std::string add(const std::string& name) {
    created_.push_back(join_path(path_, name));
    return created_.back();
  }

  void add_text(const std::string& name, const std::string& text) {
    const auto file = files_.create(add(name));
    file->write(std::as_bytes(std::span(text)), 0);
    file->sync();
    file->close();
  }

  void finish() {
    files_.sync_directory(path_);
    is_finished_ = true;
  }

 private:
  void remove(const std::string& path) noexcept {
    try {
      files_.remove(path);
    } catch (const Error&) {
      // The failure that led here is reported instead.
    }
  }

  FileSystem& files_;
  std::string path_;
  std::vector<std::string> created_;
  bool is_finished_ = false;
};

void refuse(const char* what_happened, const std::string& got) {
  fail(Category::usage, what_happened, {.got = got});
}

void check(const SynthOptions& options) {
  if (options.shard_size_bytes == 0) refuse("the shard size must not be 0 bytes", "--shard-size 0");
  if (options.threads < 1)
    refuse("the number of threads must be at least 1", std::to_string(options.threads));
  if (options.dtype && !is_castable(*options.dtype)) {
    refuse("the dtype of a model must be float32, bfloat16 or float16",
           std::string(torch_name(*options.dtype)));
  }
  if (!options.edges.empty() && !options.is_sparse) {
    fail(Category::usage, "--edges needs --sparse");
  }
  for (const int64_t world : options.edges) {
    if (world < 1) refuse("a world size must be at least 1", std::to_string(world));
  }
}

std::string index_of(const FileSpecs& shards, uint64_t data_bytes) {
  std::vector<std::pair<std::string, std::string>> file_of_tensor;
  for (size_t i = 0; i < shards.size(); ++i) {
    for (const TensorSpec& spec : shards[i]) {
      file_of_tensor.emplace_back(spec.fqn, shard_name(i, shards.size()));
    }
  }
  std::sort(file_of_tensor.begin(), file_of_tensor.end());
  return index_json(file_of_tensor, data_bytes);
}

}  // namespace

SynthResult write_synth(FileSystem& files, const std::string& out, const SynthOptions& options) {
  check(options);
  const Arch& arch = arch_named(options.arch);
  const auto shards =
      split_into_files(arch_tensors(arch, options.layers, options.dtype), options.shard_size_bytes);
  const SynthMark mark{options.is_sparse, options.edges};

  NewDirectory directory(files, out);
  SynthResult result;
  WrittenBytes written{bytes_to_write(shards, mark)};
  result.files = shards.size();
  for (size_t i = 0; i < shards.size(); ++i) {
    SafetensorsWriter writer(files, directory.add(shard_name(i, shards.size())), shards[i],
                             synth_metadata(mark));
    FileFiller(writer, shards[i], mark, options, written).run();
    writer.finish();
    result.tensors += shards[i].size();
    result.data_bytes += writer.data_bytes();
  }
  result.written_bytes = written.bytes;
  if (shards.size() > 1) {
    directory.add_text(kIndexFile, index_of(shards, result.data_bytes));
  }
  directory.add_text("config.json", arch_config(arch, options.layers, options.dtype));
  directory.finish();
  return result;
}

}  // namespace modicum
