#include "modicum/stream/gathered_writer.h"

#include <algorithm>

namespace modicum {

GatheredWriter::GatheredWriter(const Manifest& manifest, const RankContext& at, const SaveFiles& to,
                               ChunkSums& sums)
    : manifest_(manifest), at_(at), sums_(sums), writer_(to.files, to.directory) {
  uint64_t end = 0;
  for (const DataFile& file : manifest.files) {
    begins_.push_back(end);
    // Each file begins with a new window of the Gather. So windows consist of whole pages of a
    // file, and no page is written by two ranks.
    end += round_up(file.identity.size_bytes, at.gather->slot_bytes());
  }
}

void GatheredWriter::put(const Extent& at, std::span<const std::byte> bytes) {
  at_.board->check();
  gathered_bytes_ += bytes.size();
  at_.gather->put(begins_[at.file] + at.begin, bytes,
                  [this](uint64_t to, std::span<const std::byte> all) { write(to, all); });
}

void GatheredWriter::write(uint64_t at, std::span<const std::byte> bytes) {
  const auto after = std::upper_bound(begins_.begin(), begins_.end(), at);
  const auto file = static_cast<uint32_t>(after - begins_.begin()) - 1;
  const uint64_t begin = at - begins_[file];
  writer_.write(manifest_.files[file].name, begin, bytes);
  at_.board->beat(at_.rank, bytes.size());
  sums_.add({file, begin, begin + bytes.size()}, bytes);
}

void GatheredWriter::finish(SaveOutcome& outcome) {
  at_.gather->finish([this](uint64_t to, std::span<const std::byte> all) { write(to, all); });
  writer_.finish();
  outcome.written_bytes += writer_.bytes_written();
  outcome.gathered_bytes += gathered_bytes_;
}

}  // namespace modicum
