#include "modicum/stream/verify.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string_view>

#include "modicum/kernels/kernels.h"
#include "modicum/stream/sums.h"

namespace modicum {
namespace {

class Verify {
 public:
  Verify(FileSystem& files, const std::string& path, FunctionRef<void()> poll,
         const VerifyPart& part)
      : files_(files),
        checkpoint_(open_run_checkpoint(files, path)),
        poll_(poll),
        part_(part),
        buffer_(ChunkSums::kChunkBytes) {}

  // `is_enough`: whether to end before the values of tensors if a file has a fault.
  Verification run(bool is_enough) {
    for (const CheckpointFile& file : checkpoint_.record.files) {
      out_.files.push_back({file.name, file.bytes, std::nullopt});
      guarded(out_.files.back(), [&] { check_digested(file); });
    }
    if (is_enough && out_.first_fault() != nullptr) return std::move(out_);
    check_part("", checkpoint_.record.tensors);
    if (!checkpoint_.record.state.empty()) check_part(kStateFolder, checkpoint_.record.state);
    return std::move(out_);
  }

 private:
  // Whether the error ends the call.
  static bool is_ending(const Error& error) {
    return error.category() == Category::cancelled || error.category() == Category::preempted;
  }

  static void guarded(VerifiedFile& file, FunctionRef<void()> check) {
    try {
      check();
    } catch (const Error& error) {
      if (is_ending(error)) throw;
      if (!file.fault) file.fault = error;
    }
  }

  // Whether the next read is in this caller's part.
  bool is_own_turn() { return turn_++ % part_.count == part_.index; }

  void check_digested(const CheckpointFile& file) {
    if (!is_own_turn()) return;
    poll_();
    check_digest(files_, checkpoint_.path, file);
  }

  using TensorsByName = std::map<std::string_view, const CheckpointTensor*>;

  // Checks the tensors in a folder of the checkpoint. Where they can't be opened together, as by a
  // damaged index, checks those of each file by itself.
  void check_part(const std::string& folder, const std::vector<CheckpointTensor>& tensors) {
    TensorsByName recorded;
    for (const CheckpointTensor& tensor : tensors) recorded[tensor.spec.fqn] = &tensor;
    if (const std::optional<Checkpoint> part = opened(folder)) {
      check_tensors(*part, folder, recorded);
      if (out_.first_fault() == nullptr && part->manifest.tensors.size() != recorded.size()) {
        fail(Category::integrity, "the checkpoint's record lists more tensors than its files hold",
             {.expected = fmt::format("{} tensors", recorded.size()),
              .got = fmt::format("{} tensors", part->manifest.tensors.size())});
      }
      return;
    }
    for (VerifiedFile& file : out_.files) {
      const bool is_inside = file.name.starts_with(kStateFolder) == (folder == kStateFolder);
      if (!is_inside || !file.name.ends_with(".safetensors") || file.fault) continue;
      guarded(file, [&] {
        const std::string path = join_path(checkpoint_.path, file.name);
        check_tensors(open_checkpoint(files_, path, Record::ignored), folder, recorded);
      });
    }
  }

  // The files of a folder, opened together; empty if they can't be. Then a file has a fault: one
  // that was found before, or this one, of the file that it names.
  std::optional<Checkpoint> opened(const std::string& folder) {
    try {
      return open_checkpoint(files_, join_path(checkpoint_.path, folder), Record::ignored);
    } catch (const Error& error) {
      if (is_ending(error)) throw;
      if (out_.first_fault() != nullptr) return std::nullopt;
      Facts facts = error.facts();
      facts.file = folder + facts.file;
      const auto file = find(facts.file);
      const Error named(error.category(), error.what_happened(), std::move(facts));
      if (file == out_.files.end()) throw named;
      file->fault = named;
      return std::nullopt;
    }
  }

  std::vector<VerifiedFile>::iterator find(const std::string& name) {
    return std::find_if(out_.files.begin(), out_.files.end(),
                        [&](const VerifiedFile& verified) { return verified.name == name; });
  }

