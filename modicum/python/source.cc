// A checkpoint of tensors in rank 0's memory: a File whose `read` calls Python.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "modicum/python/arrays.h"
#include "modicum/python/bindings.h"

namespace modicum::python {
namespace {

constexpr const char* kName = "rank-0-memory.safetensors";

using DescribedTensor = std::tuple<std::string, std::string, std::vector<int64_t>>;

// The contents of the checkpoint's only file: a generated safetensors header and the tensors'
// bytes.
//
//   0          begins[0] = header.size()   begins[1]          begins[n]
//   | header   | tensor 0                  | tensor 1 ...     | end
struct CallersTensors {
  std::string header;
  std::vector<uint64_t> begins;  // offset of each tensor in the file, then the file's size
  // read(index, offset, view) fills `view` with a tensor's bytes from `offset` on. None on ranks
  // other than 0.
  nb::object read;
};

[[noreturn]] void refuse_change() {
  fail(Category::internal, "tensors in memory are read-only", {.file = kName});
}

class CallerFile final : public File {
 public:
  explicit CallerFile(const CallersTensors& tensors) : tensors_(tensors), name_(kName) {}

  const std::string& name() const noexcept override { return name_; }
  FileIdentity identity() override {
    FileIdentity identity;
    identity.size_bytes = tensors_.begins.back();
    return identity;
  }
  void read(std::span<std::byte> out, uint64_t offset) override {
    if (offset < tensors_.header.size()) {
      const auto rest = std::as_bytes(std::span(tensors_.header)).subspan(offset);
      const uint64_t n = std::min(out.size(), rest.size());
      std::copy_n(rest.begin(), n, out.begin());
      out = out.subspan(n);
      offset += n;
    }
    if (!out.empty()) read_tensors(out, offset);
  }
  void write(std::span<const std::byte>, uint64_t) override { refuse_change(); }
  void truncate(uint64_t) override { refuse_change(); }
  void allocate(uint64_t) override { refuse_change(); }
  void sync() override { refuse_change(); }
  void close() override {}
  // Memory has no page cache. All bytes count as cached, since no read goes to storage.
  bool read_around(std::span<std::byte>, uint64_t, std::span<std::byte>) noexcept override {
    return false;
  }
  std::optional<uint64_t> cached_bytes(uint64_t begin, uint64_t end) noexcept override {
    return end - begin;
  }
  void drop_cached(uint64_t, uint64_t) noexcept override {}
  void start_writeback(uint64_t, uint64_t) override {}
  void finish_writeback(uint64_t, uint64_t) override {}

 private:
  void read_tensors(std::span<std::byte> out, uint64_t offset) {
    if (offset > tensors_.begins.back() || out.size() > tensors_.begins.back() - offset) {
      fail(Category::format_trunc, "the file ends inside the range to read",
           {.file = name_, .offset = offset});
    }
    const nb::gil_scoped_acquire acquired;
    if (tensors_.read.is_none()) {
      fail(Category::internal, "only rank 0 can read its memory", {.file = name_});
    }
    while (!out.empty()) {
      const auto after = std::upper_bound(tensors_.begins.begin(), tensors_.begins.end(), offset);
      const uint64_t n = std::min<uint64_t>(out.size(), *after - offset);
      tensors_.read(after - tensors_.begins.begin() - 1, offset - *std::prev(after),
                    view_of(out.first(n)));
      out = out.subspan(n);
      offset += n;
    }
  }

  const CallersTensors& tensors_;
  const std::string name_;
};

// A directory that contains only this file.
class CallerFiles final : public FileSystem {
 public:
  explicit CallerFiles(CallersTensors tensors) : tensors_(std::move(tensors)) {}

  std::unique_ptr<File> open(const std::string&) override {
    return std::make_unique<CallerFile>(tensors_);
  }
  bool exists(const std::string& path) override { return base_name(path) == kName; }
  std::string link_target(const std::string&) override { return {}; }
  std::optional<DirectoryEntry> entry(const std::string& path) override {
    return exists(path) ? std::optional(DirectoryEntry{.is_regular = true}) : std::nullopt;
  }
  bool is_directory(const std::string&) override { return false; }
  std::vector<std::string> list(const std::string&) override { return {kName}; }
  std::unique_ptr<File> create(const std::string&) override { refuse_change(); }
  std::unique_ptr<File> open_to_write(const std::string&) override { refuse_change(); }
  void make_directory(const std::string&) override { refuse_change(); }
  void rename(const std::string&, const std::string&) override { refuse_change(); }
  void rename_new(const std::string&, const std::string&) override { refuse_change(); }
  void remove(const std::string&) override { refuse_change(); }
  void remove_tree(const std::string&) override { refuse_change(); }
  void empty_directory(const std::string&) override { refuse_change(); }
  bool sync_directory(const std::string&) override { refuse_change(); }
  std::unique_ptr<LockedFile> lock(const std::string&) override { refuse_change(); }
  std::optional<SeenFile> look_at(const std::string&) override { return std::nullopt; }
  bool is_of_one_kernel(const std::string&) noexcept override { return false; }

 private:
  const CallersTensors tensors_;
};

std::shared_ptr<OpenCheckpoint> open_tensors(const std::vector<DescribedTensor>& tensors,
                                             nb::object read) {
  std::vector<TensorSpec> specs;
  for (const auto& [name, dtype, shape] : tensors) specs.push_back(spec_of(name, dtype, shape));
  CallersTensors source{safetensors_header(specs, kName), {}, std::move(read)};
  source.begins.push_back(source.header.size());
  for (const TensorSpec& spec : specs) {
    source.begins.push_back(source.begins.back() + bytes_of(spec.dtype, numel_of(spec.shape)));
  }
  auto opened = std::make_shared<OpenCheckpoint>();
  opened->files = std::make_unique<CallerFiles>(std::move(source));
  opened->checkpoint = open_checkpoint(*opened->files, kName);
  opened->checkpoint.manifest.only_rank_0 = true;
  return opened;
}

}  // namespace

void define_source(nb::module_& module) {
  module.def("open_tensors", open_tensors, "tensors"_a, "read"_a.none(),
             R"(A checkpoint of tensors in rank 0's memory. Only rank 0 can read their bytes.

Args:
    tensors: (name, dtype, shape) each; equal on every rank.
    read: on rank 0, read(index, offset, view) fills `view` with a tensor's bytes from `offset` on;
        it is called on the thread of load(). None on other ranks.

Raises:
    FormatError: the tensors make no valid checkpoint.
    UsageError: a dtype is unknown.)");
}

}  // namespace modicum::python
