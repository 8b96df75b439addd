#include <fmt/format.h>

#include "modicum/base/base.h"
#include "modicum/stream/save.h"

namespace modicum {
namespace {

std::string path_of_sums(int rank, const SaveFiles& in) {
  return join_path(in.directory, fmt::format("{}{:05}", kSumsPrefix, rank));
}

}  // namespace

void hand_over_sums(const ChunkSums& sums, int rank, const SaveFiles& to) {
  const auto file = to.files.create(path_of_sums(rank, to));
  file->write(sums.bytes(), 0);
  file->close();
}

CompletedFiles complete_files(const Manifest& manifest, uint64_t point, int ranks,
                              const SaveFiles& to) {
  ChunkSums sums(manifest, point);
  for (int rank = 0; rank < ranks; ++rank) {
    const std::string path = path_of_sums(rank, to);
    const std::string bytes =
        read_text(*to.files.open(path), sums.most_bytes(), Category::integrity);
    sums.merge(std::as_bytes(std::span(bytes)));
    to.files.remove(path);
  }
  sums.prove();

  CompletedFiles completed;
  for (uint32_t f = 0; f < manifest.files.size(); ++f) {
    const std::string header = output_header(manifest, f);
    completed.files.push_back({manifest.files[f].name, manifest.files[f].identity.size_bytes,
                               header.size(), digest_of(header)});
  }
  completed.tensors.reserve(manifest.tensors.size());
  for (uint32_t s = 0; s < manifest.tensors.size(); ++s) {
    CheckpointTensor& tensor = completed.tensors.emplace_back();
    tensor.spec = manifest.tensors[s].spec;
    const std::span<const ChunkSum> chunks = sums.of_tensor(s);
    tensor.chunks.reserve(chunks.size());
    tensor.checksums.reserve(chunks.size());
    for (const ChunkSum& chunk : chunks) {
      tensor.chunks.push_back(chunk.digest);
      tensor.checksums.push_back(chunk.checksum);
    }
  }
  if (const std::string index = output_index(manifest); !index.empty()) {
    write_durably(to.files, join_path(to.directory, kIndexFile), index);
    completed.files.push_back({kIndexFile, index.size(), index.size(), digest_of(index)});
  }
  return completed;
}

}  // namespace modicum
