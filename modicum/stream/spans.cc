#include "modicum/stream/spans.h"

#include <algorithm>
#include <optional>

#include "modicum/stream/data_writer.h"
#include "modicum/stream/gathered_writer.h"
#include "modicum/stream/rank_workers.h"
#include "modicum/stream/reader.h"
#include "modicum/stream/stream.h"

namespace modicum {
namespace {

constexpr uint64_t kMaxBytes = 8 * kMiB;  // per read or write, so that heartbeats are frequent

// Calls `fn` for each part of at most `most` bytes.
template <typename Fn>
void in_parts(const StoredSpan& span, uint64_t most, const Fn& fn) {
  for (uint64_t done = 0; done < span.bytes.size(); done += most) {
    const uint64_t n = std::min<uint64_t>(most, span.bytes.size() - done);
    fn(StoredSpan{span.stored, span.at + done, span.bytes.subspan(done, n), span.is_repeated});
  }
}

}  // namespace

SaveOutcome save_spans(const SpansSave& what, Spans spans, const SaveFiles& to, ChunkSums& sums) {
  const RankContext& at = what.at;
  SaveOutcome outcome;
  Buffer staging;
  if (what.snapshot == nullptr) {
    run_rank_workers(*at.board, at.rank, 1, [&](int) {
      outcome.written_bytes = create_files(what.manifest, to, *at.board, {at.rank, what.ranks});
    });
    at.board->barrier(at.rank);
  } else {
    staging = at.ledger->charge(Purpose::staging, kSnapshotStagingBytes);
  }
  // The bytes to save for a part of the memory: with a snapshot, the values at its time.
  const auto values_of = [&](std::span<const std::byte> bytes) {
    if (what.snapshot == nullptr) return bytes;
    what.snapshot->read({bytes.data(), bytes.size()}, staging.bytes().data());
    return std::span<const std::byte>(staging.bytes().first(bytes.size()));
  };
  run_rank_workers(*at.board, at.rank, 1, [&](int) {
    DataWriter writer(to.files, to.directory);
    std::optional<GatheredWriter> gathered;
    if (at.gather != nullptr) gathered.emplace(what.manifest, at, to, sums);
    spans([&](const StoredSpan& span) {
      in_parts(span, staging.empty() ? kMaxBytes : staging.bytes().size(), [&](const auto& part) {
        at.board->check();
        const Extent& stored = what.manifest.tensors[part.stored].at;
        const std::span<const std::byte> bytes = values_of(part.bytes);
        if (gathered && bytes.size() < DataWriter::kSmallBytes) {
          const uint64_t begin = stored.begin + part.at;
          return gathered->put({stored.file, begin, begin + bytes.size()}, bytes);
        }
        writer.write(what.manifest.files[stored.file].name, stored.begin + part.at, bytes);
        sums.add(part.stored, part.at, bytes);
        at.board->beat(at.rank, part.bytes.size());
      });
    });
    if (gathered) gathered->finish(outcome);
    writer.finish();
    outcome.written_bytes += writer.bytes_written();
  });
  return outcome;
}

uint64_t load_spans(const Checkpoint& checkpoint, Spans spans, const RankContext& at,
                    ComparedChunks& compared) {
  uint64_t read = 0;
  run_rank_workers(*at.board, at.rank, 1, [&](int) {
    DataReader reader(checkpoint);
    spans([&](const StoredSpan& span) {
      in_parts(span, kMaxBytes, [&](const StoredSpan& part) {
        at.board->check();
        const Extent& stored = checkpoint.manifest.tensors[part.stored].at;
        reader.read(stored.file, stored.begin + part.at, part.bytes);
        if (!part.is_repeated) compared.add(part.stored, part.at, part.bytes);
        at.board->beat(at.rank, part.bytes.size());
      });
    });
    reader.finish();
    read = reader.bytes_read();
  });
  return read;
}

}  // namespace modicum
