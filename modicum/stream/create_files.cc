#include "modicum/ranks/ranks.h"
#include "modicum/stream/save.h"

namespace modicum {

uint64_t create_file(const Manifest& manifest, uint32_t file, const SaveFiles& to, Space space) {
  const DataFile& described = manifest.files[checked_index("file", file, manifest.files.size())];
  const std::unique_ptr<File> out = to.files.create(join_path(to.directory, described.name));
  if (space == Space::reserved) {
    out->allocate(described.identity.size_bytes);
  } else {
    out->truncate(described.identity.size_bytes);
  }
  const std::string header = output_header(manifest, file);
  out->write(std::as_bytes(std::span(header)), 0);
  out->sync();
  out->close();
  return header.size();
}

uint64_t create_files(const Manifest& manifest, const SaveFiles& to, Board& board,
                      const FileShare& which) {
  checked_rank(which.rank, which.ranks);
  uint64_t written = 0;
  const auto ranks = static_cast<uint32_t>(which.ranks);
  for (auto f = static_cast<uint32_t>(which.rank); f < manifest.files.size(); f += ranks) {
    board.check();
    written += create_file(manifest, f, to);
  }
  return written;
}

}  // namespace modicum