  // Each header is verified by check_digested, of this or another caller, so that a wrong offset of
  // a tensor is a fault, too.
  void check_tensors(const Checkpoint& checkpoint, const std::string& folder,
                     const TensorsByName& recorded) {
    for (const StoredTensor& stored : checkpoint.manifest.tensors) {
      const std::string name = folder + checkpoint.manifest.files[stored.at.file].name;
      const auto file = find(name);
      if (file == out_.files.end()) {
        fail(Category::integrity, "the checkpoint's record does not list this file",
             {.file = name});
      }
      const auto entry = recorded.find(stored.spec.fqn);
      guarded(*file, [&] {
        if (entry == recorded.end()) {
          fail(Category::integrity, "the checkpoint's record does not list this tensor",
               {.file = name, .tensor = stored.spec.fqn});
        }
        if (entry->second->spec != stored.spec) {
          fail(Category::integrity, "the checkpoint's record lists another dtype or shape",
               {.file = name,
                .tensor = stored.spec.fqn,
                .expected = tensor_text(entry->second->spec.dtype, entry->second->spec.shape),
                .got = tensor_text(stored.spec.dtype, stored.spec.shape)});
        }
        check_tensor(checkpoint, stored, *entry->second);
        ++out_.tensors_checked;
      });
    }
  }

  void check_tensor(const Checkpoint& checkpoint, const StoredTensor& stored,
                    const CheckpointTensor& record) {
    const auto unit = static_cast<uint64_t>(std::max(8, bits_per_element(stored.spec.dtype))) / 8;
    const std::unique_ptr<File> file = open_data_file(checkpoint, stored.at.file);
    const uint64_t seed = digest_seed(stored.spec);
    uint64_t chunk = 0;
    for (uint64_t at = 0; at < stored.at.bytes(); at += ChunkSums::kChunkBytes, ++chunk) {
      if (!is_own_turn()) continue;
      poll_();
      const std::span<std::byte> bytes =
          std::span(buffer_).first(std::min<uint64_t>(buffer_.size(), stored.at.bytes() - at));
      file->read(bytes, stored.at.begin + at);
      file->drop_cached(stored.at.begin + at, stored.at.begin + at + bytes.size());
      const auto require = [&](std::string_view kind, const std::vector<uint64_t>& recorded,
                               uint64_t got) {
        if (chunk < recorded.size() && got == recorded[chunk]) return;
        fail(Category::integrity, "the values are not those that were saved",
             {.file = file->name(),
              .tensor = stored.spec.fqn,
              .offset = stored.at.begin + at,
              .expected = chunk < recorded.size() ? fmt::format("{} {:016x}", kind, recorded[chunk])
                                                  : "no more elements",
              .got = fmt::format("{:016x}", got)});
      };
      require(
          "digest", record.chunks,
          digest_run(seed, bytes.data(), static_cast<int>(unit), static_cast<int64_t>(at / unit),
                     static_cast<int64_t>(bytes.size() / unit)));
      if (!record.checksums.empty())
        require("checksum", record.checksums, checksum_run(seed, at, bytes));
    }
  }

  FileSystem& files_;
  const RunCheckpoint checkpoint_;
  const FunctionRef<void()> poll_;
  const VerifyPart part_;
  uint64_t turn_ = 0;
  std::vector<std::byte> buffer_;
  Verification out_;
};

}  // namespace

const Error* Verification::first_fault() const noexcept {
  for (const VerifiedFile& file : files) {
    if (file.fault) return &*file.fault;
  }
  return nullptr;
}

Verification verify_checkpoint(FileSystem& files, const std::string& path, FunctionRef<void()> poll,
                               const VerifyPart& part) {
  return Verify(files, path, poll, part).run(/*is_enough=*/false);
}

std::optional<Error> damage_of_checkpoint(FileSystem& files, const std::string& path,
                                          FunctionRef<void()> poll, const VerifyPart& part) {
  try {
    const Verification verified = Verify(files, path, poll, part).run(/*is_enough=*/true);
    for (const VerifiedFile& file : verified.files) {
      if (file.fault && is_damage(file.fault->category())) return file.fault;
    }
    if (const Error* const fault = verified.first_fault()) throw *fault;
    return std::nullopt;
  } catch (const Error& error) {
    if (!is_damage(error.category())) throw;
    return error;
  }
}

}  // namespace modicum
